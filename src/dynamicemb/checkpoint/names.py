"""File names for any table and collection name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable

from dynamicemb.errors import check_choice

#: Bytes of an escaped name at most; the rest of a file name needs up to 70 of the usual 255.
_LONGEST = 150
_KEPT = 100

#: What the files of one shard hold: ids, rows, scores, optimizer state, and the admission counter.
ROLES = ("keys", "values", "scores", "opt_values", "counter_keys", "counter_frequencies")


def escape(name: str) -> str:
    """A file name for ``name``: equal only for equal names, never hidden, "." or "..".

    ASCII letters, digits, "_", "-" and "." stay, the last not in front; the other bytes of its
    UTF-8 become "%" and two hexadecimal digits. A long name is cut and ends in "%~" and its hash.
    """
    parts: list[str] = []
    for byte in name.encode("utf-8", "surrogatepass"):
        char = chr(byte)
        plain = char.isascii() and (char.isalnum() or char in "_-.")
        if char == "." and not parts:
            plain = False
        parts.append(char if plain else f"%{byte:02X}")
    escaped = "".join(parts) or "%"
    if len(escaped) <= _LONGEST:
        return escaped
    return _with_hash(escaped, name)


def unescape(stem: str) -> str:
    """The name that :func:`escape` made ``stem`` of; ``stem`` itself if there is none to be found:
    other writers do not escape, and a cut name cannot be made whole."""
    data = re.sub(rb"%([0-9A-F]{2})", lambda found: bytes.fromhex(found[1].decode()), stem.encode())
    name = data.decode("utf-8", "replace")
    return name if escape(name) == stem else stem


def distinct_stems(names: Iterable[str]) -> dict[str, str]:
    """:func:`escape` of every name; names that a file system without upper and lower case would
    take for one get their hash too."""
    escaped = {name: escape(name) for name in names}
    folded: dict[str, list[str]] = {}
    for name, stem in escaped.items():
        folded.setdefault(stem.lower(), []).append(name)
    for group in folded.values():
        if len(group) > 1:
            for name in group:
                escaped[name] = _with_hash(escaped[name], name)
    return escaped


def _with_hash(escaped: str, name: str) -> str:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{escaped[:_KEPT]}%~{digest}"


def file_name(stem: str, role: str, rank: int, world_size: int) -> str:
    """The file of one role of one rank's shard; roles beside ``ROLES`` are named the same way."""
    kind = role if role.startswith("counter_") else f"emb_{role}"
    return f"{stem}_{kind}.rank_{rank}.world_size_{world_size}"


def opt_args_name(stem: str) -> str:
    """The file of a table's hyper-parameters."""
    return f"{stem}_opt_args.json"


def belongs_to(stem: str, file: str) -> bool:
    """Whether ``file`` is one that a dump of the table ``stem`` writes, for any number of ranks, or
    one of the older layouts."""
    if not file.startswith(stem):
        return False
    rest = file[len(stem) :]
    if rest in ("_keys", "_values", "_scores", "_opt_args.json"):
        return True
    return (
        re.fullmatch(r"_(?:emb|counter|opt)_[a-z0-9_]+\.rank_\d+\.world_size_\d+", rest) is not None
    )


def encode_meta_json_file_path(root_path: str, table_name: str) -> str:
    """The file of a table's hyper-parameters in the folder of its collection."""
    return os.path.join(root_path, opt_args_name(escape(table_name)))


def encode_checkpoint_file_path(
    root_path: str, table_name: str, rank: int, world_size: int, item: str
) -> str:
    """A rank's file of "keys", "values", "scores" or "opt_values"."""
    check_choice("item", item, ("keys", "values", "scores", "opt_values"))
    return os.path.join(root_path, file_name(escape(table_name), item, rank, world_size))


def encode_counter_checkpoint_file_path(
    root_path: str, table_name: str, rank: int, world_size: int, item: str
) -> str:
    """A rank's file of the "keys" or "frequencies" of an admission counter."""
    check_choice("item", item, ("keys", "frequencies"))
    name = file_name(escape(table_name), f"counter_{item}", rank, world_size)
    return os.path.join(root_path, name)
