"""From a URL to the rows behind it."""

from __future__ import annotations

from dynamicemb.tiers.remote.memory import MemoryRows
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat
from dynamicemb.tiers.remote.url import MemoryUrl, RedisUrl, Url, parse_url


def check_url(url: object) -> Url:
    """What ``url`` says, if it is one that :func:`open_rows` takes."""
    return parse_url(url)


def open_rows(url: object, table: str, row_format: RowFormat) -> RemoteRows:
    """The rows of ``table`` at ``url``. Asks the server nothing yet."""
    parsed = check_url(url)
    if isinstance(parsed, MemoryUrl):
        return MemoryRows(parsed, table, row_format)
    if isinstance(parsed, RedisUrl):
        from dynamicemb.tiers.remote.redis_rows import redis_rows  # needs redis-py

        return redis_rows(parsed, table, row_format)
    raise AssertionError(parsed)
