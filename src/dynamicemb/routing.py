"""Which rank holds an id when a table is spread over several."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynamicemb.errors import check_choice, check_integer, wrong_value
from dynamicemb.hashing import mix
from dynamicemb.options import SUPPORTED_DIST_TYPES


@dataclass(frozen=True)
class Routing:
    """The rank of every id of one table. Ids are unsigned 64-bit numbers here.

    dist_type: "roundrobin": ``id mod world_size``. "hash_roundrobin": the same of the id's hash.
        "continuous": ``id div block`` below ``block * world_size``, else ``id mod world_size``.
    world_size, rank: how many ranks there are, and which one this is.
    block: ids of a rank in "continuous": ``ceil(num_embeddings / world_size)``; else ``None``.

    Ids are stored as they are on every rank: a rank's rows can be read without knowing its routing.
    """

    dist_type: str
    world_size: int
    rank: int
    block: int | None = None

    def __post_init__(self) -> None:
        check_choice("dist_type", self.dist_type, SUPPORTED_DIST_TYPES)
        check_integer("world_size", self.world_size, minimum=1, maximum=2**31 - 1)
        check_integer("rank", self.rank, minimum=0, maximum=self.world_size - 1)
        if self.dist_type == "continuous":
            check_integer("block", self.block, minimum=1, maximum=(2**63 - 1) // self.world_size)
        elif self.block is not None:
            raise wrong_value("block", self.block, f"None with dist_type {self.dist_type!r}")

    @staticmethod
    def single() -> Routing:
        """One rank that has everything."""
        return Routing("roundrobin", 1, 0)

    @staticmethod
    def of_table(dist_type: str, num_embeddings: int, world_size: int, rank: int) -> Routing:
        """The routing of a table with ``num_embeddings`` rows over all ranks."""
        block = -(-num_embeddings // world_size) if dist_type == "continuous" else None
        return Routing(dist_type, world_size, rank, block)

    def owner(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the rank of each id (int64 or uint64, any device)."""
        ids = ids.view(torch.int64)
        if self.world_size == 1:
            return torch.zeros_like(ids)
        if self.dist_type == "hash_roundrobin":
            ids = mix(ids)
        owner = _unsigned_modulo(ids, self.world_size)
        if self.block is not None:
            inside = (ids >= 0) & (ids < self.block * self.world_size)
            owner = torch.where(inside, ids.div(self.block, rounding_mode="floor"), owner)
        return owner

    def owned(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: which ids are this rank's."""
        return self.owner(ids) == self.rank


def _unsigned_modulo(ids: torch.Tensor, divisor: int) -> torch.Tensor:
    """``ids`` as unsigned numbers, modulo ``divisor`` (below 2**31)."""
    low = (ids & (2**63 - 1)).remainder_(divisor)
    return low.add_((ids < 0) * (2**63 % divisor)).remainder_(divisor)
