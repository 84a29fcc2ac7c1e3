"""What the modules share: tables, autograd, optimizer steps, saving."""

from __future__ import annotations

import itertools
import secrets
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamicemb.errors import DynamicEmbError, UsageError, check_number
from dynamicemb.nn.checks import OUTPUT_DTYPES
from dynamicemb.nn.gradients import PendingGradients
from dynamicemb.nn.handle import Handle, Watch, new_handle
from dynamicemb.nn.plan import Plan, Prefetched, same_batch
from dynamicemb.nn.weight_gradient import weight_gradient
from dynamicemb.optimizers import Optimizer, OptimizerArgs
from dynamicemb.routing import Routing
from dynamicemb.table import Lookup, Table, create_group
from dynamicemb.table.content import ALWAYS, NAMES, optimizer_kind
from dynamicemb.tracing import refuse, refuse_tracers

#: Lookups of compiled models that wait for their backward; older ones are given up.
_MAX_WAITING = 64

#: What is not copied or pickled.
_OF_THE_PROCESS = (
    *("_group", "_prefetched", "_waiting", "_pending", "_watch", "_key"),
    "process_group",
)
_lookups = itertools.count()
_modules: weakref.WeakValueDictionary[bytes, DynamicModule] = weakref.WeakValueDictionary()
_owners: weakref.WeakValueDictionary[int, DynamicModule] = weakref.WeakValueDictionary()


def owner_of(parameter: torch.Tensor) -> DynamicModule | None:
    """The module whose handle ``parameter`` is."""
    module = _owners.get(id(parameter))
    return module if module is not None and module.handle is parameter else None


def module_of(key: torch.Tensor) -> DynamicModule:
    """The module that a compiled graph calls by its key."""
    module = _modules.get(bytes(key.tolist()))
    if module is None:
        raise UsageError(
            "the dynamic embedding of this graph is not in this process: it was deleted, or the "
            "graph was made elsewhere; allowed: graphs of modules that exist here"
        )
    return module


class DynamicModule(nn.Module, ABC):
    """Tables as a module.

    Rows are updated in one of two ways. With a fused ``optimizer``, in backward. Without, by a
    ``torch.optim`` optimizer that was given this module's parameters, or by :meth:`step`: then
    gradients of several backwards add up until the step, and ``zero_grad`` forgets them.

    The one parameter, ``handle``, has one element: it ties the rows to autograd and to an
    optimizer. Its gradient is the norm of the rows' gradients, so that ``clip_grad_norm_`` and
    ``GradScaler`` work. Its value only shows whether something else wrote to it, as if it were a
    weight: see :mod:`dynamicemb.nn.handle`.

    ``routings``: where the tables are spread over ranks, the routing of each by its name, over the
    ranks of ``process_group``; ``None``: every id belongs here.
    """

    routings: Mapping[str, Routing] | None = None
    process_group: Any = None  # a torch.distributed.ProcessGroup
    #: Whether the rows are frozen by other parameters that stand for them.
    frozen: bool = False

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
        self.handle = new_handle(self.device)
        self._attach()

    def _attach(self) -> None:
        """Set up what belongs to this object and is not copied or pickled."""
        self._group = create_group(self.tables)
        dims = [table.dim for table in self.tables]
        #: Columns of the output: of rows as they are, and of bags.
        self.row_columns = dims[0]
        self.output_columns = sum(n * dim for n, dim in zip(self.features, dims, strict=True))
        self._prefetched: deque[Prefetched] = deque()
        self._waiting: OrderedDict[int, Lookup] = OrderedDict()
        self._pending = PendingGradients(self._group, self.handle)
        self._watch_handle()
        # Random, so that no graph of another process, or of a module before, can mean this one.
        key = secrets.token_bytes(16)
        self._key = torch.tensor(list(key), dtype=torch.uint8, device="cpu")
        _modules[key] = self
        _owners[id(self.handle)] = self

    # ---- writes to the handle ----

    def _watch_handle(self) -> None:
        """Watch the handle, unless it is watched already."""
        watch: Watch | None = self.__dict__.get("_watch")
        if watch is None or watch.own is not self.handle:
            self._watch = Watch(self.handle)
            self.accept_written()

    def check_written(self) -> None:
        """Raise a ``UsageError`` if something wrote to the handle, which leaves the rows out."""
        watch = self._watch
        handle = self._parameters.get("handle")  # nn.Module's attributes are slow
        if handle is watch.own and watch.counter._version == watch.version:
            return
        watch.check(self.handle)

    def accept_written(self) -> None:
        """Accept what was written to the handle, because the rows are right or were replaced."""
        self._watch.accept(self.handle, self.tables[0].step)

    def hold_handle(self, held: bool) -> None:
        """Set whether the handle keeps its value while the module trains."""
        self._watch.held = held

    def _settle_handle(self) -> None:
        """Check the handle and bring its value up to date, before the content is read."""
        self.check_written()
        self._watch.follow(self.handle, self.tables[0].step)

    # ---- lookups ----

    @property
    def device(self) -> torch.device:
        """Where the tables are, and ids and gradients must be."""
        return self.tables[0].device

    @property
    def learns(self) -> bool:
        """Whether a forward is a training batch. It is in training mode, unless the module is
        frozen (``requires_grad_(False)``). Otherwise a forward only reads."""
        if not self.training or self.frozen:
            return False
        handle = self._parameters.get("handle")  # nn.Module's attributes are slow
        return (self.handle if handle is None else handle).requires_grad

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
            if torch.compiler.is_exporting():
                refuse("torch.export")
            learns, pooled = self.learns, self.pooled
            out: torch.Tensor = torch.ops.dynamicemb.lookup(
                self.handle if learns else self.handle.detach(),
                self._key,
                ids,
                offsets,
                weights,
                sum(self.features) if pooled else 0,
                self.output_columns if pooled else self.row_columns,
                self.output_dtype,
                learns,
            )[0]
            return out
        return self.look_up(self.plan(ids, offsets, weights), weights)

    def look_up(self, plan: Plan, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The output of a checked call; with a graph where one is wanted."""
        learns = self.learns
        weighted = weights is not None and weights.requires_grad
        if (learns or weighted) and torch.is_grad_enabled():
            handle = self.handle if learns else self.handle.detach()
            rows: torch.Tensor = _RowLookup.apply(handle, weights, self, plan, learns)
            return rows
        return self.compute(plan, learns)[0]

    def compute(self, plan: Plan, learns: bool) -> tuple[torch.Tensor, Lookup | None]:
        """(output, lookup); no lookup unless the module ``learns``."""
        self.check_written()
        pooling = plan.pooling
        if pooling.pooled:
            shape = (pooling.batch_size, self.output_columns)
        else:
            shape = (plan.ids.numel(), self.row_columns)
        out = torch.empty(shape, dtype=pooling.dtype, device=self.device)
        found = None
        if learns:
            found = self._train(plan, out)
        else:
            if self.training:  # frozen, or the handle is another one that takes no gradient
                self._check_owner()
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
        if not same_batch(plan, expected):
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

    def _check_owner(self) -> None:
        if not self.fused and owner_of(self.handle) is not self:
            raise UsageError(
                "another parameter is in the place of a dynamic embedding's handle, so that no "
                "optimizer would train its rows; FSDP and functional_call do that: leave the "
                "handle out (ignored_params), or use a fused optimizer (optimizer=EmbOptimType...)"
            )

    def _check_handle(self) -> None:
        """Raise if rows would silently stay untrained, or would be trained by each rank alone."""
        self._check_owner()
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
        self,
        plan: Plan,
        lookup: Lookup | None,
        gradient: torch.Tensor,
        *,
        rows: bool,
        weights: bool,
    ) -> torch.Tensor | None:
        """Pass the gradient of an output on to the rows, if the lookup was a training batch.
        Returns the gradient of the weights if ``weights`` is true."""
        refuse_tracers()
        pooling = plan.pooling
        gradient = gradient.to(pooling.dtype)
        if plan.keep is not None and not pooling.pooled:
            gradient = gradient.index_select(0, plan.keep)
        gradient = gradient.contiguous()
        of_weights = None
        if weights:
            if lookup is None:
                of_weights = weight_gradient(self.tables, plan.ids, pooling, gradient)
            else:
                of_weights = self._group.weight_gradient(lookup, pooling, gradient)
            if plan.keep is not None:
                padded = torch.zeros(plan.count, device=self.device)
                of_weights = padded.index_copy_(0, plan.keep, of_weights)
        if not rows or lookup is None:
            return of_weights
        if self.fused:
            self._group.update(lookup, pooling, gradient)
        else:
            self._pending.add(lookup, pooling, gradient)
        step = self.tables[0].step
        if step >= self._watch.due:
            self._watch.follow(self.handle, step)
        return of_weights

    # ---- compiled models keep a number instead of a lookup ----

    def park(self, lookup: Lookup | None) -> int:
        if lookup is None:
            return -1
        number = next(_lookups)
        self._waiting[number] = lookup
        while len(self._waiting) > _MAX_WAITING:  # forwards without a backward
            self._waiting.popitem(last=False)
        return number

    def unpark(self, number: int) -> Lookup | None:
        if number == -1:  # of a lookup that only read
            return None
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

    def prepare_torch_step(self, optimizer: Optimizer) -> None:
        """Do the part of a ``torch.optim`` optimizer's step that a store can fail. It can be done
        again. :meth:`apply_torch_step` follows when all modules have done it."""
        if not self._pending:
            return
        for table in self.tables:
            table.set_optimizer(optimizer)
        self._pending.prepare()

    def apply_torch_step(self) -> None:
        """Update the rows that have gradients with the optimizer of :meth:`prepare_torch_step`."""
        if self._pending:
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
        self.save_handle(destination, prefix, keep_vars)
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
        contents = {}
        absent = []
        for table in self.tables:
            keys = {name: f"{prefix}{table.name}.{name}" for name in NAMES}
            content = {name: rest.pop(key) for name, key in keys.items() if key in rest}
            if content:
                contents[table.name] = content
            else:
                absent.append(table.name)
                missing_keys.extend(keys[name] for name in ALWAYS)
        handle = prefix + "handle"
        self.load_handle(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not contents and handle not in state_dict:
            return
        errors = [_no_rows(name, handle, contents) for name in absent]
        errors += [
            message
            for table in self.tables
            if table.name in contents and (message := self._problem(table, contents[table.name]))
        ]
        if errors:  # all tables are loaded or none
            error_msgs.extend(errors)
            return
        for table in self.tables:
            self.load_table(table, contents[table.name])
        self._pending.clear()
        self.accept_written()

    def save_handle(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save what does not belong to a table, as ``nn.Module`` does."""
        self._settle_handle()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        handle = destination.get(prefix + "handle")
        if isinstance(handle, Handle) and not keep_vars:
            destination[prefix + "handle"] = handle.data  # of torch's class; writes to it count

    def load_handle(
        self, rest: Mapping[str, Any], prefix: str, local_metadata: Any, *report: Any
    ) -> None:
        """Load what does not belong to a table, as ``nn.Module`` does. The handle keeps its
        value; only its shape is checked."""
        # assign=True would put another handle in the place of the one that optimizers know.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        key, handle = prefix + "handle", self.handle
        given = rest.get(key)
        if isinstance(given, torch.Tensor) and given.shape == handle.shape:
            rest = {**rest, key: handle.detach()}
        super()._load_from_state_dict(rest, prefix, local_metadata, *report)

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
        written = self._watch.written(handle)
        gradient = None if handle.grad is None else handle.grad.clone()
        super()._apply(fn, recurse)
        # The norm of gradients may be large for half types. Inference tensors count no writes.
        if self.handle.dtype is not torch.float32 or self.handle.is_inference():
            with torch.inference_mode(False):
                self.handle.data = self.handle.data.to(torch.float32, copy=True)
            if gradient is not None:  # not rounded: the gradients would be scaled by that
                self.handle.grad = gradient.to(self.handle.device)
        if self.handle is not handle:
            self._attach()
        if written:
            self._watch.spoil()
        else:
            self.accept_written()
        return self

    def __prepare_scriptable__(self) -> Self:
        """torch.jit.script calls it first."""
        refuse("torch.jit.script")

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the rows, not what belongs to this process: lookups and
        gradients in flight, the process group."""
        self._settle_handle()
        state = self.__dict__.copy()
        for name in _OF_THE_PROCESS:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.handle.is_inference():  # has no version
            self.handle = new_handle(self.handle.device, self.handle.requires_grad)
        self._attach()

    def __copy__(self) -> DynamicModule:
        """The same tables under a handle of its own: one handle has one owner."""
        copied = type(self).__new__(type(self))
        state = self.__getstate__()
        fresh = new_handle(self.device, self.handle.requires_grad)
        state["_parameters"] = {**state["_parameters"], "handle": fresh}
        copied.__setstate__(state)
        return copied


def _no_rows(table: str, handle: str, contents: Mapping[str, Any]) -> str:
    """The message for a table that is missing in a dictionary with other parts of its module."""
    there = f"the rows of {', '.join(map(repr, contents))}" if contents else f"only {handle!r}"
    return (
        f"table {table!r}: the dictionary has {there}, and no rows of this table; allowed: all "
        "tables of a module, or nothing of it"
    )


class _RowLookup(torch.autograd.Function):
    """Rows out, gradients in."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: torch.Tensor,
        weights: torch.Tensor | None,
        module: DynamicModule,
        plan: Plan,
        learns: bool,
    ) -> torch.Tensor:
        out, ctx.row_lookup = module.compute(plan, learns)
        ctx.module, ctx.plan = module, plan
        if plan.pooling.pooled:  # autograd then refuses a backward after a change in place
            ctx.save_for_backward(plan.pooling.offsets, plan.pooling.weights)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what comes out cannot be differentiated
            return _once_differentiable(ctx, gradient)  # type: ignore[no-any-return]
        return _backward(ctx, gradient)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    plan: Plan | None = ctx.plan
    if plan is None:
        raise UsageError(
            "backward through a dynamic embedding a second time; allowed: one for each forward "
            "(add losses up, or look up again)"
        )
    found, ctx.row_lookup, ctx.plan = ctx.row_lookup, None, None
    if plan.pooling.pooled:
        _ = ctx.saved_tensors  # raises if offsets or weights were changed in place
    module: DynamicModule = ctx.module
    rows, weights, *_ = ctx.needs_input_grad
    of_weights = module.propagate(plan, found, gradient, rows=rows, weights=weights)
    # Where the handle is: moving a module moves it, and leaves the tables where they are.
    of_handle = torch.ones(1, device=module.handle.device) if rows and not module.fused else None
    return of_handle, of_weights, None, None, None


_once_differentiable = torch.autograd.function.once_differentiable(_backward)
