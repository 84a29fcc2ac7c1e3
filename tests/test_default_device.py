"""torch's default device is for the caller's tensors: the library says where each of its own is.

With a GPU as default device, an address of the GPU would otherwise reach code that reads main
memory. ``meta`` stands in for it: a tensor there has no memory at all.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import dynamicemb
from dynamicemb.table.slot_map import SlotMap, SlotPolicy
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import Part, RowFormat

PACKAGE = Path(dynamicemb.__file__).parent
#: What makes a tensor on the default device, unless told where.
FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "tensor", "as_tensor"),
}


def test_every_new_tensor_names_its_device() -> None:
    unnamed = [
        f"{file.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert not unnamed, "\n".join(unnamed)


def test_slot_maps_are_in_main_memory() -> None:
    ids = torch.tensor([5, 6, 5, 7], device="cpu")
    with torch.device("meta"):
        slots = SlotMap(2, SlotPolicy.LRU)
        assert slots.map(ids[:3]).slots.tolist() == [0, 1, 0]
        assert slots.map(ids[3:]).evicted.ids.tolist() == [5]
        other = SlotMap(2, SlotPolicy.LRU)
        other.restore(slots.state())
        assert other.find(ids).tolist() == [-1, 1, -1, 0]


def test_rows_at_a_server_pass_through_main_memory() -> None:
    row_format = RowFormat((Part("weight", torch.float32, 2), Part("momentum1", torch.float32, 1)))
    ids = torch.tensor([3, 2**63 - 1, 3, 9], device="cpu")
    parts = [torch.arange(8.0, device="cpu").view(4, 2), torch.ones(4, 1, device="cpu")]
    with torch.device("meta"):
        rows = open_rows("memory://default_device", "t", row_format)
        rows.push(ids[:3], row_format.pack(parts)[:3])
        found, read = rows.pull(ids)
        assert found.tolist() == [True, True, True, False]
        weight, momentum = row_format.unpack(read[:3])
        assert torch.equal(weight, parts[0][[2, 1, 2]])
        assert torch.equal(momentum, parts[1][:3])
