"""The names of collections: where a module is in the model, wrappers aside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbTableOptions,
    InvalidArgumentError,
)
from dynamicemb.errors import ArgumentTypeError
from dynamicemb.nn.discovery import find_collections, select_tables


def batched(*names: str) -> BatchedDynamicEmbeddingTables:
    options = [DynamicEmbTableOptions(dim=4, max_capacity=16) for _ in names]
    return BatchedDynamicEmbeddingTables(options, table_names=list(names))


class Collection(nn.Module):
    """Stands for a TorchRec collection: several dynamic modules under one path."""

    is_dynamic_collection = True

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.lookups = nn.ModuleList(modules)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_module = Collection(batched("user"), batched("item", "shop"))
        self.inner = nn.Sequential(nn.Linear(4, 4), DynamicEmbedding(4, name="word"))


def test_paths() -> None:
    net = Net()
    found = find_collections(net)
    assert list(found) == ["model.embedding_module", "model.inner.1"]
    assert [len(modules) for modules in found.values()] == [2, 1]
    assert list(find_collections(net.inner[1])) == ["model"]
    assert find_collections(nn.Linear(2, 2)) == {}


def test_wrappers_add_nothing() -> None:
    net = Net()
    compiled = torch.compile(net)
    assert list(find_collections(compiled)) == list(find_collections(net))

    class DistributedModelParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._dmp_wrapped_module = module

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = DistributedModelParallel(DistributedDataParallel(net))
    assert list(find_collections(wrapped)) == list(find_collections(net))


def test_a_child_called_module_is_no_wrapper() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = batched("user")

    assert list(find_collections(Holder())) == ["model.module"]


def test_a_shared_module_has_one_path() -> None:
    shared = batched("user")
    assert list(find_collections(nn.ModuleDict({"a": shared, "b": shared}))) == ["model.a"]


def test_selecting_tables() -> None:
    found = find_collections(Net())

    def names(chosen: object) -> dict[str, list[str]]:
        return {path: list(tables) for path, tables in select_tables(found, chosen).items()}  # type: ignore[arg-type]

    everything = {"model.embedding_module": ["user", "item", "shop"], "model.inner.1": ["word"]}
    assert names(None) == everything
    assert names({"model.embedding_module": ["shop"]}) == {"model.embedding_module": ["shop"]}
    assert names({"embedding_module": ["user"]}) == {"model.embedding_module": ["user"]}
    assert names(["word", "item"]) == {
        "model.embedding_module": ["item"],
        "model.inner.1": ["word"],
    }
    assert names({}) == {}
    with pytest.raises(InvalidArgumentError, match="'nobody'; allowed: model.embedding_module"):
        names({"nobody": ["user"]})
    with pytest.raises(InvalidArgumentError, match="'nobody'; allowed: user, item, shop"):
        names({"embedding_module": ["nobody"]})
    with pytest.raises(InvalidArgumentError, match="'nobody'"):
        names(["nobody"])
    with pytest.raises(ArgumentTypeError, match="table_names"):
        names("user")
    with pytest.raises(ArgumentTypeError, match="table_names"):
        names({"embedding_module": "user"})


def test_two_tables_of_one_name() -> None:
    with pytest.raises(InvalidArgumentError, match="different names"):
        select_tables(find_collections(Collection(batched("a"), batched("a"))), None)


def test_no_module() -> None:
    with pytest.raises(ArgumentTypeError, match="model is 3"):
        find_collections(3)  # type: ignore[arg-type]
