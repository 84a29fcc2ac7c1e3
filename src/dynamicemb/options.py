"""What a user can say about a table: enums, initialiser arguments and table options.

Needs torch alone. Values are checked when an object is made (and again by
:meth:`DynamicEmbTableOptions.validate` when a table is made from it); every refusal names the
argument, the value and what is allowed.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

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

if TYPE_CHECKING:
    from dynamicemb.admission import AdmissionStrategy, KVCounter

BUCKET_ALIGNMENT = 16
DEMB_TABLE_ALIGN_SIZE = 16
DEFAULT_BUCKET_CAPACITY = 128
#: As ``bucket_capacity``: the whole table is one bucket.
MAX_BUCKET_CAPACITY = 2**63 - 1
DEFAULT_INDEX_TYPE = torch.int64
#: The DEBUG initialiser writes ``float(id mod this)``, the id taken as unsigned.
DEBUG_EMB_INITIALIZER_MOD = 100000
BATCH_SIZE_PER_DUMP = 65536
DynamicEmbKernel = "DynamicEmb"
SUPPORTED_DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
#: Environment variable; "0" silences the warning about a customised score that decreases.
DYNAMICEMB_CSTM_SCORE_CHECK = "DYNAMICEMB_CSTM_SCORE_CHECK"

SUPPORTED_EMBEDDING_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SUPPORTED_INDEX_TYPES = (torch.int64, torch.uint64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


class DynamicEmbCheckMode(enum.IntEnum):
    """What to do when ids of a batch cannot be inserted; their embeddings read 0.0 in every mode.

    ERROR raises :class:`~dynamicemb.errors.InsertionError` with the count, WARNING warns with the
    count, IGNORE says nothing (the count is in the table's ``stats()`` all the same).
    """

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class DynamicEmbInitializerMode(enum.Enum):
    """The distribution of a new row's values."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Where a row's score comes from. When a bucket is full the smallest score is evicted.

    TIMESTAMP: the clock, read once per training batch.
    STEP: a counter of training batches that starts at 1.
    CUSTOMIZED: the value last given to ``set_score``; training before the first is an error.
    LFU: how often the id occurred.
    NO_EVICTION: a running number; nothing is ever evicted.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


class DynamicEmbEvictStrategy(enum.Enum):
    """The older name for how scores are kept; a table derives it from its score strategy."""

    LRU = 0
    LFU = 1
    EPOCH_LRU = 2
    EPOCH_LFU = 3
    CUSTOMIZED = 4


class DynamicEmbPoolingMode(enum.IntEnum):
    """How the rows of a bag become one vector; NONE keeps one vector per id."""

    SUM = 0
    MEAN = 1
    NONE = 2


#: One strategy, or the pair (TIMESTAMP, LFU) in either order.
ScoreStrategy: TypeAlias = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]

SUPPORTED_COMPOUND_SCORE_STRATEGIES = (
    (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU),
    (DynamicEmbScoreStrategy.LFU, DynamicEmbScoreStrategy.TIMESTAMP),
)

_EVICT_STRATEGY_NAMES = {
    "KLru": DynamicEmbEvictStrategy.LRU,
    "KLfu": DynamicEmbEvictStrategy.LFU,
    "KEpochLru": DynamicEmbEvictStrategy.EPOCH_LRU,
    "KEpochLfu": DynamicEmbEvictStrategy.EPOCH_LFU,
    "KCustomized": DynamicEmbEvictStrategy.CUSTOMIZED,
}


def string_to_evict_strategy(strategy_str: str) -> DynamicEmbEvictStrategy:
    """The strategy called "KLru", "KLfu", "KEpochLru", "KEpochLfu" or "KCustomized"."""
    check_choice("strategy_str", strategy_str, _EVICT_STRATEGY_NAMES)
    return _EVICT_STRATEGY_NAMES[strategy_str]


def align_to_table_size(num_rows: int, alignment: int = DEMB_TABLE_ALIGN_SIZE) -> int:
    """``num_rows`` rounded up to a multiple of ``alignment``, at least one multiple."""
    num_rows = check_integer("num_rows", num_rows)
    alignment = check_integer("alignment", alignment, minimum=1)
    return max(1, -(-num_rows // alignment)) * alignment


def warning_for_cstm_score() -> bool:
    """Whether a customised score that decreases is worth a warning: not if the variable is "0"."""
    return os.environ.get(DYNAMICEMB_CSTM_SCORE_CHECK) != "0"


def normalize_score_strategy(score_strategy: Any) -> ScoreStrategy:
    """One strategy, or the supported pair as a tuple in the order given.

    A sequence of one becomes its element. Anything but strategies is an ``ArgumentTypeError``; an
    empty, repeated or unsupported combination is an ``InvalidArgumentError``.
    """
    if isinstance(score_strategy, DynamicEmbScoreStrategy):
        return score_strategy
    if not isinstance(score_strategy, (tuple, list)):
        return check_enum("score_strategy", score_strategy, DynamicEmbScoreStrategy)
    strategies = tuple(
        check_enum("score_strategy", one, DynamicEmbScoreStrategy) for one in score_strategy
    )
    if len(strategies) == 1:
        return strategies[0]
    if strategies not in SUPPORTED_COMPOUND_SCORE_STRATEGIES:
        names = "(" + ", ".join(one.name for one in strategies) + ")"
        raise InvalidArgumentError(
            f"score_strategy is {names}; allowed: one DynamicEmbScoreStrategy, or the pair "
            "(TIMESTAMP, LFU) in either order"
        )
    return strategies


def validate_score_strategy(score_strategy: Any) -> None:
    """Raise what :func:`normalize_score_strategy` raises."""
    normalize_score_strategy(score_strategy)


def get_eviction_score_strategy(score_strategy: ScoreStrategy) -> DynamicEmbScoreStrategy:
    """The strategy whose score decides evictions: of the pair, LFU."""
    order = get_physical_score_order(score_strategy)
    return order[-1]


def get_evict_strategy(score_strategy: ScoreStrategy) -> DynamicEmbEvictStrategy:
    """The older name of what ``score_strategy`` does."""
    evicting = get_eviction_score_strategy(score_strategy)
    if evicting is DynamicEmbScoreStrategy.TIMESTAMP:
        return DynamicEmbEvictStrategy.LRU
    if evicting is DynamicEmbScoreStrategy.LFU:
        return DynamicEmbEvictStrategy.LFU
    return DynamicEmbEvictStrategy.CUSTOMIZED


def score_strategy_has_timestamp_column(score_strategy: ScoreStrategy) -> bool:
    """Whether a word of the score is a clock reading."""
    return DynamicEmbScoreStrategy.TIMESTAMP in get_physical_score_order(score_strategy)


def get_physical_score_order(score_strategy: ScoreStrategy) -> tuple[DynamicEmbScoreStrategy, ...]:
    """The score words as a table keeps them; the pair is always (TIMESTAMP, LFU)."""
    normalized = normalize_score_strategy(score_strategy)
    if isinstance(normalized, DynamicEmbScoreStrategy):
        return (normalized,)
    return SUPPORTED_COMPOUND_SCORE_STRATEGIES[0]


def score_dump_permutation(score_strategy: ScoreStrategy) -> tuple[int, ...]:
    """For each word in the user's order, its place in the table: ``dumped = kept[:, p]``."""
    physical = get_physical_score_order(score_strategy)
    normalized = normalize_score_strategy(score_strategy)
    logical = physical if isinstance(normalized, DynamicEmbScoreStrategy) else normalized
    return tuple(physical.index(one) for one in logical)


def score_load_permutation(score_strategy: ScoreStrategy) -> tuple[int, ...]:
    """The inverse of :func:`score_dump_permutation`: ``kept = dumped[:, p]``."""
    permutation = score_dump_permutation(score_strategy)
    return tuple(permutation.index(place) for place in range(len(permutation)))


def check_bucket_capacity(name: str, value: Any) -> int:
    """``value`` if it is a positive multiple of 16, or ``MAX_BUCKET_CAPACITY``."""
    capacity = check_integer(name, value)
    if capacity != MAX_BUCKET_CAPACITY and (capacity < 1 or capacity % BUCKET_ALIGNMENT):
        raise wrong_value(
            name, value, f"a positive multiple of {BUCKET_ALIGNMENT}, or MAX_BUCKET_CAPACITY"
        )
    return capacity


@dataclass(unsafe_hash=True)
class DynamicEmbInitializerArgs:
    """How the values of a row are drawn. A row is a function of (table seed, id, column).

    ``mean`` and ``std_dev`` belong to NORMAL and TRUNCATED_NORMAL, ``lower`` and ``upper`` to
    UNIFORM and TRUNCATED_NORMAL, ``value`` to CONSTANT. A bound of ``None`` is filled by
    :func:`complete_initializer_args`. Compared by value, mode included.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    _chosen = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field; raises ``ArgumentTypeError`` or ``InvalidArgumentError``."""
        check_enum("initializer mode", self.mode, DynamicEmbInitializerMode)
        truncated = self.mode is DynamicEmbInitializerMode.TRUNCATED_NORMAL
        limits = {"minimum": -_FLOAT32_MAX, "maximum": _FLOAT32_MAX}
        check_number("mean", self.mean, **limits)
        check_number("value", self.value, **limits)
        check_number("std_dev", self.std_dev, minimum=0.0, maximum=_FLOAT32_MAX)
        if truncated and self.std_dev == 0:
            raise wrong_value("std_dev", self.std_dev, "more than 0 for TRUNCATED_NORMAL")
        for name in ("lower", "upper"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), **limits)
        if self.lower is None or self.upper is None:
            return
        if self.lower > self.upper or (truncated and self.lower == self.upper):
            raise wrong_value("lower", self.lower, f"less than upper ({self.upper})")


def _not_chosen() -> DynamicEmbInitializerArgs:
    args = DynamicEmbInitializerArgs()
    args._chosen = False
    return args


def is_chosen(args: DynamicEmbInitializerArgs) -> bool:
    """Whether a user gave them, be it with the default values; False for those that options have by
    themselves."""
    return args._chosen or args != DynamicEmbInitializerArgs()


def complete_initializer_args(
    args: DynamicEmbInitializerArgs, *, embedding_config: Any = None
) -> DynamicEmbInitializerArgs:
    """``args`` with both bounds set; ``args`` itself is never changed.

    A missing bound of UNIFORM or TRUNCATED_NORMAL becomes -/+ ``sqrt(1 / num_embeddings)`` of
    ``embedding_config``, or 0.0 and 1.0 without one. Returns ``args`` if nothing is missing.
    """
    bounded = (DynamicEmbInitializerMode.UNIFORM, DynamicEmbInitializerMode.TRUNCATED_NORMAL)
    if args.mode not in bounded or (args.lower is not None and args.upper is not None):
        return args
    lower, upper = 0.0, 1.0
    if embedding_config is not None:
        count = check_integer("num_embeddings", embedding_config.num_embeddings, minimum=1)
        upper = math.sqrt(1.0 / count)
        lower = -upper
    return replace(
        args,
        lower=lower if args.lower is None else args.lower,
        upper=upper if args.upper is None else args.upper,
    )


@dataclass(unsafe_hash=True)
class GroupedHKVConfig:
    """The options that tables of one group share."""

    index_type: torch.dtype | None = None
    embedding_dtype: torch.dtype | None = None
    score_type: torch.dtype = torch.uint64
    device_id: int | None = None


@dataclass(unsafe_hash=True)
class HKVConfig(GroupedHKVConfig):
    """The options of the hash table itself."""

    dim: int | None = None
    max_capacity: int | None = None
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    global_hbm_for_values: int = 0
    local_hbm_for_values: int = 0
    evict_strategy: DynamicEmbEvictStrategy = DynamicEmbEvictStrategy.LRU
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    block_size: int = 128
    io_block_size: int = 1024
    io_by_cpu: bool = False
    use_constant_memory: bool = False
    reserved_key_start_bit: int = 0
    num_of_buckets_per_alloc: int = 1


def _constant_zero() -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)


@dataclass(unsafe_hash=True)
class DynamicEmbTableOptions(HKVConfig):
    """The options of one table. Use keywords.

    Compared and hashed by the value of every field, so do not change one that is a dictionary key.

    index_type: dtype of the ids, int64 (``None``) or uint64. Every 64-bit id is legal.
    embedding_dtype: dtype of the rows, float32 (``None``), float16 or bfloat16.
    dim: elements of a row. ``None`` (or -1): taken from the embedding's configuration.
    max_capacity: rows at most (on this rank). ``None``: set by the planner.
    init_capacity: rows at the start. ``None``: ``max_capacity``.
    max_load_factor: the table grows before it is fuller than this; 0 or less: it never grows.
    bucket_capacity: slots of a bucket, a multiple of 16, or ``MAX_BUCKET_CAPACITY`` (one bucket).
    safe_check_mode: see :class:`DynamicEmbCheckMode`.
    initializer_args: values of a new row. Bounds that are ``None``: the planner takes -/+
        ``sqrt(1 / num_embeddings)``, a table without a planner 0 and 1. ``DynamicEmbedding`` and
        ``DynamicEmbeddingBag`` have a default of their own in the place of this one.
    score_strategy: see :class:`DynamicEmbScoreStrategy`; or the pair (TIMESTAMP, LFU), which keeps
        both scores and evicts by the count.
    eval_initializer_args: what a missing id reads in evaluation; must be CONSTANT.
    training: False: the table needs no optimizer state.
    admit_strategy: decides which new ids get a row; ``None`` admits all.
    admission_counter: a :class:`~dynamicemb.admission.KVCounter`, where ``admit_strategy`` needs
        the count of ids that have no row.
    dist_type: how ids are spread over ranks: "continuous", "roundrobin" or "hash_roundrobin"; see
        :class:`~dynamicemb.routing.Routing`.

    evict_strategy: derived from ``score_strategy`` (LRU, the default, means just that). LFU with
        the default ``score_strategy`` sets ``score_strategy`` to LFU; a strategy that contradicts
        ``score_strategy`` is refused.

    external_storage: the class of a store below the table (see :class:`dynamicemb.tiers.Store`), or
        a function with the same arguments: all rows are in it, those in use in memory.
    caching: keep the rows in use in ``local_hbm_for_values`` bytes, and all rows in a store:
        ``external_storage``, or main memory.
    local_hbm_for_values: bytes for the rows in use on this rank, with ``caching`` or
        ``external_storage``, ids and scores included. Without it, this rank's part of
        global_hbm_for_values (bytes over all ranks).

    Checked, and without effect in this version: device_id.

    Accepted so that existing code runs, checked, and without effect: score_type (scores have 64
    bits), block_size, io_block_size, io_by_cpu, use_constant_memory, reserved_key_start_bit,
    num_of_buckets_per_alloc.
    """

    initializer_args: DynamicEmbInitializerArgs = field(default_factory=_not_chosen)
    score_strategy: ScoreStrategy = DynamicEmbScoreStrategy.TIMESTAMP
    eval_initializer_args: DynamicEmbInitializerArgs = field(default_factory=_constant_zero)
    training: bool = True
    caching: bool = False
    external_storage: Callable[..., Any] | None = None
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: KVCounter | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field and bring ``dim`` and ``score_strategy`` to their one form.

        Raises ``ArgumentTypeError`` or ``InvalidArgumentError``. Called at construction; call it
        again after changing a field.
        """
        self._check_types()
        self._check_capacities()
        self._check_scores()
        self._check_initializers()
        self._check_admission()
        self._check_compatibility_knobs()

    def _check_types(self) -> None:
        if self.index_type is not None:
            check_choice("index_type", self.index_type, SUPPORTED_INDEX_TYPES)
        if self.embedding_dtype is not None:
            check_choice("embedding_dtype", self.embedding_dtype, SUPPORTED_EMBEDDING_DTYPES)
        if self.device_id is not None:
            check_integer("device_id", self.device_id, minimum=0)
        check_bool("training", self.training)
        check_bool("caching", self.caching)
        check_choice("dist_type", self.dist_type, SUPPORTED_DIST_TYPES)
        if self.external_storage is not None and not callable(self.external_storage):
            raise wrong_type(
                "external_storage", self.external_storage, "None or a class of a store"
            )
        check_enum("safe_check_mode", self.safe_check_mode, DynamicEmbCheckMode)

    def _check_capacities(self) -> None:
        if self.dim is not None and check_integer("dim", self.dim) == -1:
            self.dim = None
        for name in ("dim", "max_capacity", "init_capacity"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1, maximum=2**63 - 1)
        if self.max_capacity is not None and self.init_capacity is not None:
            check_integer("init_capacity", self.init_capacity, maximum=self.max_capacity)
        check_number("max_load_factor", self.max_load_factor, maximum=1.0)
        check_integer("global_hbm_for_values", self.global_hbm_for_values, minimum=0)
        check_integer("local_hbm_for_values", self.local_hbm_for_values, minimum=0)
        check_bucket_capacity("bucket_capacity", self.bucket_capacity)

    def _check_scores(self) -> None:
        wanted = check_enum("evict_strategy", self.evict_strategy, DynamicEmbEvictStrategy)
        strategy = normalize_score_strategy(self.score_strategy)
        by_frequency = wanted is DynamicEmbEvictStrategy.LFU
        if by_frequency and strategy is DynamicEmbScoreStrategy.TIMESTAMP:
            strategy = DynamicEmbScoreStrategy.LFU
        derived = get_evict_strategy(strategy)
        if wanted not in (DynamicEmbEvictStrategy.LRU, derived):
            allowed = "LRU (follow score_strategy)"
            if derived is not DynamicEmbEvictStrategy.LRU:
                allowed += f" or {derived.name}"
            raise InvalidArgumentError(
                f"evict_strategy is {wanted.name}, which contradicts score_strategy {strategy!r}; "
                f"allowed: {allowed}"
            )
        self.score_strategy = strategy

    def _check_initializers(self) -> None:
        for name in ("initializer_args", "eval_initializer_args"):
            args = getattr(self, name)
            if not isinstance(args, DynamicEmbInitializerArgs):
                raise wrong_type(name, args, "DynamicEmbInitializerArgs")
            args.validate()
        if self.eval_initializer_args.mode is not DynamicEmbInitializerMode.CONSTANT:
            raise wrong_value(
                "eval_initializer_args.mode",
                self.eval_initializer_args.mode,
                "DynamicEmbInitializerMode.CONSTANT",
            )

    def _check_admission(self) -> None:
        strategy, counter = self.admit_strategy, self.admission_counter
        if strategy is None and counter is None:
            return
        from dynamicemb.admission import AdmissionStrategy, KVCounter  # it imports this module

        if counter is not None and not isinstance(counter, KVCounter):
            raise wrong_type("admission_counter", counter, "None or a KVCounter")
        if strategy is None:
            raise wrong_value(
                "admission_counter",
                counter,
                "None while admit_strategy is None (it reads the count)",
            )
        if not isinstance(strategy, AdmissionStrategy):
            raise wrong_type("admit_strategy", strategy, "None or an AdmissionStrategy")
        if strategy.requires_counter and counter is None:
            raise wrong_value(
                "admission_counter", counter, f"a KVCounter, which {type(strategy).__name__} needs"
            )

    def _check_compatibility_knobs(self) -> None:
        check_choice("score_type", self.score_type, SUPPORTED_INDEX_TYPES)
        for name in ("block_size", "io_block_size", "num_of_buckets_per_alloc"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("reserved_key_start_bit", self.reserved_key_start_bit, minimum=0, maximum=62)
        check_bool("io_by_cpu", self.io_by_cpu)
        check_bool("use_constant_memory", self.use_constant_memory)
