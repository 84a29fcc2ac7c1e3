"""Which new ids get a row: admission strategies and the counter that some of them read.

An id that is not in the table is offered to the strategy once per training batch. A rejected id is
used for that forward pass only: it takes no slot and no gradient, and is offered again next time.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from dynamicemb.errors import (
    InvalidArgumentError,
    UsageError,
    check_choice,
    check_integer,
    check_number,
    wrong_type,
    wrong_value,
)
from dynamicemb.hashing import mix, signed
from dynamicemb.options import (
    SUPPORTED_INDEX_TYPES,
    DynamicEmbInitializerArgs,
    check_bucket_capacity,
)

if TYPE_CHECKING:
    from dynamicemb.types import MemoryType

__all__ = [
    "AdmissionStrategy",
    "Counter",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilityAdmissionStrategy",
]


class Counter(ABC):
    """Counts ids that have no row. One counter may serve several tables, told apart by number."""

    @abstractmethod
    def add(
        self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor
    ) -> torch.Tensor:
        """Add ``frequencies`` to the counts of unique ``keys``; the new counts, int64 [n]."""

    @abstractmethod
    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        """Forget ``keys``; one that was not counted is no error."""

    @abstractmethod
    def memory_usage(self, mem_type: MemoryType) -> int:
        """Bytes held in memory of this kind."""

    @abstractmethod
    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Take the counts of one table from files that :meth:`dump` wrote."""

    @abstractmethod
    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Write the counts of one table."""


@dataclass(frozen=True)
class KVCounter:
    """The size of a table's counter; the table makes the counter itself.

    capacity: how many ids are counted at once. When a bucket is full its smallest count goes.
    bucket_capacity: slots of a bucket, a multiple of 16, or ``MAX_BUCKET_CAPACITY``.
    key_type: int64 or uint64.
    """

    capacity: int
    bucket_capacity: int = 1024
    key_type: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        check_integer("capacity", self.capacity, minimum=1, maximum=2**63 - 1)
        check_bucket_capacity("bucket_capacity", self.bucket_capacity)
        check_choice("key_type", self.key_type, SUPPORTED_INDEX_TYPES)


class AdmissionStrategy(ABC):
    """Decides which ids that are not in the table get a row. Subclass it to plug in your own.

    A subclass must define :meth:`admit`. For what a rejected id reads it has two ways:

    * set ``initializer_args``: the table initialises rejected rows with them, as a function of
      (table seed, id, column). ``None``: with the table's own ``initializer_args``.
    * override :meth:`initialize_non_admitted_embeddings` and write the rows itself.

    A subclass that does not define equality is compared by identity, so two tables share a group
    only if they share the object.
    """

    #: Whether the table must count ids without a row (``admission_counter``) for :meth:`admit`.
    requires_counter: ClassVar[bool] = False

    #: How the table initialises rejected rows; ``None``: like its other rows.
    initializer_args: DynamicEmbInitializerArgs | None = None

    @abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Decide for unique ``keys`` (int64 or uint64, [n]) that are not in the table.

        ``frequencies`` (int64, [n]) holds, with a counter, how often the id occurred since it was
        first counted, this batch included; without one, how often it occurs in this batch.
        Returns bool [n] on the device of ``keys``, True to admit. Called once per training batch
        that has a missing id.
        """

    def initialize_non_admitted_embeddings(
        self, buffer: torch.Tensor, indices: torch.Tensor
    ) -> None:
        """Write ``buffer[indices]`` ([m, dim]), the rows of rejected ids. A hook to override.

        The built-in strategies leave it to the table, which calls this only if
        :attr:`writes_rejected_rows` is True; otherwise it is a ``UsageError``.
        """
        raise UsageError(
            f"{type(self).__name__} leaves rejected rows to the table, which initialises them with "
            "the strategy's initializer_args; override this method to write them yourself"
        )

    def per_table(self) -> AdmissionStrategy:
        """The object one table uses: this one, or a copy where it keeps state of its own."""
        return self

    @property
    def writes_rejected_rows(self) -> bool:
        """Whether the subclass overrides :meth:`initialize_non_admitted_embeddings`."""
        own = type(self).initialize_non_admitted_embeddings
        return own is not AdmissionStrategy.initialize_non_admitted_embeddings


def _check_initializer_args(args: object) -> None:
    if args is None:
        return
    if not isinstance(args, DynamicEmbInitializerArgs):
        raise wrong_type("initializer_args", args, "None or DynamicEmbInitializerArgs")
    args.validate()


def admission_mask(
    strategy: AdmissionStrategy, ids: torch.Tensor, frequencies: torch.Tensor
) -> torch.Tensor:
    """What ``strategy`` says of the ids: bool [n]. Raises if it answers with anything else."""
    mask = strategy.admit(ids, frequencies)
    name = type(strategy).__name__
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise wrong_type(f"the result of {name}.admit", mask, "a tensor of bool")
    if mask.shape != ids.shape:
        raise wrong_value(
            f"the shape of {name}.admit's result", tuple(mask.shape), str(tuple(ids.shape))
        )
    return mask


def _check_batch(keys: torch.Tensor, frequencies: torch.Tensor) -> None:
    check_choice("keys.dtype", keys.dtype, SUPPORTED_INDEX_TYPES)
    check_choice("frequencies.dtype", frequencies.dtype, (torch.int64,))
    if keys.dim() != 1 or frequencies.shape != keys.shape:
        raise InvalidArgumentError(
            f"keys has shape {tuple(keys.shape)} and frequencies {tuple(frequencies.shape)}; "
            "allowed: two 1-D tensors of the same length"
        )


@dataclass(frozen=True)
class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Admits an id once it has occurred ``threshold`` times. Needs an ``admission_counter``.

    threshold: at least 0; 0 and 1 admit every id.
    initializer_args: what a rejected id reads; ``None``: like the table's other rows.
    """

    requires_counter: ClassVar[bool] = True

    threshold: int
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        check_integer("threshold", self.threshold, minimum=0, maximum=2**63 - 1)
        _check_initializer_args(self.initializer_args)

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """True where ``frequencies >= threshold``."""
        _check_batch(keys, frequencies)
        return frequencies >= self.threshold


_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(unsafe_hash=True)
class ProbabilityAdmissionStrategy(AdmissionStrategy):
    """Admits each occurrence of an id with ``probability``, so popular ids get a row early.

    An id that occurs ``f`` times is admitted with probability ``1 - (1 - probability) ** f``. The
    draw is a pure function of (``seed``, id, ``calls``): order, device and thread count do not
    matter, and for the same draw more occurrences never turn an admission into a rejection.

    probability: from 0 to 1.
    seed: any 64-bit integer.
    initializer_args: what a rejected id reads; ``None``: like the table's other rows.
    calls: how often :meth:`admit` has run. State, not part of the value: save and restore it to
        continue a run exactly. Tables that share the object share it, so a table keeps a copy.
    """

    probability: float
    seed: int = 0
    initializer_args: DynamicEmbInitializerArgs | None = None
    calls: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_number("probability", self.probability, minimum=0.0, maximum=1.0)
        check_integer("seed", self.seed, minimum=-(2**63), maximum=2**64 - 1)
        _check_initializer_args(self.initializer_args)

    def per_table(self) -> ProbabilityAdmissionStrategy:
        """A copy: tables that shared ``calls`` would disturb each other's draws."""
        return copy.copy(self)

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Draw for every key; adds 1 to ``calls``. A frequency of 0 or less is never admitted."""
        _check_batch(keys, frequencies)
        draw = self._draw(keys.view(torch.int64))
        self.calls += 1
        return draw >= self._rejection_probability(frequencies)

    def _draw(self, keys: torch.Tensor) -> torch.Tensor:
        """float64 [n], uniform over the multiples of 2**-53 in [0, 1)."""
        hashed = mix(keys + signed((int(self.seed) + 1) * _GOLDEN))
        hashed = mix(hashed ^ signed((self.calls + 1) * _GOLDEN))
        return ((hashed >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53

    def _rejection_probability(self, frequencies: torch.Tensor) -> torch.Tensor:
        """``(1 - probability) ** frequencies``, float64 [n].

        By repeated multiplication: a product rounds alike on every device, ``pow`` does not.
        """
        base = 1.0 - float(self.probability)
        result = torch.ones_like(frequencies, dtype=torch.float64)
        if base == 1.0 or not frequencies.numel():
            return result
        remaining = frequencies.clamp(min=0)
        bits = 63
        if frequencies.device.type == "cpu":  # elsewhere, reading the maximum would wait for it
            bits = int(remaining.max()).bit_length()
        for _ in range(bits):
            result = torch.where((remaining & 1).bool(), result * base, result)
            remaining >>= 1
            base *= base
            if base < 2.0**-60:  # below the resolution of a draw: higher bits mean "certain"
                return result.masked_fill_(remaining > 0, 0.0)
        return result
