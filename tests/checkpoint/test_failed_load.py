"""A load that finds damage leaves no trace: tables are, and go on, as if it had never been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import make_rank_model

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    CheckpointError,
    CorruptCheckpointError,
    DynamicEmbDump,
    DynamicEmbLoad,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.table import Table
from dynamicemb.table.cpu import CpuTable
from models import contents, make_model, train
from processes import run_ranks
from tables import STRATEGY, Clock


@contextmanager
def damaged(file: Path, byte: int = -1) -> Iterator[None]:
    good = bytearray(file.read_bytes())
    bad = bytearray(good)
    bad[byte] ^= 1
    file.write_bytes(bad)
    try:
        yield
    finally:
        file.write_bytes(good)


def counting_model(strategy: str, learning_rate: float) -> BatchedDynamicEmbeddingTables:
    return make_model(
        strategy,
        clock=Clock(time=1000),
        learning_rate=learning_rate,
        admit_strategy=FrequencyAdmissionStrategy(threshold=2),
        admission_counter=KVCounter(4096, 128),
    )


def used_and_empty(strategy: str) -> BatchedDynamicEmbeddingTables:
    """Trained, with ids in the admission counters, and then without rows."""
    model = counting_model(strategy, 0.25)
    train(model, 2, seed=7)
    for table in model.tables:
        for rows in list(table.export()):
            table.erase(rows.ids)
        assert len(table) == 0
    return model


def everything(model: BatchedDynamicEmbeddingTables) -> dict[str, Any]:
    """All that a table is beside the memory it holds."""
    return {table.name: state_of(table) for table in model.tables}


def state_of(table: Table) -> dict[str, Any]:
    counter = table.export_counter()
    stats = vars(table.stats()).copy()
    del stats["bytes"]
    return {
        "rows": [(rows.ids.tolist(), rows.embeddings.tolist()) for rows in table.export()],
        "stats": stats,
        "progress": table.progress(),
        "optimizer": (table.optimizer.kind, vars(table.optimizer.args).copy()),
        "counter": None if counter is None else dict(zip(*(c.tolist() for c in counter))),  # noqa: B905
        "capacity": table.capacity,
    }


@contextmanager
def counted_inserts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the tables that rows were put into."""
    seen: list[str] = []
    insert = CpuTable.insert

    def spy(self: CpuTable, *args: Any, **more: Any) -> Any:
        seen.append(self.name)
        return insert(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(CpuTable, "insert", spy)
        yield seen


@pytest.mark.parametrize("strategy", list(STRATEGY))
def test_empty_tables_are_as_they_were(
    strategy: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = counting_model(strategy, 0.5)
    train(one, 20)
    assert min(len(table) for table in one.tables) > 200  # the empty tables have to grow for it
    DynamicEmbDump(memory_path, one, optim=True, counter=True)
    never = used_and_empty(strategy)
    for role in ("emb_keys", "emb_values", "emb_scores", "emb_opt_values", "counter_keys"):
        model = used_and_empty(strategy)
        before = everything(model)
        assert before == everything(never)
        file = memory_path / "model" / f"item_{role}.rank_0.world_size_1"
        with (
            damaged(file),
            counted_inserts(monkeypatch) as inserts,
            pytest.raises(CorruptCheckpointError, match=file.name),
        ):
            DynamicEmbLoad(memory_path, model, optim=True, counter=True)
        assert set(inserts) == (set() if role == "counter_keys" else {"user"})
        assert everything(model) == before
    train(never, 4, seed=9)
    train(model, 4, seed=9)
    assert everything(model) == everything(never)
    assert contents(model) == contents(never)
    again = used_and_empty(strategy)  # nothing is wrong with the rest
    DynamicEmbLoad(memory_path, again, optim=True, counter=True)
    assert contents(again) == contents(one)


def test_any_flipped_bit_and_any_length_of_the_rows(memory_path: Path) -> None:
    """One model refuses hundreds of damaged checkpoints in turn, and then is still as it was."""
    one = make_model(optimizer="exact_adagrad")
    for table in one.tables:
        table.insert(torch.tensor([5, -1, 2**62]), torch.randn(3, 4))
    DynamicEmbDump(memory_path, one, optim=True)
    model = make_model(optimizer="exact_adagrad", learning_rate=0.25)
    before = everything(model)
    files = sorted(memory_path.glob("model/*.rank_0.world_size_1"))
    assert len(files) == 10
    for file in files:
        good = file.read_bytes()
        for byte in range(len(good)):
            flipped = bytes([good[byte] ^ 1 << byte % 8])
            for bad in (good[:byte] + flipped + good[byte + 1 :], good[:byte]):
                file.write_bytes(bad)
                with pytest.raises(CorruptCheckpointError, match=file.name):
                    DynamicEmbLoad(memory_path, model, optim=True)
        file.write_bytes(good)
    assert everything(model) == before
    DynamicEmbLoad(memory_path, model, optim=True)
    assert contents(model) == contents(one)


def test_damage_in_the_last_block_of_many(memory_path: Path) -> None:
    rows = 200_000
    model = make_model(names=("first", "last"), dim=16, max_capacity=2 * rows)
    ids = torch.arange(rows)
    for table in model.tables:
        table.insert(ids, torch.randn(rows, 16))
    DynamicEmbDump(memory_path, model, optim=True)
    file = memory_path / "model" / "last_emb_opt_values.rank_0.world_size_1"
    assert file.stat().st_size > 5 * 2**22
    other = make_model(names=("first", "last"), dim=16, max_capacity=2 * rows)
    before = everything(other)
    with damaged(file), pytest.raises(CorruptCheckpointError, match=file.name):
        DynamicEmbLoad(memory_path, other, optim=True)
    assert everything(other) == before
    assert sum(table.stats().bytes for table in other.tables) < rows  # memory is given back


def test_tables_with_rows_keep_them(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_model()
    train(one, 20)
    DynamicEmbDump(memory_path, one, optim=True)
    for clear in (False, True):
        model = make_model(learning_rate=0.25)
        train(model, 2, seed=7)
        before = everything(model), contents(model)
        file = memory_path / "model" / "item_emb_opt_values.rank_0.world_size_1"
        with (
            damaged(file),
            counted_inserts(monkeypatch) as inserts,
            pytest.raises(CorruptCheckpointError, match=file.name),
        ):
            DynamicEmbLoad(memory_path, model, optim=True, clear=clear)
        assert inserts == []
        assert (everything(model), contents(model)) == before


@pytest.mark.parametrize("full", ["user", "item"])
@pytest.mark.parametrize("broken", ["user", "item"])
def test_one_table_has_rows_and_one_is_empty(full: str, broken: str, memory_path: Path) -> None:
    one = make_model()
    train(one, 20)
    DynamicEmbDump(memory_path, one, optim=True)
    model = make_model(learning_rate=0.25)
    train(model, 2, seed=7)
    for table in model.tables:
        if table.name != full:
            table.clear()
    before = everything(model), contents(model)
    file = memory_path / "model" / f"{broken}_emb_values.rank_0.world_size_1"
    with damaged(file), pytest.raises(CorruptCheckpointError, match=file.name):
        DynamicEmbLoad(memory_path, model, optim=True)
    assert (everything(model), contents(model)) == before
    DynamicEmbLoad(memory_path, model, optim=True)
    for name, rows in contents(one).items():
        assert contents(model)[name] | rows == contents(model)[name]


def test_a_table_that_logs_removals_is_not_told_of_ids_it_never_had(memory_path: Path) -> None:
    one = make_model()
    train(one)
    DynamicEmbDump(memory_path, one)
    model = make_model()
    mark = {}
    for table in model.tables:
        table.log_removals()
        mark[table.name] = table.mark_changes()
    file = memory_path / "model" / "item_emb_scores.rank_0.world_size_1"
    with damaged(file), pytest.raises(CorruptCheckpointError):
        DynamicEmbLoad(memory_path, model)
    assert [table.removed_since(mark[table.name]).tolist() for table in model.tables] == [[], []]


def dump_rank(rank: int, path: str) -> None:
    DynamicEmbDump(path, make_rank_model("roundrobin", 2, rank, fill=True), optim=True)


def load_of_rank(rank: int, path: str, rows_on_rank: int | None) -> bool:
    """Whether a load that fails leaves this rank as it was; `rows_on_rank` has rows before."""
    model = make_rank_model("roundrobin", 2, rank, fill=rank == rows_on_rank, value=1.0)
    before = everything(model), contents(model)
    expected = CorruptCheckpointError if rank == 1 else CheckpointError
    with pytest.raises(expected, match="item_emb_opt_values.rank_1"):
        DynamicEmbLoad(path, model, optim=True)
    assert (everything(model), contents(model)) == before
    return True


@pytest.mark.parametrize("rows_on_rank", [None, 0])
def test_only_one_rank_has_a_damaged_file(memory_path: Path, rows_on_rank: int | None) -> None:
    run_ranks(2, dump_rank, str(memory_path))
    file = memory_path / "model" / "item_emb_opt_values.rank_1.world_size_2"
    with damaged(file):
        assert run_ranks(2, load_of_rank, str(memory_path), rows_on_rank) == [True, True]


def test_an_interrupt_is_undone_too(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_model()
    train(one)
    DynamicEmbDump(memory_path, one, optim=True)
    model = make_model(learning_rate=0.25)
    before = everything(model)
    insert: Callable[..., Any] = CpuTable.insert

    def interrupted(self: CpuTable, *args: Any, **more: Any) -> Any:
        result = insert(self, *args, **more)
        if self.name == "item":
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(CpuTable, "insert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DynamicEmbLoad(memory_path, model, optim=True)
    assert everything(model) == before
