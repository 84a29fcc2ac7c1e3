"""Configuration files: numbers are numbers, names are names, mistakes have their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamicemb.cli.yaml import read_yaml, write_yaml
from dynamicemb.errors import InvalidArgumentError

TEXT = """
# a run
model: dlrm          # with a comment
lr: 0.05
big: 1e6
count: 65_536
ten: 010
path: "runs/a # b"
quoted: 'it''s'
nothing: null
empty:
flag: true
no: yes
time: 12:30
dense: [I1, I2]
sparse:
- C1
- C2
tables: {users: {features: [user]}}
"""


def test_scalars_lists_and_nested_mappings() -> None:
    assert read_yaml(TEXT, "f") == {
        "model": "dlrm",
        "lr": 0.05,
        "big": 1e6,
        "count": 65536,
        "ten": 10,
        "path": "runs/a # b",
        "quoted": "it's",
        "nothing": None,
        "empty": None,
        "flag": True,
        "no": "yes",
        "time": "12:30",
        "dense": ["I1", "I2"],
        "sparse": ["C1", "C2"],
        "tables": {"users": {"features": ["user"]}},
    }
    assert read_yaml("# nothing\n", "f") == {}


def test_what_is_written_is_read_again() -> None:
    values = {
        **{"a": 1, "b": 0.5, "c": "x y", "d": None, "e": True, "f": ["p", "1"], "g": "true"},
        **{"h": "1e6", "i": "no", "j": "12:30", "k": [], "l": "", "m": "é#: -", "n": 1e-08},
        "o": "x " * 300,
    }
    text = write_yaml(values)
    assert read_yaml(text, "f") == values
    assert text.count("\n") == len(values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb", "line 2"),
        ("a: 1\na: 2", "line 2, column 1: 'a' stands there twice"),
        ("a:\n  b: 1\n  b: 2", "line 3"),
        ("a: 1\n  b: 2", "line 2"),
        ("a: [1, 2", "line 1"),
        ("a: 'x", "line 1"),
        ("a: 1\n- b", "line 2"),
        ("1: 2", "line 1, column 1: the name 1 is no text"),
        ("a: !!python/name:os.system ''", "line 1"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("- a\n- b", "is a list; allowed"),
        ("text", "is a single value"),
        ("a: \x00", "is not YAML"),
    ],
)
def test_mistakes_have_their_line(text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match="run.yaml") as caught:
        read_yaml(text, "run.yaml")
    assert said in str(caught.value)


def test_equal_lists_are_written_without_aliases() -> None:
    names = ["a", "b"]
    values = {"dense": names, "sparse": names}
    assert read_yaml(write_yaml(values), "f") == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x]\nb: *a\n", r"f, line 2, column 4: \*a is an alias"),
        ("label: x\nsparse: &a [*a]\n", r"f, line 2, column 13: \*a is an alias"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "f is nested too deep"),
        ("a: " + "9" * 5_000, "f, line 1, column 4: an integer of 5000 digits"),
        ("a: " + "x" * 200_000, "f has 200003 characters; allowed: at most"),
    ],
    ids=["alias", "itself", "deep", "long integer", "long text"],
)
def test_what_costs_more_than_its_length_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        read_yaml(text, "f")


def test_a_schema_shows_the_beginning_of_a_wrong_value(tmp_path: Path) -> None:
    from dynamicemb.cli.training.schema import read_schema

    file = tmp_path / "s.yaml"
    file.write_text("label: x\nsparse: [" + "[a], " * 2000 + "]\n")
    with pytest.raises(InvalidArgumentError, match="a list of column names") as raised:
        read_schema(str(file))
    assert len(str(raised.value)) < 400
