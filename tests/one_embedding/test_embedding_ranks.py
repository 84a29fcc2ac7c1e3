"""Several ranks, in real processes: owners by hash, folders per rank, snapshots on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import rank_work as work
import torch
from embeddings import STORES

from dynamicemb.routing import Routing
from ranks import Ranks


class Run(Protocol):
    def __call__(self, count: int, function: Any, *arguments: Any) -> list[Any]: ...


@pytest.fixture
def run(ranks: Ranks) -> Run:
    """Runs a function on ``count`` ranks; one is this process."""

    def run_on(count: int, function: Any, *arguments: Any) -> list[Any]:
        if count == 1:
            return [function(0, *arguments)]
        return ranks.run(count, work.call, work=function, given=arguments)

    return run_on


def merged(parts: list[dict[int, Any]]) -> dict[int, Any]:
    """The rows of all ranks; each is on the rank that owns it, and on no other."""
    rows: dict[int, Any] = {}
    for rank, part in enumerate(parts):
        if part:
            routing = Routing("hash_roundrobin", len(parts), rank)
            assert routing.owned(torch.tensor(list(part))).all()
        rows |= part
    assert len(rows) == sum(map(len, parts))
    return rows


def assert_close(one: dict[int, Any], other: dict[int, Any]) -> None:
    """Sums of gradients have another order on other ranks."""
    assert one.keys() == other.keys()
    for which in (0, 1):
        a, b = (np.array([rows[id_][which] for id_ in one]) for rows in (one, other))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Any], Any, dict[int, Any]]:
    """One process: rows after the steps, what it evaluates to, rows two steps later."""
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("alone"))
    rows, evaluated = work.train_and_save(0, path, "device_mem", False, False)
    loaded, later = work.load_and_go_on(0, path, "device_mem", None, True)
    assert loaded == rows
    return rows, evaluated, later


@pytest.mark.parametrize(
    ("store", "count", "apart", "uneven"),
    [
        ("device_mem", 2, False, False),
        ("cached_host_mem", 2, True, False),
        ("cached_ssd", 3, False, True),  # one rank has no ids
    ],
)
def test_ranks_train_what_one_process_does(
    tmp_path: Path, alone: Any, run: Run, store: str, count: int, apart: bool, uneven: bool
) -> None:
    results = run(count, work.train_and_save, str(tmp_path), store, apart, uneven)
    assert_close(merged([rows for rows, _ in results]), alone[0])
    for _, evaluated in results:
        np.testing.assert_allclose(evaluated, alone[1], rtol=1e-4, atol=1e-5)
    expected = [f"{rank}-{count}" for rank in range(count)]
    if apart:
        expected = [f"rank {rank} of {count}" for rank in range(count)]
    assert sorted(p.name for p in tmp_path.iterdir()) == expected


@pytest.mark.parametrize(
    ("store", "counts", "apart"),
    [("device_mem", (1, 2), False), ("cached_ssd", (2, 1), False), ("device_mem", (2, 3), True),
     ("cached_ssd", (3, 2), True), ("cached_host_mem", (2, 3), False)],
)  # fmt: skip
def test_a_snapshot_of_n_ranks_loads_with_m(
    tmp_path: Path, alone: Any, run: Run, store: str, counts: tuple[int, int], apart: bool
) -> None:
    first, second = counts

    saved = run(first, work.train_and_save, str(tmp_path), store, apart, False)
    rows = merged([one for one, _ in saved])
    old = None
    if apart:
        old = [str(tmp_path / f"rank {rank} of {first}") for rank in range(first)]
    loaded = run(second, work.load_and_go_on, str(tmp_path), store, old, True)
    assert merged([one for one, _ in loaded]) == rows  # bit by bit
    if store != "cached_ssd":
        assert_close(merged([later for _, later in loaded]), alone[2])
    # And once more on the first number of ranks: the newest of two sets is found.
    if not apart:
        run(second, work.load_and_go_on, str(tmp_path), store, None, False)


def test_the_number_of_a_rank_is_padded(tmp_path: Path) -> None:
    from dynamicemb.one_embedding.folders import rank_folder, sets_of_folders

    assert rank_folder("p", 0, 1) == "p/0-1"
    assert rank_folder("p", 3, 16) == "p/03-16"
    for rank in range(16):
        Path(rank_folder(str(tmp_path), rank, 16)).mkdir()
    (tmp_path / "0-2").mkdir()  # not complete
    (tmp_path / "3-16").mkdir()  # not a name of ours
    expected = tuple(rank_folder(str(tmp_path), rank, 16) for rank in range(16))
    assert sets_of_folders(str(tmp_path)) == [expected]


def test_a_list_of_folders_has_one_for_each_rank(tmp_path: Path) -> None:
    from embeddings import make

    from dynamicemb.errors import InvalidArgumentError

    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(InvalidArgumentError, match="len\\(persistent_path\\) is 2; allowed: 1"):
        make(paths)
    make(paths[:1])


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 2.0), ("mean", 1.0)])
def test_gradients_are_added_or_averaged(
    tmp_path: Path, run: Run, reduction: str, expected: float
) -> None:
    for (moved,) in run(2, work.average, str(tmp_path), reduction):
        assert moved == pytest.approx(expected)


def test_beside_distributed_data_parallel(tmp_path: Path, run: Run) -> None:
    torch.set_num_threads(1)
    alone = work.beside_a_dense_model(0, str(tmp_path / "alone"))
    for losses in run(2, work.beside_a_dense_model, str(tmp_path / "ranks")):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_a_snapshot_that_one_rank_could_not_take_is_not_there(tmp_path: Path, run: Run) -> None:
    zero, one = run(2, work.save_on_some_ranks, str(tmp_path))
    assert "rank 1 of 2 failed: StoreError: No space left on device" in zero[0]
    assert one[0] == "No space left on device"
    for messages in (zero, one):
        assert "no snapshot 'gone'" in messages[1]
        assert messages[2] == "1"  # nothing is left of the one that failed


def test_checkpoints_of_ranks_take_an_embedding_along(tmp_path: Path, run: Run) -> None:
    folder = str(tmp_path / "dump")
    dumped = run(2, work.dump, str(tmp_path / "a"), folder)
    assert work.load_dump(0, str(tmp_path / "b"), folder) == merged(dumped)


@pytest.mark.stress
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_every_number_of_ranks_to_every_other(
    tmp_path: Path, run: Run, store: str, first: int
) -> None:
    saved = run(first, work.train_and_save, str(tmp_path), store, False, False)
    rows = merged([one for one, _ in saved])
    for second in (1, 2, 3, 4):
        loaded = run(second, work.load_and_go_on, str(tmp_path), store, None, False)
        assert merged([one for one, _ in loaded]) == rows
