"""How docstrings become markdown for the API pages: an extension of griffe, which reads them.

Docstrings list arguments as lines ``name: what it is`` (with deeper lines going on), with or
without a heading, name things in reStructuredText's roles, and pages by their files. All that
becomes markdown here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_PAGE = re.compile(r"`*docs/(\w+)\.md`*")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
_ITEM = re.compile(r"((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (.*)")
_SECTION = re.compile(r"(Args|Raises|Returns|Yields|Example):$")


def _title(page: str) -> str:
    """The heading of a page of the documentation."""
    return (Path(__file__).parent / f"{page}.md").read_text().partition("\n")[0].lstrip("# ")


def _names(found: griffe.Object) -> set[str]:
    """What a docstring of ``found`` may list: its parameters, or the members of a class."""
    if isinstance(found, griffe.Class):
        return {*found.members, *found.all_members} | {one.name for one in found.parameters}
    return {one.name for one in getattr(found, "parameters", ())}


def as_markdown(text: str, names: set[str]) -> str:
    """``text`` with its lists of ``names`` as lists of markdown, and without roles."""
    lines: list[str] = []
    inside = section = False  # an item; what griffe itself reads as a section
    text = _PAGE.sub(lambda page: f"[{_title(page[1])}](../{page[1]}.html)", text)
    for line in _ROLE.sub(r"`\1`", text).splitlines():
        section = bool(_SECTION.match(line)) or (section and (line.startswith(" ") or not line))
        item = None if section else _ITEM.match(line)
        if item and names.intersection(item[1].replace("*", "").split(", ")):
            if not inside and lines and lines[-1]:
                lines.append("")
            listed = ", ".join(f"`{name}`" for name in item[1].split(", "))
            line, inside = f"- {listed}: {item[2]}", True
        elif inside and line and not line.startswith(" "):
            lines.append("")
            inside = False
        lines.append(line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, _names(obj))
