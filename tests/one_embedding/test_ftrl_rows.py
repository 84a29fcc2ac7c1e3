"""OneFlow's rows of FTRL are weight, accumulator, z: exchanged wherever they come in or go out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import DIM, STORES, make, rows_of
from test_persistent_tables import read_all, write_oneflow_table

from dynamicemb import one_embedding
from dynamicemb.errors import InvalidArgumentError, UsageError
from dynamicemb.one_embedding.persistent import noting_writer

KEYS = np.array([3, -1, 2**62, 10, 11], dtype=np.int64)
SOURCES = ("oneflow", "writer", "writer of two ranks")


def oneflow_rows() -> np.ndarray:
    """Rows as OneFlow has them, most z negative."""
    draw = np.random.default_rng(2)
    shape = len(KEYS), DIM
    weight = draw.standard_normal(shape)
    accumulator = 0.5 + draw.random(shape)
    z = draw.standard_normal(shape) - 1
    return np.concatenate([weight, accumulator, z], 1).astype(np.float32)


def write(path: Path, source: str, rows: np.ndarray, name: str = "s") -> list[str]:
    """The folders of a table that has ``rows``."""
    if source == "oneflow":
        write_oneflow_table(path / "0-1", [(KEYS, rows)], {name: 1})
        return [f"{path}/0-1"]
    ranks = 2 if "two" in source else 1
    paths = [f"{path}/{rank}-{ranks}" for rank in range(ranks)]
    arguments = paths, name, torch.int64, torch.float, rows.shape[1]
    with one_embedding.make_persistent_table_writer(*arguments) as writer:
        writer.write(KEYS, rows)
    return paths


def step_of(rows: np.ndarray, gradient: float, lr: float) -> tuple[np.ndarray, ...]:
    """(weight, accumulator, z) after one step of FTRL-Proximal, by the published formula."""
    weight, before, z = np.split(rows.astype(np.float64), 3, 1)
    after = before + gradient**2
    z = z + gradient - (np.sqrt(after) - np.sqrt(before)) / lr * weight
    return -z * lr / np.sqrt(after), after, z


def train_once(embedding: one_embedding.Embedding, gradient: float, lr: float) -> None:
    ftrl = one_embedding.Ftrl(embedding.parameters(), lr=lr)
    ftrl.zero_grad()
    (embedding(torch.from_numpy(KEYS)) * gradient).sum().backward()
    ftrl.step()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("store", STORES)
def test_a_table_of_oneflow_goes_on_training(tmp_path: Path, store: str, source: str) -> None:
    rows = oneflow_rows()
    write(tmp_path, source, rows)
    embedding = make(tmp_path, store, size_factor=3, resume=False)
    embedding.load_snapshot("s", optimizer="ftrl", step=7)
    train_once(embedding, 0.3, 0.1)
    found = embedding.tables[0].find(torch.from_numpy(KEYS))
    weight, accumulator, z = step_of(rows, 0.3, 0.1)
    np.testing.assert_allclose(found.embeddings, weight, rtol=1e-5)
    np.testing.assert_allclose(found.state, np.concatenate([z, accumulator], 1), rtol=1e-5)


@pytest.mark.parametrize("store", STORES)
def test_the_reader_gives_rows_in_oneflows_order(tmp_path: Path, store: str) -> None:
    rows = oneflow_rows()
    write(tmp_path, "writer", rows)
    embedding = make(tmp_path, store, size_factor=3, resume=False)
    embedding.load_snapshot("s", optimizer="ftrl", step=7)
    train_once(embedding, 0.3, 0.1)
    embedding.save_snapshot("trained")
    stepped = np.concatenate(step_of(rows, 0.3, 0.1), 1)
    for name, expected in (("s", rows), ("trained", stepped)):
        read = read_all([f"{tmp_path}/0-1"], name, torch.int64, 3 * DIM)
        assert set(read) == set(KEYS.tolist())
        for key, row in zip(KEYS.tolist(), expected, strict=True):
            np.testing.assert_allclose(read[key], row, rtol=1e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_what_the_reader_gave_the_writer_takes(tmp_path: Path, source: str) -> None:
    trained = make(tmp_path / "a", size_factor=3)
    train_once(trained, 0.3, 0.1)
    trained.save_snapshot("s")
    read = read_all([f"{tmp_path}/a/0-1"], "s", torch.int64, 3 * DIM)
    write(tmp_path / "b", source, np.stack([read[key] for key in KEYS.tolist()]))
    embedding = make(tmp_path / "b", size_factor=3, resume=False)
    embedding.load_snapshot("s", optimizer="ftrl", step=1)
    for one in (trained, embedding):
        train_once(one, -0.2, 0.1)
    torch.testing.assert_close(rows_of(embedding, KEYS), rows_of(trained, KEYS), rtol=0, atol=0)


@pytest.mark.parametrize("store", STORES)
def test_a_state_dict_keeps_rows_whose_optimizer_was_said(tmp_path: Path, store: str) -> None:
    """The snapshot that was loaded does not say it, so the state dict names another one."""
    write(tmp_path, "writer", oneflow_rows())
    embedding = make(tmp_path, store, size_factor=3, resume=False)
    embedding.load_snapshot("s", optimizer="ftrl", step=7)
    state = embedding.state_dict()
    table = embedding.tables[0]
    before = table.find(torch.from_numpy(KEYS))
    assert table.optimizer.kind.name == "FTRL"
    embedding.close()
    again = make(tmp_path, store, size_factor=3, resume=False)
    again.load_state_dict(state)
    after = again.tables[0].find(torch.from_numpy(KEYS))
    assert again.tables[0].optimizer.kind.name == "FTRL"
    assert torch.equal(after.state, before.state)
    assert torch.equal(after.embeddings, before.embeddings)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("store", STORES)
def test_an_optimizer_that_was_not_named_is_asked_for_before_state_is_lost(
    tmp_path: Path, store: str, source: str
) -> None:
    """Rows of three equal parts are those of Adam or of FTRL."""
    rows = oneflow_rows()
    write(tmp_path, source, rows)
    embedding = make(tmp_path, store, size_factor=3, resume=False)
    with pytest.warns(UserWarning, match=r"fit 'adam' and 'ftrl'; taken as that of 'adam'.*Name"):
        embedding.load_snapshot("s")
    refused = (
        r"taken as that of 'adam', and now 'ftrl' updates.*load_snapshot\('s', optimizer='ftrl'"
    )
    with pytest.raises(UsageError, match=refused):
        train_once(embedding, 0.3, 0.1)
    assert embedding.tables[0].optimizer.kind.name == "ADAM"
    embedding.load_snapshot("s", optimizer="ftrl", step=7)
    train_once(embedding, 0.3, 0.1)
    np.testing.assert_allclose(rows_of(embedding, KEYS), step_of(rows, 0.3, 0.1)[0], rtol=1e-5)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("store", STORES)
def test_a_snapshot_of_rows_whose_optimizer_was_not_named_does_not_name_it_either(
    tmp_path: Path, store: str, source: str
) -> None:
    rows = oneflow_rows()
    write(tmp_path, source, rows)
    embedding = make(tmp_path, store, size_factor=3, resume=False)
    with pytest.warns(UserWarning, match="'adam' and 'ftrl'"):
        embedding.load_snapshot("s")
    embedding.save_snapshot("again")
    read = read_all([f"{tmp_path}/0-1"], "again", torch.int64, 3 * DIM)
    for key, row in zip(KEYS.tolist(), rows, strict=True):
        np.testing.assert_array_equal(read[key], row)
    embedding.close()
    embedding = make(tmp_path, store, size_factor=3, resume=False)
    embedding.load_snapshot("again", optimizer="ftrl", step=7)
    train_once(embedding, 0.3, 0.1)
    np.testing.assert_allclose(rows_of(embedding, KEYS), step_of(rows, 0.3, 0.1)[0], rtol=1e-5)
    embedding.save_snapshot("named")
    embedding.load_snapshot("named")
    assert embedding.tables[0].optimizer.kind.name == "FTRL"


@pytest.mark.parametrize("named", [True, False])
def test_the_optimizer_that_was_taken_goes_on(
    tmp_path: Path, named: bool, recwarn: pytest.WarningsRecorder
) -> None:
    rows = np.abs(oneflow_rows())
    write(tmp_path, "oneflow", rows)
    embedding = make(tmp_path, size_factor=3, resume=False)
    embedding.load_snapshot("s", **({"optimizer": "adam"} if named else {}), step=7)
    assert any("'adam' and 'ftrl'" in str(one.message) for one in recwarn) is not named
    embedding(torch.from_numpy(KEYS)).sum().backward()
    torch.optim.Adam(embedding.parameters(), lr=0.1).step()
    assert embedding.tables[0].iteration == 8
    recwarn.clear()
    embedding.load_snapshot("s")  # of the optimizer that updates the rows
    assert not recwarn.list
    if named:  # state starts again for another one, as it was said whose it is
        train_once(embedding, 0.3, 0.1)
        assert embedding.tables[0].optimizer.kind.name == "FTRL"


def test_an_optimizer_that_fits_alone_needs_no_name(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    write(tmp_path, "oneflow", oneflow_rows()[:, :DIM])
    embedding = make(tmp_path, resume=False)
    embedding.load_snapshot("s")
    assert not recwarn.list


def old_rows(path: Path, rows: np.ndarray) -> None:
    """As the writer wrote them before it noted an order."""
    note: dict[str, Any] = {"order": None}
    with noting_writer([f"{path}/0-1"], "s", 3 * DIM, note) as writer:
        writer.write(KEYS, rows)


@pytest.mark.parametrize("store", STORES)
def test_rows_of_an_earlier_writer_load_as_they_did_or_are_refused(
    tmp_path: Path, store: str
) -> None:
    rows = oneflow_rows()
    weight, accumulator, z = np.split(rows, 3, 1)
    old_rows(tmp_path / "ours", np.concatenate([weight, z, accumulator], 1))
    embedding = make(tmp_path / "ours", store, size_factor=3, resume=False)
    embedding.load_snapshot("s", optimizer="ftrl", step=7)
    train_once(embedding, 0.3, 0.1)
    np.testing.assert_allclose(rows_of(embedding, KEYS), step_of(rows, 0.3, 0.1)[0], rtol=1e-5)

    old_rows(tmp_path / "theirs", rows)
    embedding = make(tmp_path / "theirs", store, size_factor=3, resume=False)
    embedding(torch.tensor([77]))
    with pytest.raises(InvalidArgumentError, match=r"negative accumulator.*write it again"):
        embedding.load_snapshot("s", optimizer="ftrl", step=7)
    assert len(embedding.tables[0]) == 1
    rows_of(embedding, [77])
