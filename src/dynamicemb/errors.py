"""The exceptions of the library, and the checks that raise them.

A user's mistake is always a :class:`DynamicEmbError` that is also the built-in exception a caller
would expect. An internal bug is an ``AssertionError``; the two never mix.

The ``check_*`` functions word every refusal the same way: the argument, the value, what is allowed.
They return the value, so a caller can write ``self.dim = check_integer("dim", dim, minimum=1)``.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "CorruptCheckpointError",
    "CorruptStoreError",
    "DynamicEmbError",
    "InsertionError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "ReplacedCheckpointError",
    "StoreError",
    "UsageError",
]

#: What stands before ``://`` in a URL; :func:`check_path` takes ``scheme:/`` for one too, but for
#: a single letter, which is a drive.
SCHEME = r"[A-Za-z][A-Za-z0-9+._\-]*"
_URL = re.compile(rf"({SCHEME})://|({SCHEME})(?<=..):/", re.DOTALL)

EnumT = TypeVar("EnumT", bound=enum.Enum)


class DynamicEmbError(Exception):
    """Base of everything this library raises on purpose."""


class InvalidArgumentError(DynamicEmbError, ValueError):
    """An argument has the right type and a value that is not allowed."""


class ArgumentTypeError(DynamicEmbError, TypeError):
    """An argument has the wrong type (or a tensor the wrong dtype)."""


class InsertionError(DynamicEmbError, RuntimeError):
    """Ids could not be inserted: in a table whose ``safe_check_mode`` is ``ERROR`` (the others
    were), or because an embedding's capacity would be exceeded (nothing changed).

    ``evicted``: the rows the batch evicted, if the caller had asked for them.
    """

    def __init__(self, message: str, evicted: Any = None) -> None:
        super().__init__(message)
        self.evicted = evicted


class OutOfMemoryError(DynamicEmbError, MemoryError):
    """Memory could not be allocated. What asked for it is unchanged, but for a training batch,
    which may be there in part; sizes and counts are right (docs/design.md, "Memory")."""


class UsageError(DynamicEmbError, RuntimeError):
    """A call that is not possible in the present state, such as training before ``set_score``."""


class CheckpointError(DynamicEmbError, RuntimeError):
    """A checkpoint could not be written or read; the message says which file and why."""


class CorruptCheckpointError(CheckpointError):
    """The files are not what was written: damaged, incomplete, or not one checkpoint."""


class ReplacedCheckpointError(CheckpointError):
    """A checkpoint was replaced or removed while it was opened or read. Nothing is damaged: opening
    it again gives the checkpoint that is there now."""


class StoreError(DynamicEmbError, OSError):
    """A store below a table could not read or write; ``errno``, ``strerror`` and ``filename`` say
    what the operating system refused.

    ``kept``: the rows of the call are safe in the store's memory and need not be given again.
    """

    def __init__(
        self, errno: int | None, message: str, filename: Any = None, *, kept: bool = False
    ) -> None:
        super().__init__(errno, message, filename)
        self.kept = kept

    def __str__(self) -> str:
        return str(self.strerror)


class CorruptStoreError(StoreError):
    """The bytes of a store are not what was written."""


def wrong_type(name: str, value: object, allowed: str) -> ArgumentTypeError:
    """The error for an argument of the wrong type."""
    return ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")


def wrong_value(name: str, value: object, allowed: str) -> InvalidArgumentError:
    """The error for a value that is not allowed."""
    return InvalidArgumentError(f"{name} is {value!r}; allowed: {allowed}")


def missing_package(user: str, package: str, extra: str) -> ImportError:
    """The error for an optional package that is not installed."""
    return ImportError(f"{user} needs {package}: pip install 'dynamicemb[{extra}]'", name=package)


def check_bool(name: str, value: object) -> bool:
    """``value`` if it is a ``bool``."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")
    return value


def check_integer(
    name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """``value`` as ``int`` if it is an integer (not a ``bool``) in ``[minimum, maximum]``."""
    if minimum is not None and maximum is not None:
        allowed = f"an integer from {minimum} to {maximum}"
    elif minimum is not None:
        allowed = f"an integer of at least {minimum}"
    elif maximum is not None:
        allowed = f"an integer of at most {maximum}"
    else:
        allowed = "an integer"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_type(name, value, allowed)
    result = int(value)
    if (minimum is not None and result < minimum) or (maximum is not None and result > maximum):
        raise wrong_value(name, value, allowed)
    return result


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """``value`` as ``float`` if it is a finite real number within the bounds given.

    ``minimum`` and ``maximum`` belong to the range, ``above`` and ``below`` do not.
    """
    bounds = [
        f"{sign} {bound}"
        for sign, bound in ((">=", minimum), (">", above), ("<=", maximum), ("<", below))
        if bound is not None
    ]
    allowed = "a finite number" + (f" {' and '.join(bounds)}" if bounds else "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(name, value, allowed)
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if (
        not math.isfinite(result)
        or (minimum is not None and result < minimum)
        or (maximum is not None and result > maximum)
        or (above is not None and result <= above)
        or (below is not None and result >= below)
    ):
        raise wrong_value(name, value, allowed)
    return result


def check_path(name: str, value: object, allowed: str = "the path of a folder") -> str:
    """``value`` as text if it is a path on this machine. ``scheme://...`` is none: no file system
    is reached that way, and a folder of that name is never meant. (``pathlib`` makes ``scheme:/``
    of it.)"""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise wrong_type(name, value, allowed)
    url = _URL.match(text)
    if url is not None:  # what follows may hold a password
        raise InvalidArgumentError(
            f"{name} is a URL ({url[1] or url[2]}://...); allowed: {allowed} on this machine, "
            "without a scheme"
        )
    return text


def check_enum(name: str, value: object, kind: type[EnumT]) -> EnumT:
    """``value`` if it is a member of ``kind``; a plain number or string is not."""
    if not isinstance(value, kind):
        raise wrong_type(name, value, f"{kind.__name__}.{{{', '.join(kind.__members__)}}}")
    return value


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse ``value`` unless it equals one of ``choices`` and has the type of one of them."""
    options = list(choices)
    allowed = ", ".join(str(option) for option in options)
    if not isinstance(value, tuple(type(option) for option in options)):
        raise wrong_type(name, value, allowed)
    if value not in options:
        raise wrong_value(name, value, allowed)
