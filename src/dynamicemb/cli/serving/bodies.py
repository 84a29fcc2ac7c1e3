"""Lookups as they come over HTTP: ids in JSON, in an address or as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch

from dynamicemb.checkpoint.http_table import unpack_ids
from dynamicemb.cli.http import BYTES, JSON, Refused, Request
from dynamicemb.cli.serving.memory import Memory
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.texts import text_ids

LOWEST, HIGHEST = -(2**63), 2**64 - 1
ALLOWED = f"integers from {LOWEST} to {HIGHEST}, as numbers or as text"
_INTEGER = re.compile(r"-?[0-9]{1,20}")


def ids_of(request: Request, max_ids: int, memory: Memory) -> tuple[torch.Tensor, str]:
    """The ids of a request, int64 [n], and the type of answer that it wants: what it accepts, or
    else the type of its body."""
    if request.method != "POST":
        ids, kind = ids_of_query(request.query, max_ids), JSON
    else:
        kind = media_type(request.headers.get("content-type", JSON))
        if kind == BYTES:
            if len(request.body) % 8:
                raise Refused(
                    400, f"the body has {len(request.body)} bytes; allowed: 8 for each id"
                )
            ids = unpack_ids(request.body)
        elif kind in (JSON, "application/x-www-form-urlencoded"):  # curl -d says the second
            ids = memory.read(request.body, lambda body: ids_of_wish(json_body(body), max_ids))
            kind = JSON
        else:
            raise Refused(415, f"Content-Type is {kind!r}; allowed: {JSON}, {BYTES}")
        memory.keep(request.lease, len(ids))
    check_number_of_ids(len(ids), max_ids)
    wanted = media_type(request.headers.get("accept", ""))
    return ids, wanted if wanted in (JSON, BYTES) else kind


def media_type(header: str) -> str:
    return header.partition(";")[0].strip().lower()


def check_number_of_ids(number: int, max_ids: int) -> None:
    if number > max_ids:
        raise Refused(413, f"{number} ids; allowed: at most {max_ids} in a request")


def json_body(body: bytearray) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {str(error)[:200]}") from error


def member(value: Any, name: str) -> Any:
    """``value[name]`` of a JSON object that has nothing else."""
    if not isinstance(value, dict) or set(value) != {name}:
        shown = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise Refused(400, f'the body is {str(shown)[:200]}; allowed: {{"{name}": ...}}')
    return value[name]


def ids_of_query(query: str, max_ids: int) -> torch.Tensor:
    """``ids=1,2,3``, or ``text=a&text=b``; names that come twice follow each other."""
    wish: dict[str, list[str]] = {}
    try:
        members = parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise Refused(400, "the address is not UTF-8; allowed: UTF-8, percent-encoded") from None
    for name, value in members:
        if name == "text":  # may have a comma in it
            wish.setdefault("texts", []).append(value)
        elif name == "ids":
            wish.setdefault("ids", []).extend(value.split(",") if value else ())
        else:
            raise Refused(400, f"{name!r} is in the address; allowed: ids=1,2,3 or text=...")
    if len(wish) != 1:
        found = "both ids and text are" if wish else "there are no ids"
        raise Refused(400, f"{found} in the address; allowed: ?ids=1,2,3, ?text=..., or a POST")
    return ids_of_wish(wish, max_ids)


def ids_of_wish(wish: Any, max_ids: int) -> torch.Tensor:
    """int64 [n] of ``{"ids": [...]}`` or ``{"texts": [...]}``."""
    name = "texts" if isinstance(wish, dict) and "texts" in wish else "ids"
    if isinstance(wish, dict) and {"ids", "texts"} <= set(wish):
        raise Refused(400, 'there are ids and texts; allowed: {"ids": [...]} or {"texts": [...]}')
    value = member(wish, name)
    if isinstance(value, list):
        check_number_of_ids(len(value), max_ids)
    return ids_of_value(value) if name == "ids" else ids_of_texts(value)


def ids_of_texts(value: Any) -> torch.Tensor:
    """int64 [n] of a list of texts."""
    if not isinstance(value, list):
        raise Refused(400, f"texts is {str(value)[:100]}; allowed: a list of texts")
    try:
        return text_ids(value)
    except (ArgumentTypeError, InvalidArgumentError) as error:
        raise Refused(400, str(error)[:200]) from None


def ids_of_value(value: Any) -> torch.Tensor:
    """int64 [n] of a list of integers or texts of integers; those from 2**63 on are the ids with
    the same 64 bits."""
    if not isinstance(value, list):
        raise Refused(400, f"ids is {str(value)[:100]}; allowed: a list of {ALLOWED}")
    if all(type(one) is int for one in value):
        try:
            return torch.from_numpy(np.array(value, dtype=np.int64))
        except OverflowError:  # some are unsigned, or too large
            pass
    return torch.tensor(
        [_id(one, at) for at, one in enumerate(value)], dtype=torch.int64, device="cpu"
    )


def _id(value: Any, at: int) -> int:
    number = value
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if type(number) is not int or not LOWEST <= number <= HIGHEST:
        raise Refused(400, f"ids[{at}] is {json.dumps(value)[:100]}; allowed: {ALLOWED}")
    return number if number < 2**63 else number - 2**64


def names_of(tables: Sequence[str]) -> str:
    """For a message."""
    shown = ", ".join(repr(name) for name in tables[:20])
    return shown + (", ..." if len(tables) > 20 else "")
