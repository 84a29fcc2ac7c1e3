"""The fenced code blocks of a markdown page, with what the page says about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PYTHON = ("python",)
SHELL = ("sh", "bash", "console")
CHECKED = ("yaml", "json", "toml")
TEXT = ("text", "cpp", "diff", "html", "prometheus")

_FENCE = re.compile(r"^( *)(`{3,})(.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_NOT_RUN = re.compile(r"^ *<!-- not run: (.*?) *-->$")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``title``: the file that it is; ``not_run``: why a test cannot run it."""

    page: Path
    line: int  # of its first line of code, from 1
    kind: str
    code: str
    title: str | None
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of ``page``, those inside of lists and notes too."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    last_text = ""  # the last line before a fence that is not empty
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        number += 1
        if opened is None:
            last_text = lines[number - 1].strip() or last_text
            continue
        indent, ticks, info = opened.groups()
        first, code = number + 1, []
        while lines[number].strip() != ticks:  # an IndexError: a fence that is never closed
            code.append(lines[number].removeprefix(indent))
            number += 1
        number += 1
        title, reason = _TITLE.search(info), _NOT_RUN.match(last_text)
        found.append(
            Block(
                page,
                first,
                info.split(" ")[0],
                "\n".join(code) + "\n",
                None if title is None else title[1],
                None if reason is None else reason[1],
            )
        )
        last_text = ""
    return found
