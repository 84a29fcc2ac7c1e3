"""Lookups as they come over HTTP: ids in JSON, in an address or as bytes, and rows in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch

from dynamicemb.checkpoint.http_table import unpack_ids
from dynamicemb.cli.http import BYTES, JSON, JsonText, Refused, Request

LOWEST, HIGHEST = -(2**63), 2**64 - 1
ALLOWED = f"integers from {LOWEST} to {HIGHEST}, as numbers or as text"
_INTEGER = re.compile(r"-?[0-9]{1,20}")


def ids_of(request: Request, max_ids: int) -> tuple[torch.Tensor, str]:
    """The ids of a request, int64 [n], and the type of answer that it wants: what it accepts, or
    else the type of its body."""
    if request.method != "POST":
        ids, kind = ids_of_query(request.query), JSON
    else:
        kind = media_type(request.headers.get("content-type", JSON))
        if kind == BYTES:
            if len(request.body) % 8:
                raise Refused(
                    400, f"the body has {len(request.body)} bytes; allowed: 8 for each id"
                )
            ids = unpack_ids(request.body)
        elif kind in (JSON, "application/x-www-form-urlencoded"):  # curl -d says the second
            ids, kind = ids_of_value(member(json_body(request.body), "ids")), JSON
        else:
            raise Refused(415, f"Content-Type is {kind!r}; allowed: {JSON}, {BYTES}")
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


def ids_of_query(query: str) -> torch.Tensor:
    """``ids=1,2,3``; names that come twice follow each other."""
    texts: list[str] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "ids":
            raise Refused(400, f"{name!r} is in the address; allowed: ids=1,2,3")
        texts.extend(value.split(",") if value else ())
    if not query:
        raise Refused(400, "there are no ids; allowed: ?ids=1,2,3, or a POST")
    return ids_of_value(texts)


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


def numbers(rows: torch.Tensor) -> JsonText:
    """Rows as JSON. Nine digits give back the same float32, and take a third of the time of those
    that ``json`` writes. Infinity and NaN, which JSON does not have, are null."""
    n, dim = rows.shape
    row = "[" + ", ".join(["%.9g"] * dim) + "]"
    text = "[" + ", ".join([row] * n) % tuple(rows.float().flatten().tolist()) + "]"
    if not bool(torch.isfinite(rows).all()):
        text = re.sub(r"-?(?:inf|nan)", "null", text)
    return JsonText(text)


def names_of(tables: Sequence[str]) -> str:
    """For a message."""
    shown = ", ".join(repr(name) for name in tables[:20])
    return shown + (", ..." if len(tables) > 20 else "")
