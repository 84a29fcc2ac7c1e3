"""URLs say what they say, or are refused; credentials are shown nowhere."""

from __future__ import annotations

import pytest

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.errors import DynamicEmbError, InvalidArgumentError
from dynamicemb.tiers import RemoteStore
from dynamicemb.tiers.remote.url import MemoryUrl, RedisUrl, parse_url, redacted


def test_what_the_readme_writes() -> None:
    url = parse_url("redis://127.0.0.1:6379/?prefix=model")
    assert url == RedisUrl("redis", (("127.0.0.1", 6379),), prefix="model")


def test_upstream_options() -> None:
    url = parse_url(
        "redis://bob:s%40fe@redis.svc.cluster.local?db=3&&num_threads=2&&prefix=a_b"
        "&&timeout=1.5s&&heartbeat=2m&&retry_limit=5&&chunk_size=100"
    )
    assert isinstance(url, RedisUrl)
    assert (url.username, url.password, url.hosts) == (
        "bob",
        "s@fe",
        (("redis.svc.cluster.local", 6379),),
    )
    assert (url.db, url.num_threads, url.prefix) == (3, 2, "a_b")
    assert (url.timeout_ms, url.heartbeat_ms) == (1500, 120000)
    assert (url.retry_limit, url.chunk_size) == (5, 100)


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("redis://my-host", {"hosts": (("my-host", 6379),)}),
        ("redis://h/", {"hosts": (("h", 6379),)}),
        ("redis://h/4", {"db": 4}),
        ("redis://:pw@[::1]:7", {"password": "pw", "username": "", "hosts": (("::1", 7),)}),
        ("redis://h?db=1&num_threads=3", {"db": 1, "num_threads": 3}),
        ("redis://h?prefix=a-b", {"prefix": "a-b"}),
        ("redis://h?prefix=a%26b", {"prefix": "a&b"}),
        ("redis://h?ttl=7d&layout=upstream", {"ttl_ms": 604800000, "layout": "upstream"}),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "db": 2}),
        ("unix://u:p@/run/redis.sock", {"path": "/run/redis.sock", "password": "p"}),
        ("redis+cluster://a:1,b:2", {"hosts": (("a", 1), ("b", 2)), "kind": "cluster"}),
        ("redis+sentinel://a,b:2/m", {"hosts": (("a", 26379), ("b", 2)), "service": "m"}),
        ("rediss://h?ssl_cert_reqs=none", {"ssl": (("ssl_cert_reqs", "none"),), "tls": True}),
    ],
)
def test_parts_of_a_url(url: str, fields: dict[str, object]) -> None:
    parsed = parse_url(url)
    assert {name: getattr(parsed, name) for name in fields} == fields


def test_memory() -> None:
    assert parse_url("memory://") == MemoryUrl("")
    assert parse_url("memory://a.b-c_1") == MemoryUrl("a.b-c_1")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:6379", "allowed: scheme://"),
        ("http://h/", "allowed: memory, redis"),
        ("://h", "allowed: scheme://"),
        ("memory://a?ttl=1s", "without options"),
        ("memory://a/b", "without options"),
        ("redis://", "host"),
        ("redis://h:0", "1 to 65535"),
        ("redis://h:99999", "1 to 65535"),
        ("redis://h i", "host"),
        ("redis://a,b", "one, or redis\\+cluster"),
        ("redis://h/x", "db is 'x'"),
        ("redis://h/1?db=2", "db is given twice"),
        ("redis://h?db=01", "db is '01'"),
        ("redis://h?db=-1", "db is '-1'"),
        ("redis://h?num_threads=0", "num_threads is '0'"),
        ("redis://h?timeout=500", "500ms"),
        ("redis://h?timeout=0s", "positive"),
        ("redis://h?ttl=", "positive"),
        ("redis://h?layout=mine", "packed, upstream"),
        ("redis://h?what=1", "the option 'what' is not known"),
        ("redis://h?db", "the option 'db' is not known"),
        ("redis://h?db=1&&&db=2", "is not known"),
        ("redis://h?db=1&&db=2", "db is given twice"),
        ("redis://h?prefix=a%2", "%25"),
        ("redis://h?prefix=%ff", "UTF-8"),
        ("redis://bob@h", "user:password@"),
        ("redis://h?ssl_cert_reqs=none", "is not known"),
        ("redis+cluster://h/1", "one database"),
        ("redis+cluster://h?db=1", "is not known"),
        ("redis+sentinel://h", "redis\\+sentinel://host:port/name"),
        ("unix://", "unix:///path"),
        ("unix://host/path", "unix:///path"),
        ("rediss://h?ssl_certfile=a&ssl_certfile=b", "given twice"),
    ],
)
def test_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_url(url)


def test_a_url_is_text() -> None:
    with pytest.raises(TypeError, match="a string"):
        parse_url(7)


@pytest.mark.parametrize(
    "url",
    [
        "redis://bob:hunter2@h?what=1",
        "redis://:hunter2@h:x",
        "redis://:hunt/hunter2@h:x",
        "redis://a@hunter2@h:x",
        "redis:/bob:hunter2@h",
        "bob:hunter2@h",
        "other://bob:hunter2@h",
        "other://password=hunter2",
        "memory://:hunter2@h",
        "unix://:hunter2@nowhere",
        "redis+sentinel://:hunter2@h",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(DynamicEmbError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_no_repr_shows_a_password() -> None:
    url = "redis://bob:hunter2@h?prefix=p"
    store = RemoteStore.at(url, table="t")
    options = DynamicEmbTableOptions(dim=4, max_capacity=64, external_storage=store)
    for shown in (repr(parse_url(url)), repr(store), repr(options), str(options), redacted(url)):
        assert "hunter2" not in shown
        assert "bob" not in shown
    assert "prefix='p'" in repr(store)


def test_a_table_store_needs_the_packed_layout() -> None:
    with pytest.raises(InvalidArgumentError, match="packed"):
        RemoteStore.at("redis://h?layout=upstream", table="t")
