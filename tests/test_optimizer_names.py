"""``EmbOptimType`` is fbgemm's class if fbgemm is installed, and is imported when it is used."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

import dynamicemb
import dynamicemb.optimizer
import dynamicemb.optimizers
from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbTableOptions

WITHOUT_FBGEMM = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fbgemm_gpu":
            raise {error}
sys.meta_path.insert(0, Block())
import pickle, torch, dynamicemb
from dynamicemb import EmbOptimType
assert dynamicemb.EmbOptimType is EmbOptimType is dynamicemb.optimizers.EmbOptimType
assert EmbOptimType.__module__ == "dynamicemb.optimizers"
assert pickle.loads(pickle.dumps(EmbOptimType.ADAM)) is EmbOptimType.ADAM
dynamicemb.DynamicEmbedding(4, optimizer=EmbOptimType.ADAM)
print([(one.name, one.value, str(one)) for one in EmbOptimType])
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_it_is_fbgemms_class_under_every_path() -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    assert dynamicemb.EmbOptimType is configs.EmbOptimType
    assert dynamicemb.optimizer.EmbOptimType is configs.EmbOptimType
    assert dynamicemb.optimizers.EmbOptimType is configs.EmbOptimType
    assert dynamicemb.optimizers.string_to_opt_type("adam") is configs.EmbOptimType.ADAM
    assert pickle.loads(pickle.dumps(dynamicemb.EmbOptimType.ADAM)) is configs.EmbOptimType.ADAM


def test_fbgemm_takes_it() -> None:
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    place = common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU
    static = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, *place)], optimizer=dynamicemb.EmbOptimType.EXACT_SGD, device=torch.device("cpu")
    )
    ours = BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(dim=4, max_capacity=128)],
        optimizer=dynamicemb.EmbOptimType.EXACT_SGD,
    )
    for module in (static, ours):
        assert module(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).shape == (2, 4)


def test_every_fbgemm_type_has_its_name_here() -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    for member in configs.EmbOptimType:
        assert dynamicemb.optimizers.optim_name(member) == member.name
        assert dynamicemb.optimizers.optim_name(member.value) == member.name


@pytest.mark.parametrize("first", ["dynamicemb", "fbgemm_gpu.split_embedding_configs"])
def test_either_may_be_imported_first(first: str) -> None:
    pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    run(f"""
import torch, {first}, dynamicemb
import fbgemm_gpu.split_embedding_configs as configs
assert dynamicemb.EmbOptimType is configs.EmbOptimType
""")


def test_importing_the_package_does_not_import_fbgemm() -> None:
    run("""
import sys, dynamicemb
dynamicemb.DynamicEmbedding(4, optimizer="adam")
assert not any(name.partition(".")[0] == "fbgemm_gpu" for name in sys.modules)
""")


def test_without_fbgemm_it_has_the_same_members() -> None:
    done = run(WITHOUT_FBGEMM.format(error="ModuleNotFoundError(name, name=name)"))
    assert done.stderr == ""
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    members = [(one.name, one.value, str(one)) for one in configs.EmbOptimType]
    assert done.stdout.strip() == str(members)


def test_an_fbgemm_that_cannot_be_imported_is_named() -> None:
    done = run(WITHOUT_FBGEMM.format(error="OSError('undefined symbol: abc')"))
    assert "fbgemm_gpu is installed and cannot be imported (undefined symbol: abc)" in done.stderr
