"""The optimizers that are fused into a table's backward pass, described without running them.

``EmbOptimType`` and :class:`OptimizerArgs` are what a user writes; :class:`Optimizer` is the
checked pair that a table takes. Needs torch alone. ``EmbOptimType`` is fbgemm's class if fbgemm is
installed, imported when it is first asked for; so nothing in this package asks for it at import.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.errors import (
    InvalidArgumentError,
    check_bool,
    check_choice,
    check_enum,
    check_integer,
    check_number,
    wrong_type,
    wrong_value,
)


class EmbOptimType(enum.Enum):
    """Optimizers by the names and values of fbgemm, whose class this is if fbgemm is installed.

    Not every name is supported: ``dynamicemb.optimizers.SUPPORTED_OPTIM_TYPES`` lists those that
    are. Wherever a member is taken, its name or value is as well, and the names of three optimizers
    that fbgemm does not have: "ftrl", "momentum_sgd", "smart_decay_adam".
    """

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __str__(self) -> str:
        return str(self.value)


_OwnEmbOptimType = EmbOptimType

if not TYPE_CHECKING:
    del EmbOptimType  # which class the name means is known when it is asked for


def emb_optim_type_of(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a module that has the name ``EmbOptimType``."""

    def attribute(name: str) -> Any:
        if name == "EmbOptimType":
            return _emb_optim_type()
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


if not TYPE_CHECKING:
    __getattr__ = emb_optim_type_of(__name__)


@functools.cache
def _emb_optim_type() -> Any:
    return _fbgemm_class() or _OwnEmbOptimType


def _fbgemm_class() -> type[enum.Enum] | None:
    """fbgemm's ``EmbOptimType``, if fbgemm is installed."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType as Fbgemm
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "fbgemm_gpu":
            return None
        problem: Exception = error
    except Exception as error:  # of another torch, or not built for this machine
        problem = error
    else:
        kind: type[enum.Enum] = Fbgemm
        return kind
    warnings.warn(
        f"fbgemm_gpu is installed and cannot be imported ({problem}); dynamicemb.EmbOptimType is a "
        "class of our own with the same names",
        RuntimeWarning,
        stacklevel=4,
    )
    return None


class OptimizerKind(enum.IntEnum):
    """The update rules that exist. The numbers are the engine's.

    With ``g`` the gradient summed over the batch, ``w`` the row, ``lr`` the learning rate:

    SGD: ``w -= lr g``.
    MOMENTUM: ``torch.optim.SGD`` with momentum. State ``m[dim]``.
    ADAM: bias-corrected Adam. State ``m[dim]``, ``v[dim]``.
    ADAGRAD: ``G += g*g; w -= lr g / (sqrt(G) + eps)``. State ``G[dim]``.
    ROWWISE_ADAGRAD: the same with one ``G`` per row, ``G += mean(g*g)``.
    PARTIAL_ROWWISE_ADAM: Adam with one ``v`` per row. State ``m[dim]``, then ``v``.
    FTRL: FTRL-proximal with a square-root rate. State ``z[dim]``, ``n[dim]``.
    SMART_DECAY_ADAM: Adam without bias correction that makes up for the ``k - 1`` steps since a row
        was last updated: ``u = m beta1 (1 - beta1**(k-1)) / (1 - beta1)``, ``m = beta1**k m +
        (1 - beta1) g``, ``v = beta2**k v + (1 - beta2) g*g``, ``w -= lr (m + u) / (sqrt(v) +
        eps)``. State ``m[dim]``, ``v[dim]``, one float more if ``dim`` is odd, and the number of
        the last step as the bits of an int64 in two floats. On the CPU only.
    """

    SGD = 0
    MOMENTUM = 1
    ADAM = 2
    ADAGRAD = 3
    ROWWISE_ADAGRAD = 4
    PARTIAL_ROWWISE_ADAM = 5
    FTRL = 6
    SMART_DECAY_ADAM = 7


class WeightDecayMode(enum.IntEnum):
    """What ``weight_decay`` means.

    NONE: what the optimizer does by itself: decoupled for the Adams (as in fbgemm), L2 for all
    others. L2: ``g += weight_decay w`` first. DECOUPLE: the update also
    subtracts ``lr weight_decay w``, ``w`` being the row before the update.
    """

    NONE = 0
    L2 = 1
    DECOUPLE = 2


#: The value of every name: fbgemm's, and those that only we have.
_VALUE_OF_NAME = {one.name: one.value for one in _OwnEmbOptimType} | {
    "MOMENTUM_SGD": "momentum_sgd",
    "FTRL": "ftrl",
    "SMART_DECAY_ADAM": "smart_decay_adam",
}
_KIND_OF_NAME = {
    "SGD": OptimizerKind.SGD,
    "EXACT_SGD": OptimizerKind.SGD,
    "MOMENTUM_SGD": OptimizerKind.MOMENTUM,
    "ADAM": OptimizerKind.ADAM,
    "EXACT_ADAGRAD": OptimizerKind.ADAGRAD,
    "EXACT_ROWWISE_ADAGRAD": OptimizerKind.ROWWISE_ADAGRAD,
    "ROWWISE_ADAGRAD": OptimizerKind.ROWWISE_ADAGRAD,
    "PARTIAL_ROWWISE_ADAM": OptimizerKind.PARTIAL_ROWWISE_ADAM,
    "FTRL": OptimizerKind.FTRL,
    "SMART_DECAY_ADAM": OptimizerKind.SMART_DECAY_ADAM,
}

#: The names that :meth:`Optimizer.from_emb_optim_type` takes. SGD and ROWWISE_ADAGRAD mean the same
#: as EXACT_SGD and EXACT_ROWWISE_ADAGRAD: gradients are always summed per id before the update.
SUPPORTED_OPTIM_TYPES = tuple(_KIND_OF_NAME)

_BIAS_CORRECTED = (OptimizerKind.ADAM, OptimizerKind.PARTIAL_ROWWISE_ADAM)
_DECOUPLED_BY_ITSELF = (*_BIAS_CORRECTED, OptimizerKind.SMART_DECAY_ADAM)
_ADAGRADS = (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
_SCALARS = (OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.PARTIAL_ROWWISE_ADAM)

#: Fields of OptimizerArgs that exist for code written for fbgemm; only the default is accepted.
_NOT_IMPLEMENTED = (
    "max_norm",
    "eta",
    "counter_halflife",
    "adjustment_iter",
    "adjustment_ub",
    "learning_rate_mode",
    "grad_sum_decay",
    "tail_id_threshold",
    "is_tail_id_thresh_ratio",
    "total_hash_size",
    "weight_norm_coefficient",
    "lower_bound",
    "regularization_mode",
)

#: Fields that would change the result of these kinds only; elsewhere only the default is accepted.
_KINDS_OF_FIELD = {
    "dampening": (OptimizerKind.MOMENTUM,),
    "nesterov": (OptimizerKind.MOMENTUM,),
    "lr_decay": _ADAGRADS,
    "lambda1": (OptimizerKind.FTRL,),
    "lambda2": (OptimizerKind.FTRL,),
    "beta": (OptimizerKind.FTRL,),
}


_numbers_of_changes = itertools.count(1)
_last_change = 0


def args_changes() -> int:
    """Another number whenever a field of any :class:`OptimizerArgs` was set."""
    return _last_change


@dataclass
class OptimizerArgs:
    """The numbers of an optimizer. Each is checked when the object is made.

    stochastic_rounding: round fp16 and bf16 rows at random, without bias.
    gradient_clipping, max_gradient: clamp every gradient element to +/- ``max_gradient``.
    learning_rate: at least 0.
    eps: Adam, Adagrad.
    initial_accumulator_value: where Adagrad's sum and FTRL's ``n`` start.
    beta1, beta2: Adam.
    weight_decay, weight_decay_mode: see :class:`WeightDecayMode`.
    momentum, dampening, nesterov: MOMENTUM_SGD, as in ``torch.optim.SGD``. Plain SGD ignores
        ``momentum``.
    lr_decay: Adagrad: step ``t`` uses ``learning_rate / (1 + (t - 1) lr_decay)``.
    maximize: ascend instead of descend.
    lambda1, lambda2, beta: FTRL: L1 and L2 strength, and the constant of the per-element rate.

    The rest (``max_norm``, ``eta``, the counter, tail-id and regularisation fields) is here so that
    existing code can be read: nothing implements it, and :class:`Optimizer` refuses a value other
    than the default.
    """

    stochastic_rounding: bool = True
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    max_norm: float = 0.0
    learning_rate: float = 0.01
    eps: float = 1.0e-8
    initial_accumulator_value: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    eta: float = 0.001
    momentum: float = 0.9
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: int = -1
    grad_sum_decay: int = -1
    tail_id_threshold: float = 0
    is_tail_id_thresh_ratio: int = 0
    total_hash_size: int = 0
    weight_norm_coefficient: float = 0
    lower_bound: float = 0
    regularization_mode: int = 0
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    maximize: bool = False
    lambda1: float = 0.0
    lambda2: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        self.validate()

    def __setattr__(self, name: str, value: Any) -> None:
        global _last_change
        super().__setattr__(name, value)
        _last_change = next(_numbers_of_changes)

    def validate(self) -> None:
        """Check every field; raises ``ArgumentTypeError`` or ``InvalidArgumentError``."""
        for name in ("stochastic_rounding", "gradient_clipping", "nesterov", "maximize"):
            check_bool(name, getattr(self, name))
        for name in (
            "learning_rate",
            "eps",
            "initial_accumulator_value",
            "weight_decay",
            "momentum",
            "lr_decay",
            "lambda1",
            "lambda2",
            "beta",
        ):
            check_number(name, getattr(self, name), minimum=0.0)
        check_number("max_gradient", self.max_gradient, above=0.0)
        check_number("beta1", self.beta1, minimum=0.0, below=1.0)
        check_number("beta2", self.beta2, minimum=0.0, below=1.0)
        check_number("dampening", self.dampening)
        check_integer("weight_decay_mode", self.weight_decay_mode)
        if self.weight_decay_mode not in tuple(WeightDecayMode):
            modes = ", ".join(f"{mode.value} ({mode.name})" for mode in WeightDecayMode)
            raise wrong_value("weight_decay_mode", self.weight_decay_mode, modes)
        for name in _NOT_IMPLEMENTED:
            check_number(name, getattr(self, name))


@dataclass(frozen=True)
class Optimizer:
    """An update rule with its numbers, checked: what a table is made with.

    ``kind`` is fixed, for it fixes the layout of a row. ``args`` may change between steps; use
    :meth:`set_learning_rate`, or change a field and call :meth:`validate`. Compared by value.
    """

    kind: OptimizerKind
    args: OptimizerArgs

    def __post_init__(self) -> None:
        self.validate()

    @classmethod
    def from_emb_optim_type(
        cls, optim_type: object, args: OptimizerArgs | None = None
    ) -> Optimizer:
        """The optimizer a user named (see :func:`optim_name`), with a copy of ``args``.

        A type that is not in :data:`SUPPORTED_OPTIM_TYPES` and an argument that nothing implements
        are an ``InvalidArgumentError`` that names them.
        """
        kind = _kind_of(optim_name(optim_type))
        if args is not None and not isinstance(args, OptimizerArgs):
            raise wrong_type("args", args, "None or OptimizerArgs")
        return cls(kind, OptimizerArgs() if args is None else replace(args))

    def validate(self) -> None:
        """Check ``args``, alone and together with ``kind``."""
        check_enum("kind", self.kind, OptimizerKind)
        if not isinstance(self.args, OptimizerArgs):
            raise wrong_type("args", self.args, "OptimizerArgs")
        self.args.validate()
        for item in fields(OptimizerArgs):
            value = getattr(self.args, item.name)
            if value == item.default:
                continue
            if item.name in _NOT_IMPLEMENTED:
                raise wrong_value(
                    item.name, value, f"{item.default!r} (nothing implements other values)"
                )
            kinds = _KINDS_OF_FIELD.get(item.name, tuple(OptimizerKind))
            if self.kind not in kinds:
                users = ", ".join(kind.name for kind in kinds)
                raise wrong_value(
                    item.name,
                    value,
                    f"{item.default!r} with {self.kind.name} (only {users} use it)",
                )
        if self.kind is OptimizerKind.FTRL and self.decoupled_weight_decay:
            raise wrong_value("weight_decay_mode", self.args.weight_decay_mode, "0 or 1 with FTRL")
        if self.args.nesterov and (self.args.momentum == 0 or self.args.dampening != 0):
            raise InvalidArgumentError(
                f"nesterov is True with momentum {self.args.momentum} and dampening "
                f"{self.args.dampening}; allowed: momentum above 0 and dampening 0"
            )

    @property
    def decoupled_weight_decay(self) -> bool:
        """Whether ``weight_decay`` acts on the row directly instead of through the gradient."""
        if self.args.weight_decay_mode == WeightDecayMode.NONE:
            return self.kind in _DECOUPLED_BY_ITSELF
        return self.args.weight_decay_mode == WeightDecayMode.DECOUPLE

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use ``learning_rate`` (at least 0) from the next update on."""
        self.args.learning_rate = check_number("learning_rate", learning_rate, minimum=0.0)

    def state_dim(self, dim: int) -> int:
        """float32 elements of state that a row of ``dim`` elements carries."""
        dim = check_integer("dim", dim, minimum=1)
        return {
            OptimizerKind.SGD: 0,
            OptimizerKind.MOMENTUM: dim,
            OptimizerKind.ADAM: 2 * dim,
            OptimizerKind.ADAGRAD: dim,
            OptimizerKind.ROWWISE_ADAGRAD: 1,
            OptimizerKind.PARTIAL_ROWWISE_ADAM: dim + 1,
            OptimizerKind.FTRL: 2 * dim,
            OptimizerKind.SMART_DECAY_ADAM: 2 * dim + dim % 2 + 2,
        }[self.kind]

    @property
    def has_scalar_state(self) -> bool:
        """Whether the last element of a row's state is one for the whole row, which tables in main
        memory keep beside the score."""
        return self.kind in _SCALARS

    def state_initial_value(self) -> float:
        """Where an accumulator starts: Adagrad's sum and FTRL's ``n``; 0.0 for the other kinds.

        FTRL's ``z`` starts at 0; :meth:`initial_state` has the whole layout.
        """
        if self.kind in _ADAGRADS or self.kind is OptimizerKind.FTRL:
            return float(self.args.initial_accumulator_value)
        return 0.0

    @property
    def varies(self) -> bool:
        """Whether an update has other numbers than the one before, also after the second."""
        return self.kind in _BIAS_CORRECTED or self.args.lr_decay != 0

    def numbers(self, iteration: int) -> dict[str, Any]:
        """What one update needs, for the ``iteration``-th update (from 1): plain numbers, derived
        ones computed in double precision."""
        args = self.args
        corrected = self.kind in _BIAS_CORRECTED
        rate = args.learning_rate
        if self.kind in _ADAGRADS:
            rate /= 1.0 + (iteration - 1) * args.lr_decay
        return {
            "kind": int(self.kind),
            "learning_rate": rate,
            "epsilon": args.eps,
            "beta2": args.beta2,
            "one_minus_beta1": 1.0 - args.beta1,
            "one_minus_beta2": 1.0 - args.beta2,
            "adam_rate": rate / (1.0 - args.beta1**iteration) if corrected else rate,
            "bias_correction2_sqrt": (math.sqrt(1.0 - args.beta2**iteration) if corrected else 1.0),
            "momentum": args.momentum,
            # As in torch: the buffer starts with the first gradient itself.
            "one_minus_dampening": 1.0 - args.dampening if iteration > 1 else 1.0,
            "weight_decay": args.weight_decay,
            "decay_factor": 1.0 - rate * args.weight_decay,
            "lambda1": args.lambda1,
            "lambda2": args.lambda2,
            "ftrl_beta": args.beta,
            "max_gradient": args.max_gradient if args.gradient_clipping else 0.0,
            "nesterov": args.nesterov,
            "decoupled_decay": self.decoupled_weight_decay,
            "maximize": args.maximize,
            "stochastic_rounding": args.stochastic_rounding,
            "step": iteration % 2**31,
            "iteration": iteration,
            "decay1": args.beta1,
            "decay2": args.beta2,
        }

    def initial_state(self, dim: int) -> torch.Tensor:
        """The state of a new row, float32 ``[state_dim(dim)]``."""
        state = torch.full(
            (self.state_dim(dim),), self.state_initial_value(), dtype=torch.float32, device="cpu"
        )
        if self.kind is OptimizerKind.FTRL:
            state[:dim] = 0.0
        return state


def optim_name(value: object) -> str:
    """The name of the optimizer that a member of ``EmbOptimType``, or a string, means.

    A string is a name or a value, in any case: "adam", "EXACT_SGD". Anything else is refused with
    the allowed ones.
    """
    if isinstance(value, enum.Enum) and type(value).__name__ == _OwnEmbOptimType.__name__:
        text = value.name
    elif isinstance(value, str):
        text = value
    else:
        raise wrong_type("optimizer type", value, _supported_types())
    for name, text_of_name in _VALUE_OF_NAME.items():
        if text.lower() in (name.lower(), text_of_name):
            return name
    raise wrong_value("optimizer type", value, _supported_types())


def string_to_opt_type(optim_str: str) -> EmbOptimType:
    """The member of ``EmbOptimType`` whose value is ``optim_str``, such as "exact_adagrad"."""
    check_choice("optim_str", optim_str, [one.value for one in _OwnEmbOptimType])
    member: EmbOptimType = _emb_optim_type()(optim_str)
    return member


def get_optimizer_state_dim(
    optimizer_type: object, dim: int, dtype: torch.dtype | None = None
) -> int:
    """Elements of state per row; NONE has none. State is float32 whatever ``dtype`` is."""
    name = optim_name(optimizer_type)
    if name == "NONE":
        return 0
    return Optimizer(_kind_of(name), OptimizerArgs()).state_dim(dim)


def has_scalar_state(optimizer_type: object) -> bool:
    """``Optimizer.has_scalar_state`` of an optimizer of this type."""
    name = optim_name(optimizer_type)
    if name == "NONE":
        return False
    return Optimizer(_kind_of(name), OptimizerArgs()).has_scalar_state


def get_optimizer_ckpt_state_dim(
    optimizer_type: object, dim: int, dtype: torch.dtype | None = None
) -> int:
    """Elements of state per row in a checkpoint: the same as in memory."""
    return get_optimizer_state_dim(optimizer_type, dim, dtype)


def get_required_arg(args: Mapping[str, Any], key: str) -> Any:
    """``args[key]``; a missing key is an ``InvalidArgumentError`` that lists those present."""
    if key not in args:
        present = ", ".join(sorted(map(str, args))) or "none"
        raise InvalidArgumentError(f"args has no {key!r}, which is required; present: {present}")
    return args[key]


def _kind_of(name: str) -> OptimizerKind:
    if name not in _KIND_OF_NAME:
        raise wrong_value("optimizer type", name, _supported_types())
    return _KIND_OF_NAME[name]


def _supported_types() -> str:
    return f"a name or an EmbOptimType of {', '.join(SUPPORTED_OPTIM_TYPES)}"
