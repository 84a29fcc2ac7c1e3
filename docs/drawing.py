"""Draws docs/pictures: `python docs/drawing.py` writes them, a test compares.

Colours are CSS variables of docs/stylesheets/site.css, so that a drawing inside a page follows its
scheme; a drawing that is shown as an image is dark on white.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
_STYLE = """
.drawing text { fill: var(--drawing-ink, #1f2a30); font-size: 13px; font-family: sans-serif; }
.drawing .small { font-size: 11.5px; }
.drawing .faint { fill: var(--drawing-faint, #607d8b); }
.drawing .bold { font-weight: bold; }
.drawing .mono { font-family: monospace; font-size: 12px; }
.drawing .ground { fill: var(--drawing-ground, #ffffff); }
.drawing .paper { fill: var(--drawing-paper, #f4f7f7); stroke: var(--drawing-faint, #78909c); }
.drawing .empty { fill: none; stroke: var(--drawing-faint, #78909c); stroke-dasharray: 4 3; }
.drawing .one { fill: var(--drawing-one, #00897b); fill-opacity: 0.18;
  stroke: var(--drawing-one, #00897b); }
.drawing .two { fill: var(--drawing-two, #ef6c00); fill-opacity: 0.18;
  stroke: var(--drawing-two, #ef6c00); }
.drawing .three { fill: var(--drawing-three, #5e6bc0); fill-opacity: 0.18;
  stroke: var(--drawing-three, #5e6bc0); }
.drawing .line { fill: none; stroke: var(--drawing-ink, #1f2a30); stroke-width: 1.4; }
.drawing .line.faint { stroke: var(--drawing-faint, #607d8b); }
.drawing .head { fill: var(--drawing-ink, #1f2a30); }
"""


class Drawing:
    """Boxes, words and arrows on a sheet; y grows downwards."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", *, middle: bool = False) -> None:
        anchor = ' text-anchor="middle"' if middle else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}"{anchor}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str] = (),
        kind: str = "paper",
        words: str = "",
    ) -> None:
        """A box with ``lines`` in its middle; ``words`` is how they look."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'class="{kind}"/>'
        )
        top = y + height / 2 + 4.5 - 8.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            look = f"{words} bold" if number == 0 and len(lines) > 1 else words
            self.text(x + width / 2, top + 17 * number, line, look, middle=True)

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through ``points`` with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{kind}" marker-end="url(#head)"/>')

    def svg(self) -> str:
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" class="head"/></marker>'
            "</defs>"
        )
        ground = f'<rect width="{width}" height="{height}" class="ground"/>'
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}">\n<style>{_STYLE}</style>\n'
            f"{head}\n{ground}\n{body}\n</svg>\n"
        )


def buckets() -> Drawing:
    """Where an id lives, what a slot is, and who makes room."""
    d = Drawing(740, 372)
    d.box(10, 22, 130, 44, ["id", "-4216043"], "one")
    d.arrow((140, 44), (186, 44))
    d.box(190, 22, 126, 44, ["hash", "64 bits"], "paper")
    d.arrow((316, 34), (362, 34))
    d.text(368, 38, "upper half: which bucket", "small")
    d.arrow((316, 56), (362, 56))
    d.text(368, 60, "one byte: the digest, 1 to 255 (0 says: empty)", "small")
    d.text(
        10,
        102,
        "A table is an array of buckets of 128 slots. An id lives in its bucket or nowhere.",
        "",
    )
    for number in range(6):
        kind = "one" if number == 2 else "paper"
        d.box(10 + 122 * number, 114, 112, 30, [f"bucket {number}"], kind)
    d.arrow((310, 144), (310, 166), (60, 166), (60, 186))
    columns = ((10, 62, "slot"), (72, 62, "digest"), (134, 156, "id"), (290, 90, "score"))
    for x, width, name in columns:
        d.text(x + width / 2, 202, name, "small faint", middle=True)
    d.text(490, 202, "row: embedding, optimizer state", "small faint", middle=True)
    rows = (
        ("0", "0x5c", "17", "1,204", "three"),
        ("1", "0xa1", "-4216043", "1,203", "three"),
        ("2", "0x1f", "2^63 - 1", "311", "two"),
        ("...", "", "", "", "empty"),
        ("127", "0x5c", "90210", "988", "three"),
    )
    for number, (slot, digest, id_, score, kind) in enumerate(rows):
        y = 210 + 26 * number
        for (x, width, _), words in zip(columns, (slot, digest, id_, score), strict=True):
            d.box(x, y, width - 4, 22, [words], "one" if words == "-4216043" else "paper", "mono")
        d.box(380, y, 220, 22, kind=kind)
    d.arrow((700, 232), (700, 273), (608, 273))
    d.text(612, 222, "the bucket is full:", "small")
    d.text(612, 256, "smallest score", "small")
    d.text(612, 292, "makes room", "small")
    d.text(
        10,
        362,
        "Found by comparing digests, 16 or more at a time; then one id, one score, one row.",
        "small faint",
    )
    return d


def batch() -> Drawing:
    """What happens to a training batch."""
    d = Drawing(740, 330)
    d.text(10, 20, "forward", "bold")
    steps = (
        (["distinct ids", "counted, in order", "of first use"], "paper"),
        (["find", "hits get their", "new score"], "one"),
        (["admission", "who may have", "a row at all?"], "paper"),
        (["growth", "if the load would", "be too high"], "paper"),
        (["place", "a free slot, or the", "smallest score's"], "two"),
        (["new rows", "from (seed, id,", "column)"], "three"),
    )
    for number, (lines, kind) in enumerate(steps):
        x = 10 + 122 * number
        d.box(x, 32, 108, 74, lines, kind, "small")
        if number:
            d.arrow((x - 14, 69), (x - 2, 69))
    d.arrow((186, 106), (186, 150))
    d.text(194, 134, "rows of hits", "small faint")
    d.arrow((674, 106), (674, 150))
    d.text(560, 134, "rows of newcomers", "small faint")
    d.box(10, 152, 720, 34, ["read the rows: gather, or sum and mean per bag, in float32"], "paper")
    d.arrow((370, 186), (370, 212))
    d.text(380, 204, "your model, your loss", "small faint")
    d.text(10, 222, "backward", "bold")
    d.box(10, 232, 346, 50, ["gradients per distinct id", "added in a fixed order"])
    d.arrow((356, 257), (382, 257))
    d.box(
        384,
        232,
        346,
        50,
        ["one update per row", "fused, or by the step of a torch.optim optimizer"],
        "one",
        "",
    )
    words = "Rejected ids have a row for this forward only; ids without a slot read 0.0."
    d.text(10, 310, words, "small faint")
    return d


def tiers() -> Drawing:
    """Tables larger than memory."""
    d = Drawing(740, 300)
    d.box(10, 20, 150, 70, ["training batch", "1,000 ids"], "paper")
    d.arrow((160, 55), (206, 55))
    levels = (
        (
            20,
            "the table: rows in use",
            "memory of the GPU or main memory, a budget in bytes",
            "one",
        ),
        (116, "main memory (if you stack one between)", "HostStore.within(bytes)", "three"),
        (
            212,
            "all rows: an SSD, Redis, or a class of yours",
            "SsdStore, RemoteStore, Store",
            "two",
        ),
    )
    for y, title, words, kind in levels:
        d.box(210, y, 400, 70, [title, words], kind)
    for y in (90, 186):
        d.arrow((330, y), (330, y + 24))
        d.arrow((490, y + 26), (490, y + 2))
        d.text(220, y + 18, "rows that leave", "small")
        d.text(498, y + 18, "rows in demand", "small")
    d.text(626, 40, "every row:", "small bold")
    for number, line in enumerate(
        ("embedding,", "optimizer state,", "score: one unit,", "one truth")
    ):
        d.text(626, 58 + 17 * number, line, "small")
    d.box(10, 130, 150, 42, ["prefetch", "reads ahead"], "empty")
    d.arrow((160, 151), (206, 151))
    return d


def sharding() -> Drawing:
    """Ids over ranks."""
    d = Drawing(740, 322)
    batches = (
        ("rank 0's batch", (7, 4, 12)),
        ("rank 1's batch", (4, 9, 30)),
        ("rank 2's batch", (2, 7, 11)),
    )
    kinds = ("one", "two", "three")
    for rank, (title, ids) in enumerate(batches):
        x = 20 + 240 * rank
        d.text(x + 105, 24, title, "bold", middle=True)
        for number, id_ in enumerate(ids):
            d.box(x + 70 * number, 34, 62, 26, [str(id_)], kinds[id_ % 3], "mono")
            d.arrow(
                (x + 70 * number + 31, 60),
                (125 + 240 * (id_ % 3) - 24 + 24 * rank, 152),
                kind="line faint",
            )
    d.text(10, 92, "ids travel", "small faint")
    d.text(10, 108, "to their owner", "small faint")
    for rank in range(3):
        x = 20 + 240 * rank
        d.box(x, 156, 210, 62, [f"rank {rank}", f"ids with id mod 3 = {rank}"], kinds[rank])
        d.arrow((x + 105, 218), (x + 105, 250))
    d.box(
        20,
        252,
        690,
        32,
        ["rows (or partial sums of bags) travel back; gradients come the same way"],
        "paper",
    )
    words = "Every id has one owner. A checkpoint loads on any number of ranks."
    d.text(10, 310, words, "small faint")
    return d


def checkpoints() -> Drawing:
    """A chain of a base and deltas, and who reads it."""
    d = Drawing(740, 276)
    d.box(10, 60, 130, 76, ["training", "any number", "of ranks"], "one")
    boxes = (
        (196, "base", "all rows"),
        (346, "delta 1", "what changed"),
        (496, "delta 2", "what changed"),
    )
    for x, title, words in boxes:
        d.box(x, 60, 126, 76, [title, words, "ids that left" if x > 196 else "checksums"], "paper")
    d.box(646, 60, 84, 76, ["..."], "empty")
    d.arrow((140, 98), (192, 98))
    for x in (322, 472, 622):
        d.arrow((x + 22, 82), (x + 2, 82))
    d.text(346, 48, "each names the one before it", "small faint")
    d.text(
        10, 24, "Files are written aside; one rename of the manifest makes them the checkpoint.", ""
    )
    readers = (
        (40, "DynamicEmbLoad", "a model, any ranks"),
        (276, "apply_delta", "a replica, bit for bit"),
        (512, "ServingTable", "mapped files, lookups only"),
    )
    for x, title, words in readers:
        d.box(x, 196, 190, 56, [title, words], "three")
    d.arrow((240, 136), (135, 192))
    d.arrow((372, 136), (372, 192))
    d.arrow((560, 136), (606, 192))
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "batch": batch,
    "buckets": buckets,
    "checkpoints": checkpoints,
    "sharding": sharding,
    "tiers": tiers,
}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
