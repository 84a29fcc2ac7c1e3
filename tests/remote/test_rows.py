"""Rows written are read, bit by bit: in Redis in both layouts, and in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from row_makers import FORMAT, IDS, make

from dynamicemb.errors import InvalidArgumentError
from dynamicemb.tiers.remote.memory import forget_memory
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import Part, RemoteRows, RowFormat
from redis_servers import RedisServer

Open = Callable[..., RemoteRows]


@pytest.fixture(params=["packed", "upstream", "memory"])
def open_table(request: pytest.FixtureRequest) -> Open:
    """Opens a table of the kind."""
    if request.param == "memory":
        forget_memory("test")
        return lambda table="t", row_format=FORMAT: open_rows("memory://test", table, row_format)
    server: RedisServer = request.getfixturevalue("server")
    url = server.url(f"?layout={request.param}&&chunk_size=10&&prefix=p")
    return lambda table="t", row_format=FORMAT: open_rows(url, table, row_format)


def test_every_id_is_legal_and_apart(open_table: Open) -> None:
    rows = open_table()
    rows.push(IDS, make(IDS))
    found, values = open_table().pull(IDS.flip(0))
    assert bool(found.all())
    assert torch.equal(values, make(IDS).flip(0))
    assert sorted(rows.ids().tolist()) == sorted(IDS.tolist())


def test_missing_rows_are_said_to_be(open_table: Open) -> None:
    rows = open_table()
    rows.push(IDS[:3], make(IDS[:3]))
    found, values = rows.pull(IDS)
    assert found.tolist() == [True] * 3 + [False] * 4
    assert torch.equal(values[:3], make(IDS[:3]))
    assert rows.contains(IDS).tolist() == found.tolist()


def test_many_chunks(open_table: Open) -> None:
    rows = open_table()
    ids = torch.randint(-(2**63), 2**63 - 1, (1234,))
    rows.push(ids, make(ids))
    found, values = rows.pull(ids)
    assert bool(found.all())
    assert torch.equal(values, make(ids))
    assert rows.count() == 1234
    seen = torch.cat([some for some, _ in rows.iterate(100)])
    assert torch.equal(seen.sort().values, ids.sort().values)


def test_nothing(open_table: Open) -> None:
    rows = open_table()
    none = torch.empty(0, dtype=torch.int64)
    rows.push(none, make(none))
    assert [len(one) for one in rows.pull(none)] == [0, 0]
    assert len(rows.erase(none)) == len(rows.contains(none)) == rows.count() == 0


def test_the_last_of_equal_ids_counts(open_table: Open) -> None:
    rows = open_table()
    ids = torch.tensor([5] * 25 + [6])
    values = torch.cat([make(ids[:1], version) for version in range(26)])
    rows.push(ids, values)
    assert torch.equal(rows.pull(ids[-2:])[1], values[-2:])


def test_erase_and_clear(open_table: Open) -> None:
    rows, other = open_table(), open_table("t2")
    ids = torch.arange(50)
    rows.push(ids, make(ids))
    other.push(ids, make(ids, 1))
    erased = rows.erase(torch.tensor([3, 3, 99, 4]))
    assert erased.tolist() == [True, False, False, True]
    assert rows.count() == 48
    rows.clear()
    assert rows.count() == 0
    assert torch.equal(other.pull(ids)[1], make(ids, 1))


@pytest.mark.parametrize("name", ["../x", "a/b", "x\0", "*", "[a]?", "{}", "a:b", "ü", "n" * 10000])
def test_any_name_is_a_table_of_its_own(open_table: Open, name: str) -> None:
    plain, odd = open_table("x"), open_table(name)
    plain.push(IDS, make(IDS))
    assert not bool(odd.contains(IDS).any())
    odd.push(IDS, make(IDS, 1))
    assert torch.equal(odd.pull(IDS)[1], make(IDS, 1))
    assert sorted(odd.ids().tolist()) == sorted(IDS.tolist())
    odd.clear()
    assert plain.count() == len(IDS)


def test_a_table_needs_a_name(open_table: Open) -> None:
    with pytest.raises(InvalidArgumentError, match="not empty"):
        open_table("")


def test_wrong_arguments(open_table: Open) -> None:
    rows = open_table()
    with pytest.raises(TypeError, match="int64"):
        rows.pull(torch.zeros(3))
    with pytest.raises(InvalidArgumentError, match=r"uint8 \[7, 20\]"):
        rows.push(IDS, make(IDS)[:, :5])


def test_rows_of_other_options_or_optimizers_are_refused_the_same_way(open_table: Open) -> None:
    open_table().push(IDS, make(IDS))
    same_size = RowFormat((Part("weight", torch.float32, 5),))
    other_size = RowFormat((Part("weight", torch.float32, 6),))
    more = RowFormat((*FORMAT.parts, Part("momentum2", torch.float32, 4)))
    for row_format in (same_size, other_size, more):
        with pytest.raises(InvalidArgumentError, match=" has rows of .*; asked for: ") as raised:
            open_table("t", row_format).pull(IDS)
        assert f"asked for: {row_format.describe()}. " in str(raised.value)
        assert "Use another name, or the options and optimizer that wrote them" in str(raised.value)


# ---- what is in Redis ----


def test_packed_keys_and_values(server: RedisServer) -> None:
    rows = open_rows(server.url("?prefix=model"), "emb1.users", FORMAT)
    rows.push(torch.tensor([7, -1]), make(torch.tensor([7, -1])))
    client = server.client()
    assert sorted(client.keys()) == [
        b"{model:emb1.users:00}ffffffffffffffff",
        b"{model:emb1.users:07}0000000000000007",
    ]
    value = client.get("{model:emb1.users:07}0000000000000007")
    assert value[:4] == FORMAT.tag
    assert value[4:] == bytes(make(torch.tensor([7]))[0].tolist())


def test_upstream_data_is_read(server: RedisServer) -> None:
    """As torchrec_dynamic_embedding's own plug-in writes it, with ids of 64 bits."""
    import struct

    client = server.client()
    for gid in (7, 7 + 2**32, -3):
        for part, width in enumerate((4, 1)):
            key = f"model_table_emb.t_gid_{gid}_cid_0_osid_{part}"
            client.set(key, struct.pack(f"<{width}f", *[gid % 1000 + part] * width))
    rows = open_rows(server.url("?prefix=model&&layout=upstream"), "emb.t", FORMAT)
    found, values = rows.pull(torch.tensor([7, 7 + 2**32, -3, 8]))
    weight, momentum = FORMAT.unpack(values)
    assert found.tolist() == [True, True, True, False]
    assert weight[:3, 0].tolist() == [7.0, float((7 + 2**32) % 1000), 997.0]
    assert momentum[:3, 0].tolist() == [8.0, float((7 + 2**32) % 1000) + 1, 998.0]


def test_upstream_data_without_a_state_is_refused(server: RedisServer) -> None:
    server.client().set("_table_t_gid_7_cid_0_osid_0", bytes(16))
    rows = open_rows(server.url("?layout=upstream"), "t", FORMAT)
    with pytest.raises(InvalidArgumentError, match="osid_1.* is missing.*asked for: weight"):
        rows.pull(torch.tensor([7]))


@pytest.mark.parametrize("layout", ["packed", "upstream"])
def test_a_value_of_the_wrong_size_is_named(server: RedisServer, layout: str) -> None:
    rows = open_rows(server.url(f"?layout={layout}"), "t", FORMAT)
    rows.push(IDS, make(IDS))
    client = server.client()
    key = sorted(client.keys())[0]
    client.set(key, b"short")
    with pytest.raises(InvalidArgumentError, match="has 5 bytes, not ") as caught:
        rows.pull(IDS)
    assert key.decode() in str(caught.value)


def test_a_database_and_a_prefix_are_apart(server: RedisServer) -> None:
    rows = open_rows(server.url("?db=3&&prefix=a"), "t", FORMAT)
    rows.push(IDS, make(IDS))
    assert open_rows(server.url("3?prefix=a"), "t", FORMAT).count() == len(IDS)
    assert open_rows(server.url("?db=3&&prefix=b"), "t", FORMAT).count() == 0
    assert open_rows(server.url("?prefix=a"), "t", FORMAT).count() == 0


@pytest.mark.parametrize("layout", ["packed", "upstream"])
def test_rows_are_forgotten_after_their_ttl(server: RedisServer, layout: str) -> None:
    rows = open_rows(server.url(f"?ttl=1h&&layout={layout}"), "t", FORMAT)
    rows.push(IDS, make(IDS))
    client = server.client()
    assert torch.equal(rows.pull(IDS)[1], make(IDS))
    keys = client.keys()
    assert all(3_500_000 < client.pttl(key) <= 3_600_000 for key in keys)
    for key in keys:
        client.pexpire(key, 1)
    while client.keys():  # the server's clock
        pass
    assert not bool(rows.contains(IDS).any())
