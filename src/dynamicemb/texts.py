"""The ids of texts: names, words and other values that are not numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from dynamicemb.errors import wrong_type, wrong_value


def text_id(text: str | bytes) -> int:
    """The id of a text, as text columns of ``dynamicemb train`` have it: an int of 64 bits, signed.

    It is the BLAKE2b digest of 8 bytes (RFC 7693, without key, salt and personalization) of the
    text in UTF-8, read as a little-endian, signed integer. ``bytes`` are taken as they are. Nothing
    is normalized: case, white space, leading zeros and the form of accented letters count. The
    empty text has an id as any other; a missing value has none. Of n different texts, two share an
    id with a probability of about n**2 / 2**65.
    """
    return int.from_bytes(_digest("text", text), "little", signed=True)


def text_ids(texts: Iterable[str | bytes]) -> torch.Tensor:
    """:func:`text_id` of each text: int64 [n], on the CPU."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise wrong_type("texts", texts, "texts in a list or another iterable")
    digests = bytearray()
    for n, text in enumerate(texts):
        digests += _digest("texts[%d]", text, n)
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64, copy=False))


def _digest(name: str, text: str | bytes, *place: int) -> bytes:
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError:
            raise wrong_value(name % place, text, "text that can be written in UTF-8") from None
    elif not isinstance(text, bytes):
        raise wrong_type(name % place, text, "a text, or its bytes")
    return hashlib.blake2b(text, digest_size=8).digest()
