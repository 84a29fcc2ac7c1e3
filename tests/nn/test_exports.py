"""What leaves the process with a model's graph has no rows: exports are refused when they are made,
and a graph that stays is never another module's."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import table_options
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    UsageError,
)
from dynamicemb.one_embedding import MultiTableEmbedding, make_device_mem_store_options
from dynamicemb.table import create_table
from dynamicemb.table.slot_map import SlotMap

IDS = torch.arange(6)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = DynamicEmbedding(4, seed=1)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids))


class Bags(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows = DynamicEmbeddingBag(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids.view(2, 3)))


class Batched(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows = BatchedDynamicEmbeddingTables([table_options(2), table_options(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids, torch.tensor([0, 2, 6])))


class OneEmbedding(Rows):
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        store = make_device_mem_store_options(persistent_path=str(self.folder), capacity=100)
        self.rows = MultiTableEmbedding(str(self.folder), 4, torch.float, torch.int64, None, store)


class Collection(Rows):
    def __init__(self) -> None:
        super().__init__()
        torchrec = pytest.importorskip("torchrec")
        from dynamicemb.unsharded import make_dynamic

        self.make = torchrec.KeyedJaggedTensor.from_lengths_sync
        config = torchrec.EmbeddingBagConfig(
            num_embeddings=64, embedding_dim=4, name="t", feature_names=["f"]
        )
        collection = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
        self.rows = make_dynamic(collection)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        features = self.make(keys=["f"], values=ids, lengths=torch.tensor([2, 4]))
        return self.head(self.rows(features).values())


MODELS = [Rows, Bags, Batched, OneEmbedding, Collection]


def aot_inductor(model: nn.Module) -> Any:
    return torch._inductor.aoti_compile_and_package(torch.export.export(model, (IDS,)))


EXPORTS: dict[str, Any] = {
    "export": lambda model: torch.export.export(model, (IDS,), strict=False),
    "strict export": lambda model: torch.export.export(model, (IDS,), strict=True),
    "draft export": lambda model: torch.export.draft_export(model, (IDS,)),
    "AOTInductor": aot_inductor,
    "dynamo's export": lambda model: torch._dynamo.export(model)(IDS),
    "trace": lambda model: torch.jit.trace(model, (IDS,)),
    "trace unchecked": lambda model: torch.jit.trace(model, (IDS,), check_trace=False),
    "trace_module": lambda model: torch.jit.trace_module(model, {"forward": (IDS,)}),
    "script": torch.jit.script,
    "make_fx": lambda model: make_fx(model)(IDS),
    "make_fx before dispatch": lambda model: make_fx(model, pre_dispatch=True)(IDS),
    "make_fx with fakes": lambda model: make_fx(model, tracing_mode="symbolic")(IDS),
    "symbolic_trace": torch.fx.symbolic_trace,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("kind", MODELS)
def test_an_export_is_refused_when_it_is_made(
    kind: type[Rows], name: str, training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneEmbedding, "folder", tmp_path, raising=False)
    model = kind()
    model(IDS)
    model.train(training)
    # Dynamo puts an exception of its own around the module's.
    with pytest.raises(RuntimeError, match="ServingTable"):
        EXPORTS[name](model)


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda model: torch.vmap(model)(IDS.view(1, 6)),
    "vmap of the rest": lambda model: torch.vmap(lambda w: (model(IDS) * w).sum())(torch.ones(3)),
    "functionalize": lambda model: torch.func.functionalize(model)(IDS),
    "grad": lambda model: torch.func.grad(lambda w: (model(IDS) * w).sum())(torch.ones(1)),
    "jacrev": lambda model: torch.func.jacrev(lambda w: (model(IDS) * w).sum())(torch.ones(1)),
    "jvp": lambda model: torch.func.jvp(
        lambda w: model(IDS) * w, (torch.ones(1),), (torch.ones(1),)
    ),
    "a functional tensor": lambda model: model(torch._to_functional_tensor(IDS)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", [Rows, Bags, Batched])
def test_a_transform_of_functions_is_refused(kind: type[Rows], name: str, training: bool) -> None:
    """Inside one, tensors have no memory that the engine could read."""
    model = kind()
    model(IDS)
    model.train(training)
    with pytest.raises(UsageError, match=r"cannot record the lookup.*ServingTable"):
        TRANSFORMS[name](model)
    assert model(IDS).shape[1] == 1


def test_a_table_refuses_functional_tensors() -> None:
    for call in (create_table(table_options()).find_or_insert, SlotMap(9).map):
        with pytest.raises(UsageError, match="functionalization"):
            call(torch._to_functional_tensor(IDS))
        with pytest.raises(UsageError, match="Functionalize"):
            torch.func.functionalize(call)(IDS)


def test_an_onnx_export_by_tracing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.jit\.trace cannot record"):
        torch.onnx.export(Rows().eval(), (IDS,), str(tmp_path / "model.onnx"), dynamo=False)


def test_a_graph_with_the_module_as_a_leaf_has_the_module_itself() -> None:
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, DynamicEmbedding) or super().is_leaf_module(module, name)

    model = Rows()
    expected = model(IDS)
    graph = torch.fx.GraphModule(model, Leaves().trace(model))
    assert torch.equal(graph(IDS), expected)
    copied = pickle.loads(pickle.dumps(model))
    model.rows.table.clear()
    assert torch.equal(copied(IDS), expected)


def test_tensors_without_memory_are_refused() -> None:
    """Reading at their address would end the process."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return wrapper()

    def wrapper() -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(
            Wrapper, (6,), dtype=torch.int64, device=torch.get_default_device()
        )

    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(IDS)
    modules = [DynamicEmbedding(4), DynamicEmbedding(4).eval()]
    for call in (*modules, create_table(table_options()).find_or_insert, SlotMap(9).map):
        for ids in (wrapper(), fake):
            with pytest.raises(TypeError, match="a tensor with memory of its own"):
                call(ids)
        with mode, pytest.raises(UsageError, match="FakeTensorMode cannot record"):
            call(IDS)
    assert all(len(module.table) == 0 for module in modules)


# ---- graphs that stay ----


def test_copies_have_keys_of_their_own() -> None:
    module = DynamicEmbedding(4)
    keys = [
        bytes(one._key.tolist())
        for one in (
            module,
            DynamicEmbedding(4),
            copy.copy(module),
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
        )
    ]
    assert len(set(keys)) == 5
    assert all(len(key) == 16 for key in keys)


def test_the_key_of_a_module_that_is_gone_or_was_elsewhere_means_no_other() -> None:
    module = DynamicEmbedding(4)
    call = torch.ops.dynamicemb.lookup
    handle, key = module.handle, module._key
    expected = module(IDS).detach()
    out, _ = call(handle, key, IDS, None, None, 0, 4, torch.float32, True)
    assert torch.equal(out, expected)
    del module, out
    gc.collect()
    others = [DynamicEmbedding(4) for _ in range(50)]
    for one in (key, torch.zeros(16, dtype=torch.uint8)):
        with pytest.raises(UsageError, match="not in this process"):
            call(handle, one, IDS, None, None, 0, 4, torch.float32, True)
    assert all(len(one.table) == 0 for one in others)


COMPILED = """
import sys, torch
from dynamicemb import DynamicEmbedding
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.rows = DynamicEmbedding(4, seed=seed)
    def forward(self, ids):
        return self.rows(ids)

number = int(sys.argv[1])
models = [Model(100 + i) for i in range(number)] + [Model(7 + number)]
ids = torch.arange(6)
for model in models:
    model(ids)
last = models[-1]
before = [model.rows.table.find(ids).embeddings.clone() for model in models]
torch.compile(last, fullgraph=True)(ids).sum().backward()
torch.optim.SGD(last.parameters(), lr=1.0).step()
after = [model.rows.table.find(ids).embeddings for model in models]
moved = [not torch.equal(a, b) for a, b in zip(before, after)]
assert moved == [False] * number + [True], moved
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_graph_from_the_cache_of_another_process_reads_this_ones_rows(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = []
    for others in ("0", "2"):
        out = subprocess.run(
            [sys.executable, "-c", COMPILED, others],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert out.returncode == 0, out.stderr[-3000:]
        hits.append(int(out.stdout))
    assert hits == [0, 1]  # the graph is the same in every process
