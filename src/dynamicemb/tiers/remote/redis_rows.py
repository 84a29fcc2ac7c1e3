"""Rows in Redis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from dynamicemb.errors import CorruptStoreError, StoreError
from dynamicemb.tiers.remote.redis_client import client_of
from dynamicemb.tiers.remote.redis_keys import (
    Bytes,
    Ids,
    Keys,
    PackedKeys,
    UpstreamKeys,
    command,
    many_commands,
    one_command,
)
from dynamicemb.tiers.remote.redis_values import Replies, ValueShape, WrongValueError
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat, first_of_each
from dynamicemb.tiers.remote.url import RedisUrl

_SCAN_COUNT = 10_000


def redis_rows(url: RedisUrl, table: str, row_format: RowFormat) -> RemoteRows:
    """The rows of a table in the layout that ``url`` names."""
    if url.layout == "upstream":
        return UpstreamRedisRows(url, table, row_format)
    return PackedRedisRows(url, table, row_format)


class _RedisRows(RemoteRows):
    """What the layouts share."""

    _keys: Keys

    def __init__(self, url: RedisUrl, table: str, row_format: RowFormat) -> None:
        super().__init__(table, row_format)
        self._url = url
        self._client = client_of(url)
        self._cluster = url.kind == "cluster"

    def __repr__(self) -> str:
        return f"{self._client!r} table {self.table!r}"

    def _what(self, verb: str) -> str:
        return f"{verb} rows of table {self.table!r}"

    def _run(self, what: str, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """The replies to commands, sent together."""
        if self._cluster:
            return self._client.retry(what, lambda: self._client.cluster_commands(commands))
        message = [b"".join(command(*one) for one in commands)]
        return self._client.retry(what, lambda: self._client.converse(message, len(commands)))

    def _per_key(self, name: bytes, keys: Sequence[bytes], what: str) -> list[Any]:
        """The replies to one command per key."""
        replies = self._client.run_all(
            lambda some: self._run(what, [(name, key) for key in some]),
            _split(keys, self._url.chunk_size),
        )
        return [reply for some in replies for reply in some]

    @property
    def _ttl(self) -> tuple[bytes, ...]:
        return (b"PX", b"%d" % self._url.ttl_ms) if self._url.ttl_ms else ()

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        keys = self._keys.of(self._checked(ids).numpy())[:: self._keys.parts]
        replies = self._per_key(b"EXISTS", keys, self._what("looking for"))
        return torch.tensor(replies, dtype=torch.bool, device="cpu")

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        there = self.contains(ids) & first_of_each(ids)  # asked before: erasing may be tried twice
        keys = self._keys.of(ids[there].numpy())
        self._per_key(b"UNLINK", keys, self._what("erasing"))
        return there

    def ids(self) -> torch.Tensor:
        parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
        parts += [torch.from_numpy(self._keys.parse(keys)) for keys in self._scan()]
        distinct: torch.Tensor = torch.unique(torch.cat(parts))  # a scan may show a key twice
        return distinct

    def _scan(self) -> Iterator[list[bytes]]:
        what, pattern = self._what("listing"), self._keys.pattern
        if self._cluster:
            client = self._client
            yield client.retry(
                what, lambda: list(client.client.scan_iter(match=pattern, count=_SCAN_COUNT))
            )
            return
        cursor = b"0"
        while True:
            scan = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_COUNT)
            cursor, keys = self._run(what, [scan])[0]
            yield keys
            if cursor == b"0":
                return

    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._checked(ids, rows)
        if len(torch.unique(ids)) != len(ids):  # of equal ids the last: chunks have no order
            last = first_of_each(ids.flip(0)).flip(0)
            ids, rows = ids[last], rows[last]
        if len(ids):
            self._push(ids.contiguous().numpy(), rows.contiguous().numpy())

    @abstractmethod
    def _push(self, ids: Ids, rows: Bytes) -> None:
        """:meth:`push` of distinct ids, of which there are some."""

    def _wrong_size(self, key: bytes, size: int, allowed: int) -> CorruptStoreError:
        return CorruptStoreError(
            None,
            f"{self!r}: the value of key {key!r} has {size} bytes; a row of "
            f"{self.format.describe()} has {allowed}",
            self._url.where,
        )


class PackedRedisRows(_RedisRows):
    """One value per row; see :mod:`dynamicemb.tiers.remote.redis_keys`."""

    _keys: PackedKeys

    def __init__(self, url: RedisUrl, table: str, row_format: RowFormat) -> None:
        super().__init__(url, table, row_format)
        self._keys = PackedKeys(url.prefix, table)
        self._shape = ValueShape(row_format.tag, row_format.nbytes)
        self._blank = bytes(4 + row_format.nbytes)

    def _jobs(self, ids: Ids) -> list[Any]:
        """Which rows each command is about: of a cluster, those in one place of it."""
        if not self._cluster:
            size = self._url.chunk_size
            return [slice(at, at + size) for at in range(0, len(ids), size)]
        order = np.argsort(self._keys.shards(ids), kind="stable")
        return list(np.array_split(order, max(1, -(-len(ids) // self._url.chunk_size))))

    def pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._checked(ids).numpy()
        found = np.empty(len(numbers), np.bool_)
        rows = np.empty((len(numbers), self.format.nbytes), np.uint8)
        what = self._what("reading")

        def work(parts: Sequence[Any]) -> None:
            if self._cluster:
                for part in parts:
                    self._cluster_pull(what, numbers[part], part, found, rows)
                return

            def message(part: slice) -> bytes:
                return b"".join(one_command(b"MGET", self._keys.matrix(numbers[part])))

            def read(replies: Replies, index: int) -> None:
                part = parts[index]
                try:
                    replies.values(self._shape, rows[part], found[part])
                except WrongValueError as error:
                    raise self._wrong_value(numbers[part][error.index], error) from None

            messages = [partial(message, part) for part in parts]
            self._client.stream(what, messages, read, len(self._blank) + 32)

        jobs, threads = self._jobs(numbers), self._url.num_threads
        if jobs:
            self._client.run_all(work, [jobs[at::threads] for at in range(min(threads, len(jobs)))])
        return torch.from_numpy(found), torch.from_numpy(rows)

    def _wrong_value(self, id_: Any, error: WrongValueError) -> StoreError:
        key = self._keys.of(np.array([id_]))[0]
        if error.kind == "size":
            return self._wrong_size(key, error.size, len(self._blank))
        if error.kind == "tag":
            return self._wrong_kind(key)
        return StoreError(None, f"{self!r}: a reply that is not a value", self._url.where)

    def _wrong_kind(self, key: bytes) -> CorruptStoreError:
        return CorruptStoreError(
            None,
            f"{self!r}: the value of key {key!r} is not a row of {self.format.describe()}: "
            "another kind of table or optimizer, or something else, wrote it. Use another "
            "prefix or table name",
            self._url.where,
        )

    def _cluster_pull(self, what: str, ids: Ids, part: Any, found: Any, rows: Bytes) -> None:
        replies = self._client.retry(what, lambda: self._cluster_get(ids))
        expected = len(self._blank)
        for at, value in enumerate(replies):
            if value is not None and len(value) != expected:
                raise self._wrong_size(self._keys.of(ids[at : at + 1])[0], len(value), expected)
            if value is not None and not value.startswith(self.format.tag):
                raise self._wrong_kind(self._keys.of(ids[at : at + 1])[0])
        there = [one is not None for one in replies]
        values = b"".join(self._blank if one is None else one for one in replies)
        found[part] = there
        rows[part] = np.frombuffer(values, np.uint8).reshape(len(ids), expected)[:, 4:]

    def _cluster_get(self, ids: Ids) -> list[bytes | None]:
        parts = self._places(ids)
        commands = [(b"MGET", *self._keys.of(ids[part])) for part in parts]
        out: list[bytes | None] = [None] * len(ids)
        for part, values in zip(parts, self._client.cluster_commands(commands), strict=True):
            for at, value in zip(part.tolist(), values, strict=True):
                out[at] = value
        return out

    def _places(self, ids: Ids) -> list[Any]:
        """Positions of the ids, those of one place in a cluster together."""
        shards = self._keys.shards(ids)
        order = np.argsort(shards, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(shards[order])) + 1)

    def _push(self, ids: Ids, rows: Bytes) -> None:
        what, ttl = self._what("writing"), self._ttl

        def work(part: Any) -> None:
            some, data = ids[part], rows[part]
            if self._cluster:
                self._client.retry(what, lambda: self._cluster_set(some, data, ttl))
                return
            columns = (self._keys.matrix(some), (self.format.tag, data))
            if ttl:
                message, replies = many_commands(b"SET", *columns, then=ttl), len(some)
            else:
                message, replies = one_command(b"MSET", *columns), 1
            self._client.retry(what, lambda: self._client.converse(message, replies))

        self._client.run_all(work, self._jobs(ids))

    def _cluster_set(self, ids: Ids, rows: Bytes, ttl: Sequence[bytes]) -> None:
        keys = self._keys.of(ids)
        values = [self.format.tag + row.tobytes() for row in rows]
        if ttl:
            commands = [(b"SET", k, v, *ttl) for k, v in zip(keys, values, strict=True)]
        else:
            commands = [
                (b"MSET", *(one for at in part for one in (keys[at], values[at])))
                for part in self._places(ids)
            ]
        self._client.cluster_commands(commands)


class UpstreamRedisRows(_RedisRows):
    """A value per row and part, under the keys that torchrec_dynamic_embedding uses."""

    def __init__(self, url: RedisUrl, table: str, row_format: RowFormat) -> None:
        super().__init__(url, table, row_format)
        self._sizes = [part.nbytes for part in row_format.parts]
        self._keys = UpstreamKeys(url.prefix, table, len(self._sizes))

    def pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._checked(ids).numpy()
        values = self._get(self._keys.of(numbers))
        found = np.ones(len(numbers), np.bool_)
        blank = bytes(self.format.nbytes)
        rows: list[bytes] = []
        for at in range(len(numbers)):
            parts = values[at * self._keys.parts : (at + 1) * self._keys.parts]
            found[at] = parts[0] is not None
            if found[at]:
                rows += self._checked_parts(numbers[at : at + 1], parts)
            else:
                rows.append(blank)
        out = np.frombuffer(b"".join(rows), np.uint8).reshape(len(numbers), self.format.nbytes)
        return torch.from_numpy(found), torch.from_numpy(out.copy())

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        what = self._what("reading")
        if self._cluster:  # keys of any two rows may be on different servers
            return self._per_key(b"GET", keys, what)
        replies = self._client.run_all(
            lambda some: self._run(what, [(b"MGET", *some)])[0],
            _split(keys, self._url.chunk_size),
        )
        return [value for some in replies for value in some]

    def _checked_parts(self, id_: Ids, parts: Sequence[bytes | None]) -> Iterator[bytes]:
        for part, (value, size) in enumerate(zip(parts, self._sizes, strict=True)):
            key = self._keys.of(id_)[part]
            if value is None:
                raise CorruptStoreError(
                    None,
                    f"{self!r}: key {key!r} is missing, and the row's weight is there",
                    self._url.where,
                )
            if len(value) != size:
                raise self._wrong_size(key, len(value), size)
            yield value

    def _push(self, ids: Ids, rows: Bytes) -> None:
        what, ttl = self._what("writing"), self._ttl
        ends = np.cumsum(self._sizes)[:-1]
        values = [piece.tobytes() for row in rows for piece in np.split(row, ends)]
        commands = [
            (b"SET", key, value, *ttl)
            for key, value in zip(self._keys.of(ids), values, strict=True)
        ]
        self._client.run_all(
            lambda some: self._run(what, some), _split(commands, self._url.chunk_size)
        )


T = TypeVar("T")


def _split(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
