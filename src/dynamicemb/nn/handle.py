"""The parameter that stands for rows, and how a write to it is noticed.

The element of a handle has a value that its module knows and changes now and then as it trains. A
write through the parameter moves its version; then, and only then, the value is read. If it is the
known one, what was written was the same again: a broadcast, a cast, a step of 0. If it is another,
something treated the parameters as the whole model, and the rows were left out.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn

from dynamicemb.errors import UsageError

_WRITTEN = "something changed the parameter 'handle' of a dynamic embedding"
_REPLACED = (
    "another parameter is in the place of a dynamic embedding's handle, and its value is not the "
    "one that the handle has"
)
_ROWS_LEFT_OUT = (
    ". The rows did not change: whatever did this takes model.parameters() for the whole model, as "
    "moving averages, swaps of parameters and initialisers do. Allowed: "
    "torch.optim.swa_utils.AveragedModel, which averages rows; init_std and init_range for new "
    "rows; or leave out the parameters named 'handle'. To recover, load the rows again "
    "(load_state_dict, DynamicEmbLoad, load_snapshot), or call accept_written() of the module if "
    "its rows are right as they are"
)

_data: Any = torch.Tensor.data
_detach = torch._C.TensorBase.detach
# Below it the value changes at powers of two, and from here on every 64 steps.
_STEPS = 64


class Handle(torch.Tensor):
    """A parameter whose version counts writes through ``data`` as well.

    It is a ``Parameter`` to ``isinstance`` and to torch. Copies and pickles of it are Parameters of
    torch's class.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return _detach(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _data.__set__(self, value)
        torch.autograd.graph.increment_version(self)

    def detach(self) -> torch.Tensor:
        # nn.Parameter(handle) demands that the class stays.
        return _detach(self).as_subclass(Handle)

    def _as_torchs(self) -> torch.Tensor:
        """The same memory in a tensor of torch's class."""
        plain = _detach(self)
        return nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._as_torchs().__deepcopy__({})
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_torchs().__reduce_ex__(protocol)


def new_handle(device: torch.device, requires_grad: bool = True) -> nn.Parameter:
    """A parameter for :class:`Watch`."""
    with torch.inference_mode(False):  # a tensor of inference mode has no version
        return nn.Parameter(torch.zeros(1, device=device), requires_grad)


def value_at(step: int) -> float:
    """What a handle holds when ``step`` is the number of the next training batch.

    It is one of 128 numbers from 1/32 to 1/16 with 8 significant bits. Half precision keeps them,
    a clipping of weights changes them, and norms and penalties over all parameters hardly feel
    them. The value changes at powers of two and at every 64th batch; values that follow each other
    are far apart.
    """
    turn = step.bit_length() if step < _STEPS else 6 + step // _STEPS
    return (128 + 77 * turn % 128) * 2.0**-12


def _next_turn(step: int) -> int:
    """The first step after this one that has another value."""
    return 1 << step.bit_length() if step < _STEPS else (step // _STEPS + 1) * _STEPS


class Watch:
    """Knows what ``own``, the handle of a module, should hold.

    ``own`` becomes a :class:`Handle`; it stays the object that optimizers know.
    """

    def __init__(self, own: nn.Parameter) -> None:
        own.__class__ = Handle  # type: ignore[assignment]
        own._is_param = True  # type: ignore[attr-defined]
        self.own: torch.Tensor = own
        #: Shares the version of ``own``, and is asked faster.
        self.counter = _detach(own)
        self.version = self.counter._version
        #: The step from which on the value is another one.
        self.due = 0
        #: Whether the value stays as it is for now.
        self.held = False
        self._value: float | None = None  # None: what is there is right
        self._other: tuple[weakref.ref[torch.Tensor], int] | None = None  # that was right

    def accept(self, present: torch.Tensor, step: int) -> None:
        """What was written so far is right. ``present``: the handle that the module has now."""
        self.due = 0
        self.version = self.counter._version
        self._value, self._other = None, None
        self.follow(present, step)

    def spoil(self) -> None:
        """What was written so far stays wrong, whatever the value is."""
        self._value, self.version, self._other = math.nan, -1, None

    def follow(self, present: torch.Tensor, step: int) -> None:
        """Bring the value up to ``step``, if that has come to ``due``: without a new version, so
        that graphs which hold the handle stay valid, and without a wait for a GPU."""
        own = self.own
        if step < self.due or self.held:
            return
        if self.counter._version != self.version:  # the next check has a look first
            return
        self.due = _next_turn(step)
        if present is own and _stands_alone(own) and not _capturing(own):
            self._value = value_at(step)
            _data.__get__(own).fill_(self._value)

    def check(self, present: torch.Tensor) -> None:
        """Raise a ``UsageError`` if ``present`` is :meth:`written`."""
        if self.written(present):
            raise UsageError((_WRITTEN if present is self.own else _REPLACED) + _ROWS_LEFT_OUT)

    def written(self, present: torch.Tensor) -> bool:
        """Whether ``present``, the handle that the module has now, holds another value than it
        should. Reads it only if something was written since the last look."""
        if present is self.own:
            if self.counter._version == self.version:
                return False
        elif self._is_known(present):
            return False
        if not self._readable(present) or _capturing(present):
            return False
        value = float(_data.__get__(present))
        if self._value is None:
            self._value = value
        if value != self._value:
            return True
        if present is self.own:
            self.version = self.counter._version
        elif not present.is_inference():
            self._other = weakref.ref(present), present._version
        return False

    def _readable(self, present: torch.Tensor) -> bool:
        """Whether the element can be read and is the handle's alone: a shard may be empty, and in
        the flat parameter of FSDP the optimizer's weight decay reaches it."""
        if type(present) not in (torch.Tensor, nn.Parameter, Handle) or present.numel() != 1:
            return False
        if present.layout is not torch.strided or present.is_meta:
            return False
        if present is self.own:
            return not hasattr(present, "_fsdp_flattened")
        return _stands_alone(present)

    def _is_known(self, present: torch.Tensor) -> bool:
        return (
            self._other is not None
            and self._other[0]() is present
            and self._other[1] == present._version
        )


def _stands_alone(handle: torch.Tensor) -> bool:
    """Whether no wrapper keeps the element among those of other parameters, where it would be
    gathered again, or copied from a master."""
    return handle.numel() == 1 and handle.untyped_storage().nbytes() == handle.element_size()


def _capturing(handle: torch.Tensor) -> bool:
    """Whether what runs now on the handle's device becomes a CUDA graph."""
    return handle.is_cuda and torch.cuda.is_current_stream_capturing()
