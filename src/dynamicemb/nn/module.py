"""What the modules share: tables, autograd, optimizer steps, saving."""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamicemb.errors import DynamicEmbError, UsageError, check_number
from dynamicemb.nn.checks import OUTPUT_DTYPES
from dynamicemb.nn.gradients import PendingGradients
from dynamicemb.optimizers import Optimizer, OptimizerArgs
from dynamicemb.routing import Routing
from dynamicemb.table import Lookup, Pooling, Table, create_group
from dynamicemb.table.content import NAMES, optimizer_kind

#: Lookups of compiled models that wait for their backward; older ones are given up.
_MAX_WAITING = 64

_keys = itertools.count()
_modules: weakref.WeakValueDictionary[int, DynamicModule] = weakref.WeakValueDictionary()


_owners: weakref.WeakValueDictionary[int, DynamicModule] = weakref.WeakValueDictionary()


def owner_of(parameter: torch.Tensor) -> DynamicModule | None:
    """The module whose handle ``parameter`` is."""
    module = _owners.get(id(parameter))
    return module if module is not None and module.handle is parameter else None


def module_of(key: int) -> DynamicModule:
    """The module that a compiled graph calls by number."""
    module = _modules.get(key)
    if module is None:
        raise UsageError(f"the dynamic embedding module number {key} of this graph is gone")
    return module


@dataclass
class Plan:
    """A checked call, not changed any more: the ids to look up, and how they become the output.

    ``keep``: where padding ids were left out, the places (int64) of the others among the ``count``
    ids of the call.
    """

    ids: torch.Tensor
    bounds: Sequence[int] | torch.Tensor
    pooling: Pooling
    count: int
    keep: torch.Tensor | None = None


class Prefetched:
    """A batch that waits for its forward, made on the stream that is current now.

    ``lookup``: ``None`` if its rows are being read ahead. ``counts``: of the ids, if given.
    """

    def __init__(self, plan: Plan, lookup: Lookup | None, counts: torch.Tensor | None) -> None:
        self.plan, self.lookup, self.counts = plan, lookup, counts
        self._made: Any = None
        if plan.ids.is_cuda:
            self._made = torch.cuda.current_stream(plan.ids.device).record_event()

    def order(self) -> None:
        """Let the current stream use what another one may have made."""
        if self._made is not None:
            stream = torch.cuda.current_stream(self.plan.ids.device)
            stream.wait_event(self._made)
            for tensor in (self.plan.ids, self.plan.bounds, self.counts):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)


class DynamicModule(nn.Module, ABC):
    """Tables as a module.

    Rows are updated in one of two ways. With a fused ``optimizer``, in backward. Without, by a
    ``torch.optim`` optimizer that was given this module's parameters, or by :meth:`step`: then
    gradients of several backwards add up until the step, and ``zero_grad`` forgets them.

    The one parameter, ``handle``, has one element that means nothing: it ties the rows to autograd
    and to an optimizer. Its gradient is the norm of the rows' gradients, so that
    ``clip_grad_norm_`` and ``GradScaler`` work.

    ``routings``: where the tables are spread over ranks, the routing of each by its name, over the
    ranks of ``process_group``; ``None``: every id belongs here.
    """

    routings: Mapping[str, Routing] | None = None
    process_group: Any = None  # a torch.distributed.ProcessGroup

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[int],
        *,
        output_dtype: torch.dtype,
        fused: bool,
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.features = tuple(features)
        self.output_dtype = output_dtype
        self.fused = fused
        self.handle = nn.Parameter(torch.zeros(1, device=self.device))
        self._attach()

    def _attach(self) -> None:
        """Set up what belongs to this object and is not copied or pickled."""
        self._group = create_group(self.tables)
        self._prefetched: deque[Prefetched] = deque()
        self._waiting: OrderedDict[int, Lookup] = OrderedDict()
        self._pending = PendingGradients(self._group, self.handle)
        self._key = next(_keys)
        _modules[self._key] = self
        _owners[id(self.handle)] = self

    # ---- lookups ----

    @cached_property
    def output_columns(self) -> int:
        """Columns of a pooled output."""
        return sum(n * table.dim for n, table in zip(self.features, self.tables, strict=True))

    @property
    def device(self) -> torch.device:
        """Where the tables are, and ids and gradients must be."""
        return self.tables[0].device

    @property
    @abstractmethod
    def pooled(self) -> bool:
        """Whether ids are summed to bags."""

    @abstractmethod
    def plan(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> Plan:
        """Check the arguments of a call, or raise without any change."""

    def lookup(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output for 1-D ids; with a graph where one is wanted."""
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.dynamicemb.lookup(
                self.handle, ids, offsets, weights, self._key, self.training
            )[0]
            return out
        return self.look_up(self.plan(ids, offsets, weights), weights)

    def look_up(self, plan: Plan, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The output of a checked call; with a graph where one is wanted."""
        if self.training and torch.is_grad_enabled():
            rows: torch.Tensor = _RowLookup.apply(self.handle, weights, self, plan)
            return rows
        return self.compute(plan)[0]

    def compute(self, plan: Plan) -> tuple[torch.Tensor, Lookup | None]:
        """(output, lookup); no lookup outside training."""
        pooling = plan.pooling
        if pooling.pooled:
            shape = (pooling.batch_size, self.output_columns)
        else:
            shape = (plan.ids.numel(), self.tables[0].dim)
        out = torch.empty(shape, dtype=pooling.dtype, device=self.device)
        found = None
        if self.training:
            found = self._train(plan, out)
        else:
            self.evaluate(plan, out)
        if plan.keep is not None and not pooling.pooled:
            padded = torch.zeros(plan.count, shape[1], dtype=pooling.dtype, device=self.device)
            out = padded.index_copy_(0, plan.keep, out)
        return out, found

    def evaluate(self, plan: Plan, out: torch.Tensor) -> None:
        """Write the rows of a lookup that changes nothing, padding left out."""
        self._group.evaluate(plan.ids, plan.bounds, plan.pooling, out)

    def _train(self, plan: Plan, out: torch.Tensor) -> Lookup:
        """One training batch, which may have been prefetched, and the rows that it reads."""
        if not self._prefetched:
            return self.find_or_insert(plan, out=out)
        with self._group.together:
            found = self._next_prefetched(plan)
            self._group.read(found, plan.pooling, out)
        return found

    def _next_prefetched(self, plan: Plan) -> Lookup:
        oldest = self._prefetched[0]
        oldest.order()
        expected, lookup = oldest.plan, oldest.lookup
        if not _equal_bounds(plan.bounds, expected.bounds) or not torch.equal(
            plan.ids, expected.ids
        ):
            raise UsageError(
                f"forward with {len(plan.ids)} ids, but the oldest prefetched batch, of "
                f"{len(expected.ids)} ids, is another one; use batches in the order of prefetching"
            )
        if lookup is None:
            lookup = self.find_or_insert(expected, oldest.counts)
            self._group.end_read_ahead()
        self._prefetched.popleft()
        return lookup

    @property
    def prefetched(self) -> int:
        """Batches that were prefetched and wait for their forward."""
        return len(self._prefetched)

    def find_or_insert(
        self,
        plan: Plan,
        counts: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Lookup:
        """One training batch on the tables; the rows of prefetched batches stay. ``out``: for the
        rows that it reads, where no batch is prefetched and no counts are given."""
        for table in self.tables:
            if not table.options.training:
                raise UsageError(
                    f"forward in training mode, but table {table.name!r} has training=False; call "
                    "eval() first"
                )
        self._check_handle()
        if out is not None:
            return self._group.train(plan.ids, plan.bounds, plan.pooling, out)
        return self._group.find_or_insert(
            plan.ids,
            plan.bounds,
            counts=counts,
            protect=[one.lookup for one in self._prefetched if one.lookup is not None],
        )

    def _check_handle(self) -> None:
        """Refuse what would leave rows untrained, or train them on each rank apart, unnoticed."""
        if not self.fused and owner_of(self.handle) is not self:
            raise UsageError(
                "another parameter is in the place of a dynamic embedding's handle, so that no "
                "optimizer would train its rows; FSDP and functional_call do that: leave the "
                "handle out (ignored_params), or use a fused optimizer (optimizer=EmbOptimType...)"
            )
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None or wrapper.process_group.size() == 1:
            return
        if any(one is self.handle for one in wrapper._module_parameters):
            raise UsageError(
                "a dynamic embedding inside DistributedDataParallel, which does not keep its rows "
                "equal on all ranks; allowed: it around the rest of the model, or TorchRec's "
                "DistributedModelParallel with our sharders"
            )

    def propagate(
        self, plan: Plan, lookup: Lookup, gradient: torch.Tensor, *, rows: bool, weights: bool
    ) -> torch.Tensor | None:
        """Take the gradient of an output, for the rows unless they are frozen; returns that of the
        weights if it is wanted."""
        pooling = plan.pooling
        gradient = gradient.to(pooling.dtype)
        if plan.keep is not None and not pooling.pooled:
            gradient = gradient.index_select(0, plan.keep)
        gradient = gradient.contiguous()
        weight_gradient = None
        if weights:
            weight_gradient = self._group.weight_gradient(lookup, pooling, gradient)
            if plan.keep is not None:
                padded = torch.zeros(plan.count, device=self.device)
                weight_gradient = padded.index_copy_(0, plan.keep, weight_gradient)
        if not rows:
            return weight_gradient
        if self.fused:
            self._group.update(lookup, pooling, gradient)
        else:
            self._pending.add(lookup, pooling, gradient)
        return weight_gradient

    # ---- compiled models keep a number instead of a lookup ----

    def park(self, lookup: Lookup) -> int:
        number = next(_keys)
        self._waiting[number] = lookup
        while len(self._waiting) > _MAX_WAITING:  # forwards without a backward
            self._waiting.popitem(last=False)
        return number

    def unpark(self, number: int) -> Lookup:
        lookup = self._waiting.pop(number, None)
        if lookup is None:
            raise UsageError(
                "backward of a lookup that is not known any more: it ran before, or more than "
                f"{_MAX_WAITING} forwards came between"
            )
        return lookup

    # ---- optimizer ----

    def step(self) -> None:
        """Update the rows once with the gradients of all backwards since the last step or
        ``zero_grad``; for modules that are neither fused nor given to a ``torch.optim`` class."""
        if self.fused:
            raise UsageError("step() on a module whose optimizer is fused: backward updates rows")
        self._pending.apply()
        self.handle.grad = None
        self._pending.clear()

    def apply_torch_optimizer(self, optimizer: Optimizer) -> None:
        """One step of a ``torch.optim`` optimizer on the rows that have gradients."""
        if not self._pending:
            return
        for table in self.tables:
            table.set_optimizer(optimizer)
        self._pending.apply()

    def set_learning_rate(self, lr: float) -> None:
        """The learning rate of the fused optimizer (or of :meth:`step`) from the next update on."""
        lr = check_number("lr", lr, minimum=0.0)
        for table in self.tables:
            table.optimizer.set_learning_rate(lr)

    # ---- saving ----

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in self.tables:
            for name, tensor in table.state_dict().items():
                destination[f"{prefix}{table.name}.{name}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = dict(state_dict)
        # assign=True would put another handle in the place of the one that optimizers know.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        contents = {}
        for table in self.tables:
            keys = {name: f"{prefix}{table.name}.{name}" for name in NAMES}
            absent = [key for key in keys.values() if key not in rest]
            if absent:
                missing_keys.extend(absent)
                continue
            contents[table.name] = {name: rest.pop(key) for name, key in keys.items()}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        errors = [
            message
            for table in self.tables
            if table.name in contents and (message := self._problem(table, contents[table.name]))
        ]
        if errors:  # of several tables, all are loaded or none
            error_msgs.extend(errors)
            return
        for table in self.tables:
            if table.name in contents:
                self.load_table(table, contents[table.name])
        self._pending.clear()

    def _problem(self, table: Table, content: Mapping[str, torch.Tensor]) -> str | None:
        """What keeps ``content`` from being loaded."""
        try:
            # The torch.optim class is not known before its first step: follow the content.
            kind = table.optimizer.kind if self.fused else optimizer_kind(content)
            table.check_state_dict(content, kind)
        except DynamicEmbError as error:
            return f"table {table.name!r}: {error}"
        return None

    def load_table(self, table: Table, content: Mapping[str, torch.Tensor]) -> None:
        """Replace a table's rows by content that was checked, with the optimizer it belongs to."""
        kind = optimizer_kind(content)
        if kind is not table.optimizer.kind:
            table.set_optimizer(Optimizer(kind, OptimizerArgs()))
        lost = table.load_state_dict(content)
        if lost:
            warnings.warn(
                f"{lost} rows of table {table.name!r} did not fit its {table.capacity} slots",
                UserWarning,
                stacklevel=2,
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """``half``, ``to(dtype)``: outputs have the new type, rows keep theirs. Tables stay on
        their device."""
        dtype = fn(torch.empty(0, dtype=self.output_dtype, device=self.handle.device)).dtype
        if dtype in OUTPUT_DTYPES:
            self.output_dtype = dtype
        handle = self.handle
        gradient = None if handle.grad is None else handle.grad.clone()
        super()._apply(fn, recurse)
        if self.handle.dtype is not torch.float32:  # the norm of gradients, which may be large
            self.handle.data = self.handle.data.to(torch.float32)
            if gradient is not None:  # not rounded: the gradients would be scaled by that
                self.handle.grad = gradient.to(self.handle.device)
        if self.handle is not handle:
            self._attach()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the rows, not what belongs to this process: lookups and
        gradients in flight, the process group."""
        state = self.__dict__.copy()
        for name in ("_group", "_prefetched", "_waiting", "_pending", "_key", "process_group"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()

    def __copy__(self) -> DynamicModule:
        """The same tables under a handle of its own: one handle has one owner."""
        copied = type(self).__new__(type(self))
        state = self.__getstate__()
        fresh = nn.Parameter(
            torch.zeros(1, device=self.device), requires_grad=self.handle.requires_grad
        )
        state["_parameters"] = {**state["_parameters"], "handle": fresh}
        copied.__setstate__(state)
        return copied


def _equal_bounds(a: Sequence[int] | torch.Tensor, b: Sequence[int] | torch.Tensor) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a is b or (not isinstance(a, torch.Tensor) and a == b)


class _RowLookup(torch.autograd.Function):
    """Rows out, gradients in."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: torch.Tensor,
        weights: torch.Tensor | None,
        module: DynamicModule,
        plan: Plan,
    ) -> torch.Tensor:
        out, found = module.compute(plan)
        ctx.module, ctx.plan, ctx.row_lookup = module, plan, found
        if plan.pooling.pooled:  # autograd then refuses a backward after a change in place
            ctx.save_for_backward(plan.pooling.offsets, plan.pooling.weights)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what comes out cannot be differentiated
            return _once_differentiable(ctx, gradient)  # type: ignore[no-any-return]
        return _backward(ctx, gradient)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found, ctx.row_lookup = ctx.row_lookup, None
    if found is None:
        raise UsageError(
            "backward through a dynamic embedding a second time; allowed: one for each forward "
            "(add losses up, or look up again)"
        )
    plan: Plan = ctx.plan
    if plan.pooling.pooled:
        _ = ctx.saved_tensors  # raises if offsets or weights were changed in place
    module: DynamicModule = ctx.module
    rows, weights, *_ = ctx.needs_input_grad
    weight_gradient = module.propagate(plan, found, gradient, rows=rows, weights=weights)
    # Where the handle is: moving a module moves it, and leaves the tables where they are.
    handle_gradient = None if module.fused else torch.ones(1, device=module.handle.device)
    return handle_gradient, weight_gradient, None, None


_once_differentiable = torch.autograd.function.once_differentiable(_backward)
