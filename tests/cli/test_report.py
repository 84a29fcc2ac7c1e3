"""The report: self-contained, with its plots, and drawn by a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dynamicemb.cli.app import main
from dynamicemb.cli.training import plots

BROWSER = next(
    (
        one
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (one := shutil.which(name))
    ),
    None,
)
TITLES = (
    "AUC over a sliding window",
    "AUC above that of the hashed tables",
    "Normalised entropy",
    "Table growth",
    "Memory of the tables",
    "Hit rate",
    "Rows evicted",
    "Scores of the rows of table user",
    "How often ids of table item occurred",
    "Milliseconds of a step",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    arguments = (
        *("--days", "2", "--examples-per-day", "4000", "--batch-size", "500", "--new-ids", "500"),
        *("--capacity", "512", "--window", "2000", "--log-every", "4", "--dim", "4", "--plain"),
    )
    assert main(["train", *arguments, "--out", str(out)]) == 0
    return out / "report.html"


class Tags(HTMLParser):
    """What a page loads, and whether its tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_loads_nothing_and_has_every_plot(report: Path) -> None:
    text = report.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.loads == []
    assert "<script" not in text
    assert not re.search(r"https?://|@import|url\(", text)
    for title in TITLES:
        assert title in text
    assert "<h2>Why</h2>" in text
    assert re.search(r"mean of the second half: dynamic 0\.\d{4}, hashed 0\.\d{4}", text)
    assert "nan" not in text.lower().replace("nano", "")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_the_report(report: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    done = subprocess.run(
        [
            *(
                str(BROWSER),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
            ),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,3000"),
            *(
                f"--screenshot={picture}",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"file://{report}",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr  # what a page complains about
    assert picture.stat().st_size > 50_000  # an empty page has a tenth of it


def test_numbers_are_short_and_different() -> None:
    assert [plots.number(one) for one in (0.755, 12, 3050, 3060, 65e3, 650e3, 1.25e6)] == [
        *("0.755", "12", "3,050", "3,060", "65,000", "650k", "1.25M"),
    ]


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0.0, 1.0), (0.731, 0.778), (0.0, 65_536.0), (-3.0, 12.0)):
        some = plots.ticks(low, high)
        assert 3 <= len(some) <= 12
        assert all(low - 1e-9 <= one <= high + 1e-9 for one in some)
    assert plots.ticks(1.0, 1.0) == [1.0]


def test_plots_take_what_a_short_run_has() -> None:
    one = plots.lines("t", [1.0], {"a": [0.5]}, x_label="x", y_label="y")
    assert "<circle" in one
    assert "NaN" not in plots.lines("t", [1, 2], {"a": [float("nan")] * 2}, x_label="", y_label="")
    assert "nothing to show" in plots.histogram("t", np.empty(0), x_label="", y_label="")
    assert plots.histogram("t", np.full(9, 3.5), x_label="", y_label="").count("<rect") == 32
    integers = plots.histogram("t", np.arange(5.0), x_label="", y_label="")
    assert integers.count("<rect") == 5  # a bar each
    assert "&lt;b&gt;" in plots.bars("<b>", {"x": 0.0}, "ms")
