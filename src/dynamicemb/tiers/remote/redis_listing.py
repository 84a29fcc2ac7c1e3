"""Listing the keys of a table in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote.redis_client import RedisClient
from dynamicemb.tiers.remote.redis_exchange import SLACK_BYTES
from dynamicemb.tiers.remote.redis_keys import Ids, command
from dynamicemb.tiers.remote.redis_reader import ELEMENT_BYTES

#: Keys of one page of a listing, and the most that the database of one server may have.
PAGE_KEYS, MOST_KEYS = 10_000, 2**32


def scan(
    client: RedisClient, what: str, pattern: bytes, parse: Callable[[Sequence[bytes]], Ids]
) -> Iterator[Ids]:
    """The ids that ``parse`` finds in the keys that match, page by page; some may come twice.

    Raises StoreError if a server lists no such key for the time of one exchange with all its
    attempts, or twice as many keys as its database has and 100,000.
    """
    for pool in client.retry(what, client.pools, 0):
        yield from _scan(client, what, pattern, parse, pool)


def _scan(
    client: RedisClient,
    what: str,
    pattern: bytes,
    parse: Callable[[Sequence[bytes]], Ids],
    pool: Any,
) -> Iterator[Ids]:
    (database_keys,) = client.converse(what, [command(b"DBSIZE")], 1, pool=pool)
    if type(database_keys) is not int or not 0 <= database_keys <= MOST_KEYS:
        raise client.wrong_reply(what, b"DBSIZE", database_keys)
    # Long keys come in smaller pages.
    count = max(10, min(PAGE_KEYS, SLACK_BYTES // 4 // (len(pattern) + 2 * ELEMENT_BYTES)))
    cursor, keys_left = b"0", 2 * database_keys + 100_000
    progress = time.monotonic()
    while True:
        until = progress + client.patience
        arguments = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % count)
        try:
            (page,) = client.converse(what, [command(*arguments)], 1, pool=pool, until=until)
        except StoreError:
            if time.monotonic() < until:
                raise
            reason = f"it listed no key of the table in {client.patience:g} s"
            reason += f", of the {database_keys} keys that it has"
            raise client.error(what, redis.TimeoutError(reason)) from None
        if not _is_page(page) or page[0] == cursor != b"0":
            raise client.wrong_reply(what, b"SCAN", page)
        cursor, keys = page
        keys_left -= len(keys)
        if keys_left < 0:
            reason = f"more keys than DBSIZE, {database_keys}"
            raise client.wrong_reply(what, b"SCAN", reason)
        ids = parse(keys)
        if len(ids):
            yield ids
            progress = time.monotonic()  # the caller's own time is not the server's
        if cursor == b"0":
            return


def _is_page(reply: object) -> bool:
    """Whether it is what SCAN answers: a cursor, and keys."""
    if not isinstance(reply, list) or [type(element) for element in reply] != [bytes, list]:
        return False
    cursor, keys = reply
    return cursor.isdigit() and len(cursor) <= 20 and all(type(key) is bytes for key in keys)
