"""The ids of texts: the recipe, which files and servers of others may use, and what has no id."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import text_id, text_ids
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "digest"),  # as `printf 157 | b2sum -l 64` prints it
    [
        ("157", "e670143d0274784c"),
        ("", "e4a6a0577479b2b4"),
        ("é", "cb1abf8beff3192f"),
        ("a b", "bb37dea5c027f928"),
    ],
)
def test_an_id_is_the_digest_that_b2sum_prints(text: str, digest: str) -> None:
    expected = int.from_bytes(bytes.fromhex(digest), "little", signed=True)
    assert text_id(text) == expected
    assert text_id(text.encode()) == expected
    assert text_ids([text]).tolist() == [expected]


def test_an_id_is_known_for_good() -> None:
    assert text_id("157") == 5510281697051308262
    assert text_id("") == -5426141060434712860


def test_nothing_is_normalized() -> None:
    texts = ["7", "07", " 7", "7 ", "a", "A", "é", "e\u0301", "", "\0", b"\xff"]
    assert len(text_ids(texts).unique()) == len(texts)


def test_many_texts_have_the_ids_of_each() -> None:
    texts = [f"user-{n}" for n in range(1000)]
    ids = text_ids(texts)
    assert (ids.dtype, ids.shape, ids.device.type) == (torch.int64, (1000,), "cpu")
    assert ids.tolist() == [text_id(one) for one in texts]
    digests = b"".join(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in texts)
    assert ids.tolist() == np.frombuffer(digests, "<i8").tolist()
    assert torch.equal(text_ids(iter(texts)), ids)
    assert torch.equal(text_ids(np.array(texts)), ids)
    assert text_ids([]).shape == (0,)
    assert torch.equal(text_ids(texts[:2]).add_(1), ids[:2] + 1)  # memory of its own


@pytest.mark.parametrize("wrong", [157, None, 1.5, bytearray(b"a"), ["a"]])
def test_what_is_no_text_is_named_with_its_place(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^text is .*allowed: a text"):
        text_id(wrong)
    with pytest.raises(ArgumentTypeError, match=r"^texts\[1\] is "):
        text_ids(["a", wrong])


def test_a_text_alone_is_not_taken_for_its_letters() -> None:
    for alone in ("abc", b"abc", 5):
        with pytest.raises(ArgumentTypeError, match="texts is"):
            text_ids(alone)  # type: ignore[arg-type]


def test_a_text_that_utf8_cannot_write_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        text_id("\ud800")
