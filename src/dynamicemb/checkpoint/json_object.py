"""JSON that somebody else wrote: what is taken from it has its type and range checked."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from dynamicemb.errors import CorruptCheckpointError

#: Bytes of JSON in files that hold little; it takes up to thirty times as many to read it.
SMALL = 2**20


class JsonObject:
    """An object of JSON, called ``where`` in errors. A member that is not there, or is not what a
    method asks for, is a ``CorruptCheckpointError``."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{where} is {shortened(value)}; allowed: an object")
        self._members = value
        self._where = where

    def value(self, name: str) -> Any:
        if name not in self._members:
            raise CorruptCheckpointError(f"{self._where} has no {name!r}")
        return self._members[name]

    def optional(self, name: str) -> bool:
        """Whether the member is there for its value: it is not ``null``."""
        return self.value(name) is not None

    def integer(self, name: str, minimum: int, maximum: int) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(name, value, "an integer")
        if not minimum <= value <= maximum:
            raise self._refused(name, value, f"{minimum} to {maximum}")
        return value

    def text(self, name: str, pattern: str = r"[\s\S]*") -> str:
        value = self.value(name)
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise self._refused(name, value, f"a string that matches {pattern}")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.value(name)
        if value not in choices:
            raise self._refused(name, value, ", ".join(choices))
        assert isinstance(value, str)
        return value

    def member(self, name: str) -> JsonObject:
        return JsonObject(self.value(name), f"{self._where}.{name}")

    def items(self, name: str) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise self._refused(name, value, "a list")
        return value

    def objects(self, name: str) -> list[JsonObject]:
        return [
            JsonObject(one, f"{self._where}.{name}[{i}]") for i, one in enumerate(self.items(name))
        ]

    def plain(self) -> dict[str, Any]:
        """The members as they are, unchecked."""
        return self._members

    def _refused(self, name: str, value: object, allowed: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._where}.{name} is {shortened(value)}; allowed: {allowed}"
        )


def parsed(data: bytes | bytearray | str, limit: int = SMALL) -> Any:
    """What JSON of at most ``limit`` bytes says. Raises ``ValueError`` if it is none."""
    if len(data) > limit:
        raise ValueError(f"it has {len(data)} bytes; allowed: at most {limit}")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


class _Short(reprlib.Repr):
    """Looks at the beginning of a value alone, however long or deep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxdict = self.maxtuple = 20
        self.maxstring = self.maxother = self.maxlong = 100


def shortened(value: object) -> str:
    """``value`` for an error: at most a hundred characters."""
    text = _Short().repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
