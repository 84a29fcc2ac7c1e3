"""The part of YAML that configurations need, read strictly.

Mappings, lists (of either form) and scalars, nested by indentation, with comments. Everything else
of YAML (anchors, tags, several documents, block strings) is refused with its line. What is written
here is read the same by any YAML reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dynamicemb.errors import InvalidArgumentError

_KEY = re.compile(r"([A-Za-z0-9_.\-]+|\"[^\"]*\"|'[^']*')\s*:(?:\s+(.*))?$")
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*$")
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?$")
_WORDS = {"true": True, "false": False, "null": None, "~": None}


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in ``text``. Raises ``InvalidArgumentError`` with ``where`` and the line."""
    lines = [
        (number, len(line) - len(line.lstrip(" ")), line.strip())
        for number, raw in enumerate(text.splitlines(), 1)
        if (line := _without_comment(raw)).strip() and line.strip() != "---"
    ]
    reader = _Reader(lines, where)
    value = reader.block(0) if lines else {}
    if reader.place < len(lines):
        raise reader.error("a line with the indentation of those above")
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where} is a list; allowed: `name: value` lines")
    return value


def write_yaml(values: Mapping[str, Any]) -> str:
    """Lines of ``name: value``, where a value is a scalar or a list of scalars."""
    return "".join(f"{name}: {_written(value)}\n" for name, value in values.items())


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_written(one) for one in value) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./\-]*", value) and value.lower() not in _WORDS
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _without_comment(line: str) -> str:
    quote = ""
    for place, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (place == 0 or line[place - 1] in " \t"):
            return line[:place].rstrip()
    return line.rstrip()


class _Reader:
    """Lines as (number, indentation, text), and the one that is next."""

    def __init__(self, lines: list[tuple[int, int, str]], where: str) -> None:
        self._lines, self._where = lines, where
        self.place = 0

    def error(self, allowed: str) -> InvalidArgumentError:
        number, _, text = self._lines[min(self.place, len(self._lines) - 1)]
        return InvalidArgumentError(f"{self._where}, line {number}: {text!r}; allowed: {allowed}")

    def block(self, least: int) -> Any:
        """The value whose lines begin here, indented by ``least`` or more."""
        if self.place == len(self._lines) or self._lines[self.place][1] < least:
            return None
        _, indent, text = self._lines[self.place]
        return self._list(indent) if text == "-" or text.startswith("- ") else self._map(indent)

    def _map(self, indent: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while self.place < len(self._lines) and self._lines[self.place][1] == indent:
            match = _KEY.match(self._lines[self.place][2])
            if match is None:
                raise self.error("`name: value`")
            key = match[1].strip("\"'")
            if key in result:
                raise self.error(f"{key!r} once")
            result[key] = self._after(match[2], indent)
        return result

    def _list(self, indent: int) -> list[Any]:
        result = []
        while self.place < len(self._lines) and self._lines[self.place][1] == indent:
            text = self._lines[self.place][2]
            if text != "-" and not text.startswith("- "):
                raise self.error("`- value`, as above")
            result.append(self._after(text[1:].strip(), indent))
        return result

    def _after(self, text: str | None, indent: int) -> Any:
        """The value after a key or a dash: on its line, or the indented block below."""
        if text:
            value = self._scalar(text.strip())
            self.place += 1
            return value
        self.place += 1
        return self.block(indent + 1)

    def _scalar(self, text: str) -> Any:
        if text[0] == "[":
            if text[-1] != "]":
                raise self.error("a list that ends on its line")
            inner = text[1:-1].strip()
            return [self._scalar(one.strip()) for one in inner.split(",")] if inner else []
        if text[0] == '"':
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                raise self.error('text in "" as in JSON') from None
        if text[0] == "'":
            if len(text) < 2 or text[-1] != "'":
                raise self.error("text that ends with the quote it began with")
            return text[1:-1].replace("''", "'")
        if text[0] in "{&*!|>%@`":
            raise self.error("a scalar or a list; quote text that begins with a sign")
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INTEGER.match(text):
            return int(text)
        if any(sign.isdigit() for sign in text) and _NUMBER.match(text):
            return float(text)
        return text
