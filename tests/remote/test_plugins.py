"""Native plug-ins, compiled by the tests: the C interface, threads, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from row_makers import FORMAT, IDS, make

import dynamicemb.tde
from dynamicemb.errors import InvalidArgumentError, StoreError, UsageError
from dynamicemb.tiers.remote import plugin
from dynamicemb.tiers.remote.open import open_rows

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
INCLUDE = f"-I{ROOT / 'include'}"
Compile = Callable[..., str]


@pytest.fixture(scope="session")
def compile_plugin(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles a source to a shared library; its path."""
    folder = tmp_path_factory.mktemp("plugins")

    def make_library(source: Path, *flags: str) -> str:
        out = str(folder / f"{source.stem}{len(os.listdir(folder))}.so")
        compiler = os.environ.get("CXX", "c++") if source.suffix == ".cpp" else "cc"
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler}")
        standard = ["-std=c++17", "-pthread"] if source.suffix == ".cpp" else ["-std=c11"]
        command = [compiler, *standard, "-shared", "-fPIC", "-Wall", "-Werror", INCLUDE, *flags]
        subprocess.run([*command, str(source), "-o", out], check=True, capture_output=True)
        return out

    return make_library


@pytest.fixture(scope="session")
def modes(compile_plugin: Compile) -> str:
    """The plug-in modes://, with the older names; its path."""
    path = compile_plugin(HERE / "plugins" / "modes_io.cpp", "-DOLDER")
    torch.ops.tde.register_io(path)
    return path


def test_the_documented_example(compile_plugin: Compile) -> None:
    torch.ops.tde.register_io(compile_plugin(ROOT / "examples" / "plugins" / "map_io.cpp"))
    rows = open_rows("map://whatever", "t", FORMAT)
    rows.push(IDS, make(IDS))
    found, values = rows.pull(torch.cat([IDS, torch.tensor([99])]))
    assert found.tolist() == [True] * len(IDS) + [False]
    assert torch.equal(values[:-1], make(IDS))


def test_the_header_is_c_and_has_the_layout_of_compiled_plugins(compile_plugin: Compile) -> None:
    path = compile_plugin(HERE / "plugins" / "layout.c")
    with pytest.raises(InvalidArgumentError, match="has no symbol IO_Initialize"):
        torch.ops.tde.register_io(path)


def test_the_newer_names(compile_plugin: Compile) -> None:
    source = HERE / "plugins" / "modes_io.cpp"
    torch.ops.tde.register_io(compile_plugin(source, '-DTYPE="newer"'))
    rows = open_rows("newer://", "t", FORMAT)
    rows.push(IDS, make(IDS))
    assert torch.equal(rows.pull(IDS)[1], make(IDS))


@pytest.mark.parametrize("mode", ["", "threads", "twice"])
def test_callbacks_from_any_thread(modes: str, mode: str) -> None:
    rows = open_rows(f"modes://{mode}", "t", FORMAT)
    ids = torch.arange(-500, 500)
    rows.push(ids, make(ids))
    rows.push(torch.cat([ids[:5], ids[:5]]), torch.cat([make(ids[:5], 1), make(ids[:5], 2)]))
    for _ in range(5):
        found, values = rows.pull(ids)
        assert bool(found.all())
        assert torch.equal(values[5:], make(ids)[5:])
        assert torch.equal(values[:5], make(ids[:5], 2))
    assert not bool(rows.pull(ids + 5000)[0].any())


def test_several_calls_at_the_same_time(modes: str) -> None:
    rows = open_rows("modes://threads", "t", FORMAT)
    ids = torch.arange(1000)
    rows.push(ids, make(ids))
    wrong: list[int] = []

    def read(begin: int) -> None:
        part = ids[begin::4]
        if not torch.equal(rows.pull(part)[1], make(part)):
            wrong.append(begin)

    threads = [threading.Thread(target=read, args=(begin,)) for begin in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("null", "IO_Initialize returned NULL"),
        ("throw on start", "IO_Initialize threw: no such cluster"),
        ("throw", "IO_Push threw: the cluster is full"),
        ("short", "15 bytes for part 0 of id 0; allowed: 16"),
        ("partly", "not all of them"),
        ("outside", "row 1000"),
        ("throw odd", "IO_Pull threw something"),
    ],
)
def test_a_failing_plugin_is_named(modes: str, mode: str, message: str) -> None:
    def use() -> None:
        rows = open_rows(f"modes://{mode}", "t", FORMAT)
        rows.push(IDS, make(IDS))
        rows.pull(IDS)

    with pytest.raises(StoreError, match=message) as caught:
        use()
    assert "modes://" in str(caught.value)


def test_a_plugin_that_does_not_answer_is_given_up(
    modes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "timeout_s", 0.05)
    rows = open_rows("modes://silent", "t", FORMAT)
    with pytest.raises(StoreError, match="IO_Pull did not call back in 50 ms"):
        rows.pull(IDS)
    with pytest.raises(StoreError, match="IO_Push did not call back"):
        rows.push(IDS, make(IDS))


def test_what_a_plugin_cannot_do(modes: str) -> None:
    rows = open_rows("modes://", "t", FORMAT)
    with pytest.raises(UsageError, match="cannot erase"):
        rows.erase(IDS)
    with pytest.raises(UsageError, match="cannot list"):
        rows.count()
    rows.close()
    with pytest.raises(StoreError, match="closed"):
        rows.pull(IDS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["-DNO_TYPE"], "IO_type"), (["-DNO_FINALIZE"], "IO_Finalize"), ([], "")],
)
def test_a_missing_symbol_is_named(compile_plugin: Compile, flags: list[str], message: str) -> None:
    path = compile_plugin(HERE / "plugins" / "modes_io.cpp", *flags, '-DTYPE="once"')
    if message:
        with pytest.raises(InvalidArgumentError, match=f"has no symbol {message}"):
            torch.ops.tde.register_io(path)
    else:
        torch.ops.tde.register_io(path)


def test_what_is_not_a_plugin(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("hello")
    with pytest.raises(InvalidArgumentError, match="cannot be loaded"):
        torch.ops.tde.register_io(str(text))
    with pytest.raises(InvalidArgumentError, match="no such file"):
        torch.ops.tde.register_io(str(tmp_path / "none.so"))
    with pytest.raises(InvalidArgumentError, match="no such file"):
        torch.ops.tde.register_io("libc.so.6")  # not looked for in the system's folders


def test_the_same_file_may_be_registered_again(modes: str, tmp_path: Path) -> None:
    torch.ops.tde.register_io(modes)
    (tmp_path / "link.so").symlink_to(modes)
    torch.ops.tde.register_io(str(tmp_path / "link.so"))
    assert plugin.registered_plugins()["modes"] == modes


def test_a_second_plugin_of_a_type_is_an_error(modes: str, compile_plugin: Compile) -> None:
    second = compile_plugin(HERE / "plugins" / "modes_io.cpp")
    with pytest.raises(InvalidArgumentError, match="'modes', which is that of the plug-in") as told:
        torch.ops.tde.register_io(second)
    assert modes in str(told.value)
    assert second in str(told.value)
    assert plugin.registered_plugins()["modes"] == modes


def test_a_plugin_that_was_replaced_on_the_disk_is_an_error(
    compile_plugin: Compile, tmp_path: Path
) -> None:
    path = tmp_path / "replaced.so"
    source = HERE / "plugins" / "modes_io.cpp"
    shutil.copy(compile_plugin(source, '-DTYPE="replaced"'), path)
    torch.ops.tde.register_io(str(path))
    new = tmp_path / "new.so"
    shutil.copy(compile_plugin(source, '-DTYPE="replaced"', "-O1"), new)
    os.replace(new, path)
    with pytest.raises(InvalidArgumentError, match="was replaced after it was registered"):
        torch.ops.tde.register_io(str(path))


@pytest.mark.parametrize("name", ["", "my store", "a/b", "1st", "x" * 65])
def test_a_plugin_that_no_url_can_name_is_an_error(compile_plugin: Compile, name: str) -> None:
    path = compile_plugin(HERE / "plugins" / "modes_io.cpp", f'-DTYPE="{name}"')
    with pytest.raises(InvalidArgumentError, match="IO_type"):
        torch.ops.tde.register_io(path)
    assert name not in plugin.registered_plugins()


#: Run in a process of its own: what is registered stays registered.
BUILT_IN = """
import sys

import pytest
import torch
from row_makers import FORMAT, IDS, make

import dynamicemb.tde
from dynamicemb.errors import UsageError
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.plugin import PluginRows
from dynamicemb.tiers.remote.rows import RowFormat

path, scheme, used_path, used = sys.argv[1:]
first = open_rows(used, "t", FORMAT)
with pytest.raises(UsageError, match="are in use; register"):
    torch.ops.tde.register_io(used_path)
assert not isinstance(open_rows(used, "t", FORMAT), PluginRows)

torch.ops.tde.register_io(path)
rows = open_rows(f"{scheme}://any text", "t", FORMAT)
other = open_rows(f"{scheme}://any text", "t", RowFormat(FORMAT.parts[:1]))
assert isinstance(rows, PluginRows)
rows.push(IDS, make(IDS))
assert torch.equal(rows.pull(IDS)[1], make(IDS))
assert not bool(other.pull(IDS)[0].any())  # each has rows of its own
"""


@pytest.mark.parametrize(("scheme", "used"), [("memory", "redis"), ("redis", "memory")])
def test_a_plugin_comes_before_a_store_of_its_name_unless_that_is_in_use(
    compile_plugin: Compile, scheme: str, used: str
) -> None:
    pytest.importorskip("redis")
    source = HERE / "plugins" / "modes_io.cpp"
    paths = [compile_plugin(source, f'-DTYPE="{name}"') for name in (scheme, used)]
    url = "memory://a" if used == "memory" else "redis://127.0.0.1:1"
    command = [sys.executable, "-c", BUILT_IN, paths[0], scheme, paths[1], url]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_url_of_no_plugin() -> None:
    with pytest.raises(InvalidArgumentError, match="register_io"):
        open_rows("unheard-of://", "t", FORMAT)


def test_the_header_is_found() -> None:
    assert Path(dynamicemb.tde.include_dir(), "dynamicemb", "tde_io.h").is_file()
