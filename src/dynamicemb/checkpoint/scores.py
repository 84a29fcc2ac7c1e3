"""Scores in files: clock readings as ages, so that they mean the same in another process."""

from __future__ import annotations

import torch

from dynamicemb.hashing import signed
from dynamicemb.options import (
    DynamicEmbScoreStrategy,
    ScoreStrategy,
    score_dump_permutation,
    score_load_permutation,
    score_strategy_has_timestamp_column,
)

_LOWEST = -(2**63)
_HIGHEST = 2**63 - 1


def strategy_names(strategy: ScoreStrategy) -> list[str]:
    """The words of a score, in the user's order."""
    if isinstance(strategy, DynamicEmbScoreStrategy):
        return [strategy.name]
    return [one.name for one in strategy]


def stored_as(strategy: ScoreStrategy) -> list[str]:
    """What a file holds for each word: "age" (nanoseconds before the dump's clock, signed),
    "timestamp" (nanoseconds of the dump's clock) or "value" (the score itself, unsigned).

    One word of TIMESTAMP is an age and the pair's is a timestamp, as upstream writes them.
    """
    if strategy is DynamicEmbScoreStrategy.TIMESTAMP:
        return ["age"]
    return ["timestamp" if name == "TIMESTAMP" else "value" for name in strategy_names(strategy)]


def uses_clock(strategy: ScoreStrategy) -> bool:
    """Whether the scores are readings of a clock, at least one of them."""
    return score_strategy_has_timestamp_column(strategy)


def to_file(scores: torch.Tensor, strategy: ScoreStrategy, clock: int) -> torch.Tensor:
    """A table's scores as a file holds them."""
    if strategy is DynamicEmbScoreStrategy.TIMESTAMP:
        return ages(scores, clock)
    if isinstance(strategy, tuple):
        return scores[:, list(score_dump_permutation(strategy))].contiguous()
    return scores


def from_file(
    scores: torch.Tensor, strategy: ScoreStrategy, clock: int | None, now: int
) -> torch.Tensor:
    """The inverse, with ages kept: what was a nanosecond old at ``clock`` is so at ``now``.
    ``clock`` ``None``: it is not known, and timestamps stay as they are."""
    if strategy is DynamicEmbScoreStrategy.TIMESTAMP:
        return timestamps(scores, now)
    if not isinstance(strategy, tuple):
        return scores
    kept = scores[:, list(score_load_permutation(strategy))].contiguous()
    if clock is not None:
        kept[:, 0] = timestamps(ages(kept[:, 0], clock), now)
    return kept


def ages(scores: torch.Tensor, clock: int) -> torch.Tensor:
    """``clock - score`` as signed numbers, at most 2**63 away from 0."""
    now = signed(clock)
    age = now - scores  # wraps
    past = (scores ^ _LOWEST) <= (now ^ _LOWEST)  # compared as unsigned
    age = torch.where(past & (age < 0), torch.full_like(age, _HIGHEST), age)
    return torch.where(~past & (age >= 0), torch.full_like(age, _LOWEST), age)


def timestamps(age: torch.Tensor, now: int) -> torch.Tensor:
    """``now - age``, kept within the unsigned 64-bit numbers."""
    reading = signed(now)
    score = reading - age  # wraps
    in_order = (score ^ _LOWEST) <= (reading ^ _LOWEST)
    score = torch.where((age >= 0) & ~in_order, torch.zeros_like(score), score)
    later = (score ^ _LOWEST) > (reading ^ _LOWEST)
    return torch.where((age < 0) & ~later, torch.full_like(score, -1), score)
