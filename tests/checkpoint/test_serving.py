"""The read-only table over the files of a checkpoint."""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import CheckpointError, CorruptCheckpointError, InvalidArgumentError, UsageError
from dynamicemb.checkpoint import DynamicEmbDump, dump_async
from dynamicemb.routing import Routing
from dynamicemb.serving import ServingTable, build_serving_index
from dynamicemb.table import Rows, Table
from models import make_model, train
from processes import run_ranks
from tables import EXTREME_IDS, tensor
from tables import contents as rows_of


def index_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*_emb_index.*"))


def bucket_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*_emb_buckets.*"))


@pytest.fixture(params=[False, True], ids=["buckets", "index"])
def indexed(request: pytest.FixtureRequest) -> bool:
    """Whether an index is asked for; the first rows of buckets are written without being asked."""
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compact", [False, True])
def test_it_finds_what_the_table_has(
    memory_path: Path,
    dtype: torch.dtype,
    compact: bool,
    indexed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(embedding_dtype=dtype)
    train(model)
    DynamicEmbDump(memory_path, model, optim=True, compact=compact, serving_index=indexed)
    assert (len(index_files(memory_path)), len(bucket_files(memory_path))) == (
        (2, 0) if indexed else (0, 2)
    )
    for table in model.tables:
        rows = rows_of(table)
        with ServingTable(memory_path, table.name) as serving:
            assert (serving.name, serving.dim, serving.dtype) == (table.name, 4, dtype)
            found, embeddings = serving.find(rows.ids)
            assert found.all()
            assert torch.equal(embeddings, rows.embeddings)
            ids = torch.arange(-700, 700)
            found, embeddings = serving.find(ids)
            expected = table.find(ids)
            assert torch.equal(found, expected.found)
            assert torch.equal(embeddings, expected.embeddings)
            assert serving(tensor(EXTREME_IDS)).shape == (len(EXTREME_IDS), 4)
    assert caplog.text == ""


def test_shapes_and_missing_values(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model, 1)
    DynamicEmbDump(memory_path, model, serving_index=True)
    serving = ServingTable(memory_path, missing=-1.5)
    assert torch.equal(serving(torch.tensor([[10**9]])), torch.full((1, 1, 4), -1.5))
    assert serving(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    assert serving(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 4)
    ids = rows_of(model.tables[0]).ids[:6]
    assert torch.equal(serving(ids.view(torch.uint64)), serving(ids))
    assert torch.equal(serving(ids.reshape(2, 3)).reshape(6, 4), serving(ids))
    assert torch.equal(serving(ids[::2]), serving(ids)[::2])
    for bad in (ids.int(), ids.float(), [1, 2]):
        with pytest.raises(TypeError, match="ids"):
            serving(bad)  # type: ignore[arg-type]


def test_an_empty_table(memory_path: Path, indexed: bool) -> None:
    DynamicEmbDump(memory_path, make_model(names=("t",)), serving_index=indexed)
    found, _ = ServingTable(memory_path).find(torch.arange(5))
    assert not found.any()


def test_a_checkpoint_without_an_index_works_and_can_get_one(
    memory_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamicemb.checkpoint.index._MOST_IN_A_BUCKET", 0)
    model = make_model()
    train(model)
    DynamicEmbDump(memory_path, model)
    assert index_files(memory_path) == bucket_files(memory_path) == []
    rows = rows_of(model.tables[0])
    slow = ServingTable(memory_path, "user")
    assert "has no index" in caplog.text
    assert torch.equal(slow(rows.ids), rows.embeddings)
    assert build_serving_index(memory_path) == 2
    assert build_serving_index(memory_path) == 0
    caplog.clear()
    assert torch.equal(ServingTable(memory_path, "user")(rows.ids), rows.embeddings)
    assert caplog.text == ""
    train(model, seed=9)
    DynamicEmbDump(memory_path, model, allow_overwrite=True)
    assert index_files(memory_path) == []  # those of the old checkpoint went with it
    rows = rows_of(model.tables[0])
    assert torch.equal(ServingTable(memory_path, "user")(rows.ids), rows.embeddings)


def test_an_index_of_another_checkpoint_is_not_used(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path / "a", model)
    train(model, seed=3)
    DynamicEmbDump(memory_path / "b", model)
    build_serving_index(memory_path / "a")
    (file,) = index_files(memory_path / "a")
    target = memory_path / "b" / file.relative_to(memory_path / "a")
    target.write_bytes(file.read_bytes())
    rows = rows_of(model.tables[0])
    assert torch.equal(ServingTable(memory_path / "b")(rows.ids), rows.embeddings)


def test_a_dump_in_the_background_writes_the_same(memory_path: Path, indexed: bool) -> None:
    model = make_model(names=("t",))
    train(model)
    rows = rows_of(model.tables[0])
    handle = dump_async(memory_path, model, serving_index=indexed)
    handle.wait()
    assert len(index_files(memory_path) if indexed else bucket_files(memory_path)) == 1
    assert torch.equal(ServingTable(memory_path)(rows.ids), rows.embeddings)


def test_opening_does_not_read_the_rows(memory_path: Path, indexed: bool) -> None:
    """Not a clock: what is open after it is counted. Optimizer state and scores are not mapped."""
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path, model, optim=True, serving_index=indexed)
    serving = ServingTable(memory_path)
    mapped = {
        line.rsplit("/", 1)[-1].strip().split(".rank_")[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(memory_path) in line
    }
    where = "t_emb_index" if indexed else "t_emb_buckets"
    assert mapped == {"t_emb_keys", "t_emb_values", where}
    serving.close()
    del serving
    assert str(memory_path) not in Path("/proc/self/maps").read_text()


def test_a_new_dump_leaves_an_open_table_as_it_was(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path, model, serving_index=True)
    serving = ServingTable(memory_path)
    before = rows_of(model.tables[0])
    train(model, seed=7)
    DynamicEmbDump(memory_path, model, serving_index=True, allow_overwrite=True)
    assert torch.equal(serving(before.ids), before.embeddings)
    assert not torch.equal(ServingTable(memory_path)(before.ids), before.embeddings)


@pytest.mark.parametrize(
    "routing",
    [("roundrobin", None), ("hash_roundrobin", None), ("continuous", 40)],
    ids=lambda one: one[0],
)
def test_the_shards_of_several_ranks(
    memory_path: Path, routing: tuple[str, int | None], indexed: bool
) -> None:
    whole = make_model(names=("t",))
    train(whole, 5)
    rows = rows_of(whole.tables[0])
    run_ranks(3, dump_shards, str(memory_path), routing, indexed, rows.ids, rows.embeddings)
    serving = ServingTable(memory_path, verify=True)
    found, embeddings = serving.find(rows.ids)
    assert found.all()
    assert torch.equal(embeddings, rows.embeddings)
    ids = torch.cat([torch.arange(-700, 700), tensor(EXTREME_IDS)])
    assert torch.equal(serving.find(ids)[0], whole.tables[0].contains(ids))


def dump_shards(
    rank: int,
    path: str,
    routing: tuple[str, int | None],
    indexed: bool,
    ids: torch.Tensor,
    embeddings: torch.Tensor,
) -> None:
    model = make_model(names=("t",))
    mine = Routing(routing[0], 3, rank, routing[1])
    model.routings = {"t": mine}
    owned = mine.owned(ids)
    model.tables[0].insert(ids[owned], embeddings[owned])
    DynamicEmbDump(path, model, serving_index=indexed)


def dump_copies(rank: int, path: str) -> None:
    model = make_model(names=("t",))
    model.tables[0].insert(torch.tensor([1]), torch.full((1, 4), float(rank)))
    DynamicEmbDump(path, model)


def test_tables_that_every_rank_had_for_itself(memory_path: Path) -> None:
    run_ranks(2, dump_copies, str(memory_path))
    with pytest.raises(InvalidArgumentError, match="rank is None; allowed: 0 to 1"):
        ServingTable(memory_path)
    with pytest.raises(InvalidArgumentError, match="rank is 2"):
        ServingTable(memory_path, rank=2)
    assert ServingTable(memory_path, rank=1)(torch.tensor([1])).tolist() == [[1.0] * 4]


def look_up(rank: int, path: str, ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
    serving = ServingTable(path)
    embeddings = serving(ids)
    maps = Path("/proc/self/maps").read_text().splitlines()
    modes = {line.split()[1] for line in maps if path in line}
    return embeddings, modes == {"r--s"}  # read only, and the same pages for all


def test_processes_share_the_pages(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path, model, serving_index=True)
    rows = rows_of(model.tables[0])
    for embeddings, shared in run_ranks(3, look_up, str(memory_path), rows.ids):
        assert torch.equal(embeddings, rows.embeddings)
        assert shared


def test_pickling_opens_the_files_again(memory_path: Path) -> None:
    model = make_model()
    train(model)
    DynamicEmbDump(memory_path, model, serving_index=True)
    serving = ServingTable(memory_path, "item", missing=3.0)
    copy = pickle.loads(pickle.dumps(serving))
    ids = torch.arange(-50, 50)
    assert torch.equal(copy(ids), serving(ids))
    assert repr(copy) == repr(serving)


def test_which_table(memory_path: Path) -> None:
    model = make_model()
    DynamicEmbDump(memory_path, model)
    with pytest.raises(InvalidArgumentError, match="one table of 'user' of 'model', 'item'"):
        ServingTable(memory_path)
    with pytest.raises(InvalidArgumentError, match="'other'"):
        ServingTable(memory_path, "other")
    with pytest.raises(InvalidArgumentError, match="'elsewhere'"):
        ServingTable(memory_path, "user", collection="elsewhere")
    assert ServingTable(memory_path, "user", collection="model").name == "user"


def test_what_is_no_checkpoint(memory_path: Path) -> None:
    with pytest.raises(CheckpointError, match="allowed: a folder that exists"):
        ServingTable(memory_path / "nothing")
    with pytest.raises(CheckpointError):
        ServingTable(memory_path)


def test_a_closed_table(memory_path: Path) -> None:
    DynamicEmbDump(memory_path, make_model(names=("t",)), serving_index=True)
    serving = ServingTable(memory_path)
    serving.close()
    with pytest.raises(UsageError, match="closed"):
        serving(torch.tensor([1]))


def test_damaged_files(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path, model, serving_index=True)
    rows = rows_of(model.tables[0])
    (index,) = index_files(memory_path)
    whole = index.read_bytes()

    index.write_bytes(whole[:-8])
    with pytest.raises(CorruptCheckpointError, match="the manifest says"):
        ServingTable(memory_path)
    index.write_bytes(b"x" * len(whole))
    with pytest.raises(CorruptCheckpointError, match="no index"):
        ServingTable(memory_path)
    header = struct.pack("<8sQQQ", b"dembidx1", 3, 0, (len(whole) - 64) // 8)
    index.write_bytes(header + whole[32:])
    with pytest.raises(CorruptCheckpointError, match="index of 3 rows"):
        ServingTable(memory_path)
    # Words that point nowhere: found by verify; without it, lookups stay inside the files.
    index.write_bytes(whole[:64] + b"\xff" * (len(whole) - 64))
    with pytest.raises(CorruptCheckpointError, match="is corrupt"):
        ServingTable(memory_path, verify=True)
    assert not ServingTable(memory_path).find(rows.ids)[0].any()
    index.write_bytes(whole)
    values = next(memory_path.rglob("t_emb_values.*"))
    values.write_bytes(values.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError, match="the manifest says"):
        ServingTable(memory_path)


def test_damaged_first_rows(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path, model)
    rows = rows_of(model.tables[0])
    (file,) = bucket_files(memory_path)
    whole = file.read_bytes()
    for damage, message in (
        (whole[:-8], "the manifest says"),
        (b"x" * len(whole), "no buckets"),
        (struct.pack("<8sQ", b"dembbkt1", 3) + whole[16:], "index of 3 rows"),
    ):
        file.write_bytes(damage)
        with pytest.raises(CorruptCheckpointError, match=message):
            ServingTable(memory_path)
    words = (len(whole) - 64) // 8
    for word in (0, len(rows.ids) - 1, 2**63):  # lookups stay inside the files
        file.write_bytes(whole[:64] + struct.pack("<Q", word) * words)
        with pytest.raises(CorruptCheckpointError, match="is corrupt"):
            ServingTable(memory_path, verify=True)
        assert not ServingTable(memory_path).find(rows.ids)[0].any()
    file.write_bytes(whole[:64] + struct.pack("<QQ", 0, 2**63) * (words // 2) + whole[-8:])
    found, embeddings = ServingTable(memory_path).find(rows.ids)
    assert 0 < found.sum() < len(found)  # of every other bucket all rows are looked through
    assert torch.equal(embeddings[found], rows.embeddings[found])


def test_rows_in_another_order_get_no_first_rows(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(names=("t",), init_capacity=4096)
    train(model)
    table = model.tables[0]
    rows = rows_of(table)
    export = type(table).export

    def backwards(self: Table, **arguments: Any) -> Iterator[Rows]:
        for batch in export(self, **arguments):
            yield Rows(*(part.flip(0).contiguous() for part in vars(batch).values()))

    monkeypatch.setattr(type(table), "export", backwards)
    DynamicEmbDump(memory_path, model)
    assert bucket_files(memory_path) == []
    assert torch.equal(ServingTable(memory_path)(rows.ids), rows.embeddings)
    assert "has no index" in caplog.text


def test_lookups_from_several_threads(memory_path: Path) -> None:
    model = make_model(names=("t",))
    train(model)
    DynamicEmbDump(memory_path, model, serving_index=True)
    serving = ServingTable(memory_path)
    ids = torch.arange(-500, 500)
    expected = serving(ids)
    wrong = []

    def look() -> None:
        for _ in range(50):
            if not torch.equal(serving(ids), expected):
                wrong.append(1)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
