"""Managed collision under DistributedModelParallel on a GPU.

Where fbgemm-gpu-cpu is all there is of FBGEMM, tests/fbgemm_on_cuda.py stands in for its kernels.
"""

from __future__ import annotations

import pytest
import torch
from test_managed_collision_sharded import rows, sharded, step, train
from torchrec.modules.mc_modules import LFU_EvictionPolicy

from fbgemm_on_cuda import only_on_a_gpu

pytestmark = only_on_a_gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("bags", [False, True])
def test_ids_have_slots_of_their_own_and_rows_start_anew(bags: bool) -> None:
    slots, trained, shared, unknown = train(0, 1, bags=bags, zch_size=8, device=DEVICE)
    assert len(set(slots[: len(slots) // 2])) == len(slots) // 2
    assert trained
    assert set(shared) == {7}
    assert unknown == [[1.0] * 4]


@pytest.mark.parametrize("bags", [False, True])
def test_state_dict_round_trip(bags: bool) -> None:
    ids = [10, -20, 2**62, 40]
    model = sharded(bags, 32, 1, LFU_EvictionPolicy(), DEVICE)
    step(model, *ids, *ids)
    trained, slots = rows(model, *ids)
    other = sharded(bags, 32, 1, LFU_EvictionPolicy(), DEVICE)
    step(other, 500, 501)
    other.load_state_dict(model.state_dict())
    other.eval()
    loaded, found = rows(other, *ids)
    assert slots == found
    assert torch.equal(loaded, trained)
