"""Options of a command as a dataclass: on the command line, in a file, checked the same way.

A field with :func:`option` becomes ``--name``; the same name (with ``-`` or ``_``) is a key of a
configuration file. The command line comes before the file, the file before the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar

from dynamicemb.errors import (
    InvalidArgumentError,
    check_integer,
    check_number,
    check_path,
    wrong_value,
)

OptionsT = TypeVar("OptionsT")

MAX_PORT = 65_535
#: torch takes any number of threads, and crashes when the system has not as many.
MAX_THREADS = 1024


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: int | None = None,
    above: float | None = None,
    check: Callable[[str, Any], Any] | None = None,
    many: bool = False,
    repeated: bool = False,
) -> Any:
    """A field that is an option. ``maximum`` is for integers. ``check(name, value)`` raises if a
    value is not allowed. ``many``: values may follow each other; ``repeated``: the option may come
    again for each."""
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "check": check,
        "many": many or repeated,
        "repeated": repeated,
        "default": default,
    }
    if many or repeated:
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing."""
    by_text = {one.lstrip("-"): one for one in known}  # dashes are no likeness
    close = difflib.get_close_matches(name.lstrip("-"), by_text, n=1)
    return f"; did you mean {by_text[close[0]]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """argparse's, whose mistakes are ``InvalidArgumentError`` with a suggestion."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"dynamicemb {command}", description=description, allow_abbrev=False)

    def read(
        self, kind: type[OptionsT], arguments: Sequence[str]
    ) -> tuple[OptionsT, dict[str, Any]]:
        """(the options of a command line as a ``kind``, all that was given, as text)."""
        add_options(self, kind)
        given = vars(self.parse(arguments))
        return build_options(kind, given, None), given

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(message)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        found, unknown = self.parse_known_args(list(arguments))
        if unknown:
            first = unknown[0].partition("=")[0]
            flags = [flag for action in self._actions for flag in action.option_strings]
            hint = suggestion(first, flags) if first.startswith("-") else ""
            kind = "option" if first.startswith("-") else "argument"
            raise InvalidArgumentError(f"unknown {kind} {first}{hint} (--help lists all)")
        return found


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """An option for every field of the dataclass ``kind``; absent ones are not in the result."""
    for field, base in _fields(kind):
        data = field.metadata
        default: Any = field.default
        if data["many"]:
            default = " ".join(map(str, data["default"]))
        shown = "" if default in (None, "") else f" (default: {default})"
        settings: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "dest": field.name,
            "help": (data["help"] + shown).replace("%", "%%"),
        }
        if base is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            letter = {int: "N", float: "X", str: "TEXT"}[base]
            settings["metavar"] = "|".join(data["choices"]) if data["choices"] else letter
            if data["repeated"]:
                settings["action"] = "append"
            elif data["many"]:
                settings["nargs"] = "+"
        parser.add_argument(flag_of(field.name), **settings)


def build_options(kind: type[OptionsT], given: Mapping[str, Any], file: str | None) -> OptionsT:
    """The dataclass from what was ``given`` on the command line (text) and in a file."""
    fields = {field.name: (field, base) for field, base in _fields(kind)}
    values: dict[str, Any] = {}
    for name, value in (_read(file, fields) if file is not None else {}).items():
        values[name] = _checked(f"{name} in {file}", value, *fields[name])
    for name, value in given.items():
        if name in fields:
            values[name] = _checked(flag_of(name), value, *fields[name])
    return kind(**values)


def _read(file: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    from dynamicemb.cli.yaml import read_yaml  # commands without files do without PyYAML

    try:
        text = Path(check_path("--config", file, "a file")).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgumentError(f"--config {file} cannot be read: {reason}") from error
    result = {}
    for key, value in read_yaml(text, file).items():
        name = key.replace("-", "_")
        if name not in fields:
            raise InvalidArgumentError(
                f"unknown option {key!r} in {file}{suggestion(name, fields)}"
            )
        result[name] = value
    return result


def _fields(kind: type[Any]) -> list[tuple[dataclasses.Field[Any], type]]:
    """The fields with the type of their values, or of one of them where there are many."""
    hints = typing.get_type_hints(kind)
    result = []
    for field in dataclasses.fields(kind):
        base = hints[field.name]
        if typing.get_origin(base) in (UnionType, typing.Union):
            base = next(one for one in typing.get_args(base) if one is not type(None))
        if typing.get_origin(base) is list:
            base = typing.get_args(base)[0]
        result.append((field, base))
    return result


def _checked(name: str, value: Any, field: dataclasses.Field[Any], base: type) -> Any:
    if value is None and field.default is None:
        return None
    if field.metadata["many"]:
        some = value if isinstance(value, list) else [value]
        return [_one(name, one, field, base) for one in some]
    return _one(name, value, field, base)


def _one(name: str, value: Any, field: dataclasses.Field[Any], base: type) -> Any:
    data = field.metadata
    if base is bool:
        if not isinstance(value, bool):
            raise wrong_value(name, value, "true or false")
        return value
    if base is str:
        value = str(value)
        if data["choices"] and value not in data["choices"]:
            hint = suggestion(value, data["choices"])
            raise InvalidArgumentError(
                f"{name} is {value!r}; allowed: {', '.join(data['choices'])}{hint}"
            )
    elif base is int:
        minimum = None if data["minimum"] is None else int(data["minimum"])
        number = _number(name, value, int, "an integer")
        value = check_integer(name, number, minimum=minimum, maximum=data["maximum"])
    else:
        number = _number(name, value, float, "a number")
        value = check_number(name, number, minimum=data["minimum"], above=data["above"])
    return value if data["check"] is None else data["check"](name, value)


def _number(name: str, value: Any, base: type, allowed: str) -> Any:
    """Text as a number; 1e6 is an integer too."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        raise wrong_value(name, value, allowed) from None
    if base is float:
        return number
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    try:
        return int(value)
    except ValueError:
        raise wrong_value(name, value, allowed) from None
