"""Configuration files: PyYAML's safe reader with the scalars of YAML 1.2, and mistakes by line.

YAML 1.1, PyYAML's own, takes ``no`` for false, ``1e6`` for text and ``12:30`` for 750, and the last
of two equal keys; here names stay names, numbers are numbers, and a key may stand once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dynamicemb.errors import InvalidArgumentError, missing_package

try:
    import yaml
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb's command line", "pyyaml", "cli") from error

#: Tag -> (the text that has it, its first signs): the core schema of YAML 1.2.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
        list("-+.0123456789"),
    ),
}


#: Digits of an integer.
LONGEST_INTEGER = 100
#: Bytes of a file; reading one takes some 10 seconds per MiB.
LONGEST = 128 * 2**10


class _Loader(yaml.SafeLoader):
    """Reads plain data only, and no aliases: a few of them make a long value of a short text."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor[:50]} is an alias; write the value", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the name {name!r} is no text; quote it", key.start_mark
                )
            if name in known:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name!r} stands there twice", key.start_mark
                )
            known.add(name)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        if len(text) > LONGEST_INTEGER:
            raise yaml.constructor.ConstructorError(
                None, None, f"an integer of {len(text)} digits", node.start_mark
            )
        return int(text)  # 010 is ten


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads the same; other readers too."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _signs) in _SCALARS.items():
    _whole = re.compile(f"(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, _signs)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, _signs)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in ``text``. Raises ``InvalidArgumentError`` with ``where`` and the line."""
    if len(text) > LONGEST:
        raise InvalidArgumentError(
            f"{where} has {len(text)} characters; allowed: at most {LONGEST}"
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidArgumentError(f"{where}{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise InvalidArgumentError(f"{where} is not YAML: {error}") from error
    except RecursionError as error:
        raise InvalidArgumentError(f"{where} is nested too deep") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise InvalidArgumentError(f"{where} is {kind}; allowed: `name: value` lines")
    return value


def write_yaml(values: Mapping[str, Any]) -> str:
    """Lines of ``name: value``, where a value is a scalar or a list of scalars."""
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=10_000,
    )
