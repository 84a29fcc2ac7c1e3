"""What a server, or somebody between, answers to a password comes into no error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest

pytest.importorskip("redis")

from hostile_redis import Behaviour, HostileRedis
from row_makers import FORMAT, IDS

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote.open import open_rows
from redis_servers import RedisServer

LONG = "0123456789abcdefghijklmnopqrstuvwxyz" * 5
STRANGE = "p\u00e4\u00dfw\u00f6rt '\"\\x geheim"


def failure(url: str) -> str:
    """The whole traceback, with the errors behind the error."""
    rows = open_rows(url, "t", FORMAT)
    with pytest.raises(StoreError) as caught:
        rows.pull(IDS)
    lines = traceback.format_exception(caught.value)
    behind: BaseException | None = caught.value
    while behind is not None:
        lines += [repr(behind)]
        behind = behind.__cause__ or behind.__context__
    return "".join(lines)


def parts(password: str, size: int = 8) -> set[str]:
    return {password[at : at + size] for at in range(len(password) - size + 1)}


def test_redis_that_does_not_know_auth_and_repeats_its_arguments(
    start: Callable[..., RedisServer],
) -> None:
    server = start("--rename-command", "AUTH", "LOGIN")
    text = failure(server.url("?retry_limit=0", user=f"bob:{LONG}@"))
    assert not [part for part in parts(LONG) if part in text]
    assert "ResponseError: ERR" in text


def unknown(password: bytes) -> bytes:
    return b"-ERR unknown command 'AUTH', with args beginning with: '%s'\r\n" % password[:128]


def escaped(password: bytes) -> bytes:
    return b"-ERR '" + password.replace(b"\\", rb"\\").replace(b'"', rb"\"") + b"'\r\n"


ECHOES: dict[str, Callable[[bytes], bytes]] = {
    "the first 128 characters": unknown,
    "escaped": escaped,
    "a part": lambda password: b"-ERR bad " + password[4:30] + b"\r\n",
    "an error's first word": lambda password: b"-" + password + b"\r\n",
    "LOADING": lambda password: b"-LOADING " + password + b"\r\n",
    "WRONGPASS": lambda password: b"-WRONGPASS " + password + b"\r\n",
    "MOVED": lambda password: b"-MOVED 1 " + password + b":1\r\n",
    "no reply": lambda password: password + b"\r\n",
    "a number": lambda password: b":" + password + b"\r\n",
    "the end alone": lambda password: password[4:] + b"\r\n",
    "a status": lambda password: b"+" + password + b"\r\n",
    "a value": lambda password: b"$%d\r\n%s\r\n" % (len(password), password),
    "an array": lambda password: b"*1\r\n$%d\r\n%s\r\n" % (len(password), password),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
@pytest.mark.parametrize("password", [LONG, STRANGE, "hunter2hunter2"])
def test_a_reply_that_repeats_the_password_is_not_shown(
    password: str, kind: str, later: bool
) -> None:
    """later: not in the reply to AUTH but in the next one of connecting."""
    for name, echo in ECHOES.items():
        hostile = HostileRedis(repeating(echo, later), honest_start=False)
        credentials = f"bob:{quote(password, safe='')}"
        url = f"{kind}://{credentials}@127.0.0.1:{hostile.port}/?timeout=2s&&retry_limit=0"
        text = failure(url)
        hostile.close()
        if not later:
            forms = (password, repr(password)[1:-1], str(password.encode()))
            assert not set().union(*map(parts, forms)) & parts(text), name
        assert password not in text, name


def repeating(echo: Callable[[bytes], bytes], later: bool) -> Behaviour:
    """Repeats the password in the reply to AUTH, or in all that follow."""
    password = b""

    def answer(command: list[bytes]) -> Iterator[bytes]:
        nonlocal password
        if command[0] == b"AUTH":
            password = command[-1]
        yield echo(password) if later == (command[0] != b"AUTH") else b"+OK\r\n"

    return answer


def test_what_is_wrong_is_still_named(start: Callable[..., RedisServer]) -> None:
    server = start()
    for user in (":hunter2@", "bob:hunter2@"):
        text = failure(server.url("?retry_limit=50", user=user))
        assert "hunter2" not in text
        assert "AuthenticationError" in text
    server.stop()
    assert "refused" in failure(server.url("?retry_limit=0", user=":hunter2@"))
