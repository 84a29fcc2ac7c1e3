"""Rows in Redis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from dynamicemb.errors import InvalidArgumentError, StoreError
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
from dynamicemb.tiers.remote.redis_listing import scan
from dynamicemb.tiers.remote.redis_reader import (
    ELEMENT_BYTES,
    Reader,
    ValueShape,
    WrongValueError,
)
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat, first_of_each
from dynamicemb.tiers.remote.url import RedisUrl

#: Ids of a listing between searches for repeated ones. At least a quarter must be new.
MERGED_IDS = 1_000_000


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

    def _run(
        self, what: str, commands: Sequence[tuple[bytes, ...]], reply_bytes: int = 0
    ) -> list[Any]:
        """The replies to commands, sent together."""
        if self._cluster:
            return self._client.cluster_commands(what, commands, reply_bytes)
        message = [b"".join(command(*arguments) for arguments in commands)]
        return self._client.converse(what, message, len(commands), reply_bytes)

    def _counts(self, name: bytes, keys: Sequence[bytes], what: str) -> list[int]:
        """The replies to one command per key, of which each is 0 or 1."""
        replies = self._client.run_all(
            lambda chunk: self._run(what, [(name, key) for key in chunk]),
            _split(keys, self._url.chunk_size),
        )
        counts = [count for counts_of_chunk in replies for count in counts_of_chunk]
        if not set(map(type, counts)) <= {int} or not set(counts) <= {0, 1}:
            raise self._client.wrong_reply(what, name, counts)
        return counts

    def _stored(self, what: str, name: bytes, replies: Sequence[Any]) -> None:
        """Raise unless all are what Redis answers to SET and MSET; redis-py makes it True."""
        for reply in replies:
            if reply is not True and reply != b"OK":
                raise self._client.wrong_reply(what, name, reply)

    def _values(self, what: str, name: bytes, replies: Any, count: int) -> list[bytes | None]:
        """``replies``, if they are values of ``count`` keys."""
        if not isinstance(replies, list) or len(replies) != count:
            raise self._client.wrong_reply(what, name, replies)
        for value in replies:
            if value is not None and not isinstance(value, bytes):
                raise self._client.wrong_reply(what, name, value)
        return replies

    @property
    def _ttl(self) -> tuple[bytes, ...]:
        return (b"PX", b"%d" % self._url.ttl_ms) if self._url.ttl_ms else ()

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        keys = self._keys.of(self._checked(ids).numpy())[:: self._keys.parts]
        counts = self._counts(b"EXISTS", keys, self._what("looking for"))
        return torch.tensor(counts, dtype=torch.bool, device="cpu")

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        erased = self.contains(ids) & first_of_each(ids)  # asked before: erasing may be retried
        keys = self._keys.of(ids[erased].numpy())
        self._counts(b"UNLINK", keys, self._what("erasing"))
        return erased

    def ids(self) -> torch.Tensor:
        what, parts, waiting = self._what("listing"), [], 0
        distinct = torch.empty(0, dtype=torch.int64, device="cpu")
        for page in scan(self._client, what, self._keys.pattern, self._keys.parse):
            parts.append(torch.from_numpy(page))
            waiting += len(page)
            if waiting > len(distinct) + MERGED_IDS:
                before, distinct = len(distinct), torch.unique(torch.cat([distinct, *parts]))
                if len(distinct) - before < waiting // 4:
                    raise self._client.wrong_reply(what, b"SCAN", "the same keys again and again")
                parts, waiting = [], 0
        merged: torch.Tensor = torch.unique(torch.cat([distinct, *parts]))
        return merged

    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._checked(ids, rows)
        if len(torch.unique(ids)) != len(ids):  # of equal ids the last: chunks have no order
            last = first_of_each(ids.flip(0)).flip(0)
            ids, rows = ids[last], rows[last]
        if len(ids):
            self._push(ids.contiguous().numpy(), rows.contiguous().numpy())

    @abstractmethod
    def _push(self, ids: Ids, rows: Bytes) -> None:
        """:meth:`push` of distinct ids, at least one."""

    def _other_value(self, key: bytes, size: int, allowed: int) -> InvalidArgumentError:
        """The error for a value that is not a row of this table."""
        why = f"has {size} bytes, not {allowed}" if size != allowed else "has another tag"
        return self._other_rows(f"another kind: the value of key {key!r} {why}")


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

            def read(reader: Reader, index: int) -> None:
                part = parts[index]
                try:
                    reader.values(self._shape, rows[part], found[part])
                except WrongValueError as error:
                    raise self._wrong_value(numbers[part][error.index], error) from None

            messages = [partial(message, part) for part in parts]
            self._client.stream(what, messages, read)

        jobs, threads = self._jobs(numbers), self._url.num_threads
        if jobs:
            self._client.run_all(work, [jobs[at::threads] for at in range(min(threads, len(jobs)))])
        return torch.from_numpy(found), torch.from_numpy(rows)

    def _wrong_value(self, id_: Any, error: WrongValueError) -> InvalidArgumentError | StoreError:
        if error.kind == "unknown":
            return StoreError(None, f"{self!r}: a reply that is not a value", self._url.where)
        key, allowed = self._keys.of(np.array([id_]))[0], len(self._blank)
        return self._other_value(key, error.size if error.kind == "size" else allowed, allowed)

    def _cluster_pull(self, what: str, ids: Ids, part: Any, found: Any, rows: Bytes) -> None:
        replies = self._cluster_get(what, ids)
        expected = len(self._blank)
        for at, value in enumerate(replies):
            if value is None or (len(value) == expected and value.startswith(self.format.tag)):
                continue
            raise self._other_value(self._keys.of(ids[at : at + 1])[0], len(value), expected)
        values = b"".join(self._blank if value is None else value for value in replies)
        found[part] = [value is not None for value in replies]
        rows[part] = np.frombuffer(values, np.uint8).reshape(len(ids), expected)[:, 4:]

    def _cluster_get(self, what: str, ids: Ids) -> list[bytes | None]:
        parts = self._places(ids)
        commands = [(b"MGET", *self._keys.of(ids[part])) for part in parts]
        allowed = len(ids) * _reply_bytes(len(self._blank))
        replies = self._client.cluster_commands(what, commands, allowed)
        out: list[bytes | None] = [None] * len(ids)
        for part, values in zip(parts, replies, strict=True):
            checked = self._values(what, b"MGET", values, len(part))
            for at, value in zip(part.tolist(), checked, strict=True):
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
            ids_of_part, rows_of_part = ids[part], rows[part]
            if self._cluster:
                self._cluster_set(what, ids_of_part, rows_of_part, ttl)
                return
            columns = (self._keys.matrix(ids_of_part), (self.format.tag, rows_of_part))
            if ttl:
                message, count = many_commands(b"SET", *columns, then=ttl), len(ids_of_part)
            else:
                message, count = one_command(b"MSET", *columns), 1
            replies = self._client.converse(what, message, count)
            self._stored(what, b"SET" if ttl else b"MSET", replies)

        self._client.run_all(work, self._jobs(ids))

    def _cluster_set(self, what: str, ids: Ids, rows: Bytes, ttl: Sequence[bytes]) -> None:
        keys = self._keys.of(ids)
        values = [self.format.tag + row.tobytes() for row in rows]
        if ttl:
            commands = [(b"SET", k, v, *ttl) for k, v in zip(keys, values, strict=True)]
        else:
            commands = [
                (b"MSET", *(argument for at in part for argument in (keys[at], values[at])))
                for part in self._places(ids)
            ]
        replies = self._client.cluster_commands(what, commands)
        self._stored(what, commands[0][0], replies)


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
        what, largest = self._what("reading"), _reply_bytes(max(self._sizes))

        def work(chunk: Sequence[bytes]) -> list[bytes | None]:
            allowed = len(chunk) * largest
            if self._cluster:  # keys of any two rows may be on different servers
                replies = self._run(what, [(b"GET", key) for key in chunk], allowed)
                return self._values(what, b"GET", replies, len(chunk))
            (values,) = self._run(what, [(b"MGET", *chunk)], allowed)
            return self._values(what, b"MGET", values, len(chunk))

        chunks = self._client.run_all(work, _split(keys, self._url.chunk_size))
        return [value for values in chunks for value in values]

    def _checked_parts(self, id_: Ids, parts: Sequence[bytes | None]) -> Iterator[bytes]:
        for part, (value, size) in enumerate(zip(parts, self._sizes, strict=True)):
            key = self._keys.of(id_)[part]
            if value is None:
                raise self._other_rows(f"another kind: key {key!r} is missing beside the weight")
            if len(value) != size:
                raise self._other_value(key, len(value), size)
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
            lambda chunk: self._stored(what, b"SET", self._run(what, chunk)),
            _split(commands, self._url.chunk_size),
        )


def _reply_bytes(size: int) -> int:
    """Memory that a value takes while it is read, one of another optimizer perhaps."""
    return 2 * ELEMENT_BYTES + 4 * size


T = TypeVar("T")


def _split(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
