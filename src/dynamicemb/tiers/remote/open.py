"""From a URL to the rows behind it."""

from __future__ import annotations

from dynamicemb.tiers.remote.memory import MemoryRows
from dynamicemb.tiers.remote.plugin import PluginRows, registered_plugins, url_to_open
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat
from dynamicemb.tiers.remote.url import MemoryUrl, PluginUrl, Url, parse_url


def check_url(url: object) -> Url:
    """``url``, parsed, if :func:`open_rows` takes it."""
    return parse_url(url, registered_plugins())


def open_rows(url: object, table: str, row_format: RowFormat) -> RemoteRows:
    """The rows of ``table`` at ``url``. Asks a server nothing yet."""
    parsed = url_to_open(url)
    if isinstance(parsed, MemoryUrl):
        return MemoryRows(parsed, table, row_format)
    if isinstance(parsed, PluginUrl):
        return PluginRows(parsed, table, row_format)
    from dynamicemb.tiers.remote.redis_rows import redis_rows  # needs redis-py

    return redis_rows(parsed, table, row_format)
