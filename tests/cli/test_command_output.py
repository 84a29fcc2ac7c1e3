"""What commands print: rich on a terminal, lines elsewhere, the same words in both."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from dynamicemb.cli.app import BROKEN_PIPE, FAILURE, main
from dynamicemb.cli.output import Output, bar, bytes_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO) -> list[str]:
    output = Output(stream)
    output.title("a [bold]title")
    output.table(("name", "rows"), [("[red]x", "1"), ("longer", "1,000")], numbers=(1,))
    output.line("[/b] the end")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    return [line.rstrip() for line in plain.splitlines()]


def test_a_terminal_shows_what_a_file_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    lines = printed(io.StringIO())
    assert lines == [
        "a [bold]title",
        "name     rows",
        "[red]x      1",
        "longer  1,000",
        "[/b] the end",
    ]
    terminal = Terminal()
    assert printed(terminal) == lines
    assert "\x1b[1m" in terminal.getvalue()


def test_narrow_terminals_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    Output(terminal).table(("name", "id"), [("a" * 30, str(2**63))])
    kept = re.sub(r"\x1b\[[0-9;]*m|\s", "", terminal.getvalue())
    assert kept.count("a") == 31
    assert "…" not in kept


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_names_give_a_terminal_no_commands(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from files that anybody may have made."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    name = "\x1b]0;mine\x07\x1b[2Ja\nb\t\u202e\ud800 größe-表"
    shown = "\\x1b]0;mine\\x07\\x1b[2Ja\\nb\\t\\u202e\\ud800 größe-表"
    output = Output(written := stream())
    output.title(name)
    output.line(name)
    output.table(("name",), [(name,)])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == [shown, shown, "name", shown]


def test_letters_that_a_terminal_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dynamicemb.cli.inspect as command

    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))

    def prints(_: object) -> int:
        Output().line("größe")
        return 0

    monkeypatch.setattr(command, "main", prints)
    assert main(["inspect", "x"]) == 0
    assert written.getvalue() == b"gr\\xf6\\xdfe\n"


def test_bytes_and_bars() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
    ]
    assert [len(bar(part)) for part in (0.0, 0.001, 0.5, 1.0)] == [0, 1, 15, 30]


def test_interrupts_readers_that_leave_and_full_disks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import dynamicemb.cli.inspect as command

    def ends_with(error: BaseException | type[BaseException]) -> int:
        def raises(_: object) -> int:
            raise error

        monkeypatch.setattr(command, "main", raises)
        monkeypatch.setattr("os.dup2", lambda *_: None)
        return main(["inspect", "x"])

    assert ends_with(KeyboardInterrupt) == 130
    assert capsys.readouterr().err == "dynamicemb: interrupted\n"
    assert ends_with(BrokenPipeError) == BROKEN_PIPE
    assert capsys.readouterr().err == ""
    assert ends_with(OSError(28, "No space left on device", "/a/file")) == FAILURE
    assert capsys.readouterr().err == "dynamicemb: /a/file: No space left on device\n"
    assert ends_with(OSError(28, "No space left on device")) == FAILURE
    assert "standard output, or a file: No space left" in capsys.readouterr().err


INTERRUPTED_IMPORT = """
import importlib.metadata, signal, sys

class Interrupt:  # as if the user did it in the seconds that this import takes
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
(command,) = importlib.metadata.entry_points(group="console_scripts", name="dynamicemb")
sys.exit(command.load()())
"""


def test_an_interrupt_while_torch_is_imported_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dynamicemb: interrupted\n")
