"""The site is built without a warning, loads nothing from the network, and has all public names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from markdown_blocks import ROOT

pytest.importorskip("mkdocs", reason="the documentation is built with mkdocs: requirements.txt")

PUBLIC = (
    "dynamicemb",
    "dynamicemb.dcp",
    "dynamicemb.errors",
    "dynamicemb.exchange",
    "dynamicemb.expiry",
    "dynamicemb.get_planner",
    "dynamicemb.incremental_dump",
    "dynamicemb.managed_collision",
    "dynamicemb.one_embedding",
    "dynamicemb.planner",
    "dynamicemb.serving",
    "dynamicemb.shard",
    "dynamicemb.table",
    "dynamicemb.tde",
    "dynamicemb.tiers",
    "dynamicemb.unsharded",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error (a page that is not in the navigation is one)."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


class Page(HTMLParser):
    """What a page loads by itself, its anchors, and its headings."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.images_without_words: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or "")
        if tag == "a":
            self.links.append(given.get("href") or "")
        loaded = given.get("href") if tag == "link" else given.get("src")
        if loaded is not None and given.get("rel") != "canonical":
            self.loads.append(loaded)
        if tag == "img" and not given.get("alt"):
            self.images_without_words.append(given.get("src") or "")


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 20
    for file, page in pages.items():
        for loaded in page.loads:
            assert not re.match(r"(https?:)?//", loaded), f"{file.name} loads {loaded}"
            path = loaded.split("?")[0].split("#")[0]
            if not path.startswith("data:") and file.name != "404.html":
                assert (file.parent / path).exists(), f"{file.name} loads {loaded}"
        assert page.images_without_words == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text()), sheet


def test_links_lead_somewhere(site: Path) -> None:
    """Those that mkdocs cannot see too: in docstrings, and in the README."""
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}

    def leads(file: Path, link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file.resolve()
        if target not in pages:
            return target.exists()
        return not anchor or anchor in pages[target].anchors

    internal = re.compile(r"(?!https?:|mailto:|javascript:)")
    wrong = [
        f"{file.name}: {link}"
        for file, page in pages.items()
        if file.name != "404.html"  # its links are those of the site's root
        for link in page.links
        if internal.match(link) and not leads(file, link)
    ]
    readme = re.findall(r"\[[^]\n\"]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    for link in readme:
        if internal.match(link):
            inside = re.fullmatch(r"docs/(.*)\.md(#.*)?", link)
            if inside is None:
                wrong += [] if (ROOT / link).exists() else [f"README.md: {link}"]
            elif not leads(site / "it", f"{inside[1]}.html{inside[2] or ''}"):
                wrong.append(f"README.md: {link}")
    assert wrong == []


def test_the_api_has_every_public_name(site: Path) -> None:
    pytest.importorskip("torchrec")
    anchors = set().union(*(Page(file).anchors for file in (site / "api").glob("*.html")))
    missing = set()
    for module in PUBLIC:
        of_module = re.compile(rf"{re.escape(module)}\.(?:\w+\.)*(\w+)$")
        shown = {found[1] for anchor in anchors if (found := of_module.match(anchor))}
        missing |= {f"{module}.{name}" for name in set(_names(module)) - shown}
    assert missing == set()


def _names(module: str) -> list[str]:
    names: list[str] = importlib.import_module(module).__all__
    return names


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_docstrings(module: str) -> None:
    if module.rpartition(".")[2] in ("get_planner", "managed_collision", "planner", "shard", "tde"):
        pytest.importorskip("torchrec")
    found = importlib.import_module(module)
    public = {name: getattr(found, name) for name in found.__all__}
    bare = [name for name, one in public.items() if callable(one) and not inspect.getdoc(one)]
    for name, one in public.items():
        if inspect.isclass(one) and one.__module__.startswith("dynamicemb"):
            bare += [
                f"{name}.{member}"
                for member, it in vars(one).items()
                if not member.startswith("_")
                and inspect.isfunction(it)
                and not inspect.getdoc(it)
                # of TorchRec's and torch's classes, which say what it is
                and not any(hasattr(base, member) for base in one.__mro__[1:])
            ]
    assert bare == []


def program(path: str) -> ModuleType:
    """A program of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_drawings_are_what_their_program_draws() -> None:
    for name, draw in program("docs/drawing.py").DRAWINGS.items():
        file = ROOT / "docs" / "pictures" / f"{name}.svg"
        assert file.read_text() == draw().svg(), "python docs/drawing.py"


def test_numbers_are_those_of_the_results() -> None:
    tables = program("benchmarks/result_tables.py")
    for document in tables.DOCUMENTS:
        text = document.read_text()
        assert "<!-- table:" in text
        assert text == tables.filled(text), "python benchmarks/result_tables.py"
