"""A module imports only from its own layer and those above it in docs/design.md's list."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dynamicemb

PACKAGE = Path(dynamicemb.__file__).parent
LAYERS = ("kernels", "table", "tiers", "nn", "checkpoint", "torchrec", "other APIs", "cli")
#: What makes up a layer that is not a folder of its name.
PARTS = {
    **dict.fromkeys(("planner", "shard", "unsharded", "get_planner"), "torchrec"),
    **dict.fromkeys(("one_embedding", "tde", "managed_collision"), "other APIs"),
}


def layer_of(module: str) -> str | None:
    """The layer of a module of the package; ``None`` for what all layers may use, and for the
    root and the compatibility modules, which gather names from any layer."""
    parts = module.split(".")
    if parts[0] != "dynamicemb" or len(parts) == 1:
        return None
    name = PARTS.get(parts[1], parts[1])
    return name if name in LAYERS else None


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            for one in node.names:
                yield node.lineno, one.name


def test_no_module_imports_from_a_layer_below_it() -> None:
    wrong = []
    seen = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("dynamicemb", *file.relative_to(PACKAGE).with_suffix("").parts))
        own = layer_of(module)
        if own is None:
            continue
        seen.add(own)
        for line, imported in imports_of(file):
            other = layer_of(imported)
            if other is not None and LAYERS.index(other) > LAYERS.index(own):
                wrong.append(f"{module}:{line} imports {imported}")
    assert seen == set(LAYERS)
    assert wrong == []


def test_what_all_layers_use_imports_none_of_them() -> None:
    """Else a layer could reach one below it through a module at the root."""
    used, imported = set(), {}
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("dynamicemb", *file.relative_to(PACKAGE).with_suffix("").parts))
        names = {name for _, name in imports_of(file)}
        if layer_of(module) is not None:
            used |= {name for name in names if name.count(".") == 1 and layer_of(name) is None}
        elif module.count(".") == 1:
            imported[module] = {name for name in names if layer_of(name) is not None}
    assert {"dynamicemb.errors", "dynamicemb.options"} <= used
    assert {name: imported[name] for name in used if imported.get(name)} == {}


def test_modules_of_tests_have_different_names() -> None:
    """They are imported by their names alone, in one process."""
    files = [file for file in Path(__file__).parent.rglob("*.py") if file.name != "conftest.py"]
    names = Counter(file.name for file in files if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []
