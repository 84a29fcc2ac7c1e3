"""Every 64-bit id has one rank, the same on every machine."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.routing import Routing

IDS = [0, 1, 2, 3, 7, 99, 100, 101, 2**31, 2**63 - 1, 2**63, 2**64 - 4, 2**64 - 2, 2**64 - 1]
WORLDS = [1, 2, 3, 4, 7, 8, 1000, 2**31 - 1]


def tensor(ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.uint64).view(dtype)


def murmur(x: int) -> int:
    mask = 2**64 - 1
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & mask
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & mask
    return x ^ x >> 33


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_owner_is_the_formula_on_unsigned_ids(world: int, dtype: torch.dtype) -> None:
    ids = tensor(IDS, dtype)
    assert Routing("roundrobin", world, 0).owner(ids).tolist() == [k % world for k in IDS]
    expected = [murmur(k) % world for k in IDS]
    assert Routing("hash_roundrobin", world, 0).owner(ids).tolist() == expected
    block = -(-101 // world)
    expected = [k // block if k < block * world else k % world for k in IDS]
    routing = Routing.of_table("continuous", 101, world, 0)
    assert routing.block == block
    assert routing.owner(ids).tolist() == expected


def test_ids_are_not_changed() -> None:
    ids = tensor(IDS, torch.int64)
    for dist_type in ("roundrobin", "hash_roundrobin", "continuous"):
        Routing.of_table(dist_type, 100, 3, 0).owner(ids)
    assert torch.equal(ids, tensor(IDS, torch.int64))


@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin", "continuous"])
def test_every_id_is_owned_by_exactly_one_rank(dist_type: str) -> None:
    ids = tensor(IDS, torch.int64)
    owned = sum(Routing.of_table(dist_type, 5, 3, rank).owned(ids).long() for rank in range(3))
    assert (owned == 1).all()


def test_one_rank_owns_everything() -> None:
    assert Routing.single().owned(tensor(IDS, torch.uint64)).all()


def test_an_empty_batch() -> None:
    for dist_type in ("roundrobin", "hash_roundrobin", "continuous"):
        routing = Routing.of_table(dist_type, 10, 2, 1)
        assert routing.owner(torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="dist_type is 'table'"):
        Routing("table", 2, 0)
    with pytest.raises(InvalidArgumentError, match="rank is 2"):
        Routing("roundrobin", 2, 2)
    with pytest.raises(InvalidArgumentError, match="world_size is 0"):
        Routing("roundrobin", 0, 0)
    with pytest.raises(ArgumentTypeError, match="block is None"):
        Routing("continuous", 2, 0)
    with pytest.raises(InvalidArgumentError, match="block is 4"):
        Routing("roundrobin", 2, 0, 4)
