"""What a command says: rich tables on a terminal, aligned lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal, TextIO


def printable(text: str, keep: str = "") -> str:
    """``text`` with escapes for what a terminal would obey or could not show: names are those of a
    file that anybody may have made."""
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode()
        for one in text
    )


class Output:
    """Writes to ``stream`` (standard output). Text that is not for a person goes past it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._console = None
        if self._stream.isatty():
            try:
                from rich.console import Console
            except ImportError:  # the plain form is as complete
                return
            self._console = Console(file=self._stream, highlight=False)

    def line(self, text: str = "") -> None:
        text = printable(text)
        if self._console is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")

    def title(self, text: str) -> None:
        """The head of a section."""
        text = printable(text)
        if self._console is not None:
            self._console.print(text, style="bold", markup=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()
    ) -> None:
        """Rows in columns; those in ``numbers`` are aligned to the right."""
        rows = [[printable(cell) for cell in row] for row in rows]
        if self._console is not None:
            from rich.table import Table
            from rich.text import Text

            table = Table(box=None, pad_edge=False, header_style="dim")
            for place, name in enumerate(header):
                side: Literal["left", "right"] = "right" if place in numbers else "left"
                table.add_column(Text(name), justify=side, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))  # names are no markup
            self._console.print(table)
            return
        widths = [max(len(one[place]) for one in (header, *rows)) for place in range(len(header))]
        for row in (header, *rows):
            cells = [
                cell.rjust(width) if place in numbers else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self._stream.write("  ".join(cells).rstrip() + "\n")


def bytes_on_disk(file: str | os.PathLike[str]) -> int:
    """What a file takes: a store's may be longer than what was written to it."""
    status = os.stat(file)
    return min(status.st_size, 512 * status.st_blocks)


def bytes_text(count: int) -> str:
    """Bytes in words."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


def bar(part: float, width: int = 30) -> str:
    """A share as a bar of ``width`` characters at most."""
    return "#" * max(1 if part > 0 else 0, round(part * width))
