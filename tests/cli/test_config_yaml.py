"""Configuration files: numbers are numbers, names are names, mistakes have their line."""

from __future__ import annotations

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
