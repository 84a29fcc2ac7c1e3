"""One line of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """OK: there, or works. NOTE: works, and could be better. MISSING: not there, and not needed by
    the rest. BROKEN: there, and does not work."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """detail: what was found, or what is wrong. command: what helps, for a shell; "" if nothing
    does. essential: whether the library is of no use while it is broken."""

    name: str
    status: Status
    detail: str
    command: str = ""
    essential: bool = False
