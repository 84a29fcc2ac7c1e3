"""``dynamicemb.initializer``: objects that fill a buffer as a table would start its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbTableOptions
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.initializer import (
    BaseDynamicEmbInitializer,
    ConstantInitializer,
    DebugInitializer,
    NormalInitializer,
    TruncatedNormalInitializer,
    UniformInitializer,
    create_initializer_from_args,
)
from dynamicemb.table import create_table

MODE = DynamicEmbInitializerMode
CLASSES = {
    MODE.NORMAL: NormalInitializer,
    MODE.TRUNCATED_NORMAL: TruncatedNormalInitializer,
    MODE.UNIFORM: UniformInitializer,
    MODE.CONSTANT: ConstantInitializer,
    MODE.DEBUG: DebugInitializer,
}
IDS = torch.tensor([7, -1, 2**63 - 1, 123_456], device="cpu")


@pytest.mark.parametrize("mode", MODE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_those_of_a_table_with_the_seed(
    mode: DynamicEmbInitializerMode, dtype: torch.dtype
) -> None:
    args = DynamicEmbInitializerArgs(mode, mean=0.5, std_dev=2.0, lower=-1.0, upper=3.0, value=1.5)
    made = create_initializer_from_args(args, seed=9)
    assert type(made) is CLASSES[mode]
    buffer = torch.full((6, 5), -7.0, dtype=dtype, device="cpu")
    made(buffer, torch.tensor([4, 0, 5, 2], device="cpu"), IDS)
    options = DynamicEmbTableOptions(
        dim=5, max_capacity=128, embedding_dtype=dtype, initializer_args=args
    )
    expected = create_table(options, seed=9, device="cpu").initial_rows(IDS)
    assert torch.equal(buffer[[4, 0, 5, 2]], expected)
    assert (buffer[[1, 3]] == -7.0).all()


def test_the_class_is_the_mode_and_bounds_are_completed() -> None:
    args = DynamicEmbInitializerArgs(MODE.NORMAL)
    rows = torch.zeros(100, 8, device="cpu")
    UniformInitializer(args, seed=1)(rows, torch.arange(100, device="cpu"))
    assert rows.min() >= 0.0
    assert rows.max() < 1.0
    assert args == DynamicEmbInitializerArgs(MODE.NORMAL)
    assert args.lower is None  # not filled in


def test_debug_rows_show_their_ids_and_places_stand_for_ids() -> None:
    rows = torch.zeros(3, 2, device="cpu")
    DebugInitializer(DynamicEmbInitializerArgs())(
        rows, torch.tensor([1], device="cpu"), torch.tensor([300_005], device="cpu")
    )
    assert rows.tolist() == [[0, 0], [5, 5], [0, 0]]
    DebugInitializer(DynamicEmbInitializerArgs())(rows, torch.tensor([2], device="cpu"))
    assert rows[2].tolist() == [2, 2]


def test_torch_manual_seed_governs_the_default_seed() -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        rows = torch.zeros(4, 3, requires_grad=True, device="cpu")
        made = UniformInitializer(DynamicEmbInitializerArgs())
        made(rows, torch.arange(4, device="cpu"))
        half = torch.zeros(4, 3, dtype=torch.bfloat16, device="cpu")
        made(half, torch.arange(4, device="cpu"))
        assert torch.equal(half, rows.detach().to(torch.bfloat16))  # one seed for all buffers
        return rows.detach()

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


def test_no_rows_are_nothing_to_do() -> None:
    rows = torch.ones(2, 2, device="cpu")
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    ConstantInitializer(DynamicEmbInitializerArgs())(rows, none, none)
    assert rows.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("buffer", "indices", "keys", "error", "message"),
    [
        (torch.zeros(3), [0], [1], ArgumentTypeError, "buffer"),
        (torch.zeros(3, 0), [0], [1], ArgumentTypeError, "buffer"),
        (torch.zeros(3, 2, dtype=torch.int64), [0], [1], (TypeError, ValueError), "dtype"),
        (torch.zeros(3, 2), [3], [1], InvalidArgumentError, "indices is 3.*0 to 2"),
        (torch.zeros(3, 2), [-1], [1], InvalidArgumentError, "indices is -1"),
        (torch.zeros(3, 2), [0, 1], [1], InvalidArgumentError, r"len\(keys\) is 1.*2"),
        (torch.zeros(3, 2), [0.5], [1], TypeError, "indices"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(
    buffer: torch.Tensor, indices: list[Any], keys: list[int], error: Any, message: str
) -> None:
    before = buffer.clone()
    made = ConstantInitializer(DynamicEmbInitializerArgs(value=5.0))
    with pytest.raises(error, match=message):
        made(buffer, torch.tensor(indices), torch.tensor(keys))
    assert torch.equal(buffer, before)


def test_what_is_no_initializer_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="args"):
        create_initializer_from_args("uniform")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="args"):
        NormalInitializer(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="subclasses"):
        BaseDynamicEmbInitializer(DynamicEmbInitializerArgs())
    args = DynamicEmbInitializerArgs()
    object.__setattr__(args, "mode", "sideways")
    with pytest.raises(ValueError, match="sideways"):
        create_initializer_from_args(args)
