"""Configuration files: the part of YAML that is read, and how the rest is refused."""

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
path: "runs/a # b"
quoted: 'it''s'
nothing: null
flag: true
dense: [I1, I2]
sparse:
  - C1
  - C2
tables:
  users:
    features: [user]
"""


def test_scalars_lists_and_nested_mappings() -> None:
    assert read_yaml(TEXT, "f") == {
        "model": "dlrm",
        "lr": 0.05,
        "big": 1e6,
        "count": 65536,
        "path": "runs/a # b",
        "quoted": "it's",
        "nothing": None,
        "flag": True,
        "dense": ["I1", "I2"],
        "sparse": ["C1", "C2"],
        "tables": {"users": {"features": ["user"]}},
    }


def test_what_is_written_is_read_again() -> None:
    values = {"a": 1, "b": 0.5, "c": "x y", "d": None, "e": True, "f": ["p", "1"], "g": "true"}
    assert read_yaml(write_yaml(values), "f") == values


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb", "line 2"),
        ("a: 1\na: 2", "line 2"),
        ("a: 1\n  b: 2", "line 2"),
        ("a: {x: 1}", "line 1"),
        ("a: &anchor 1", "line 1"),
        ("a: |", "line 1"),
        ("a: [1, 2", "line 1"),
        ("a: 'x", "line 1"),
        ('a: "x', "line 1"),
        ("- a\nb: 1", "line 2"),
    ],
)
def test_other_yaml_is_refused_with_its_line(text: str, line: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"run.yaml, {line}: .*; allowed: "):
        read_yaml(text, "run.yaml")
