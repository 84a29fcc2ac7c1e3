"""TorchRec's module library with dynamic tables as the source of embeddings: the examples of its
documentation, corrected where they do not run."""

from __future__ import annotations

import abc
import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules import (
    activation,
    crossnet,
    deepfm,
    embedding_configs,
    embedding_modules,
    embedding_tower,
    feature_processor,
    feature_processor_,
    fp_embedding_modules,
    lazy_extension,
    mc_embedding_modules,
    mc_modules,
    mlp,
    utils,
)
from torchrec.types import DataType

from dynamicemb.managed_collision import ManagedCollisionModule
from dynamicemb.unsharded import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    make_dynamic,
)

#: Every name of the documentation, by module.
NAMES = {
    activation: ["SwishLayerNorm"],
    crossnet: ["CrossNet", "LowRankCrossNet", "LowRankMixtureCrossNet", "VectorCrossNet"],
    deepfm: ["DeepFM", "FactorizationMachine"],
    embedding_configs: [
        "BaseEmbeddingConfig",
        "EmbeddingBagConfig",
        "EmbeddingConfig",
        "EmbeddingTableConfig",
        "PoolingType",
        "QuantConfig",
        "data_type_to_dtype",
        "data_type_to_sparse_type",
        "dtype_to_data_type",
        "pooling_type_to_pooling_mode",
        "pooling_type_to_str",
    ],
    embedding_modules: [
        "EmbeddingBagCollection",
        "EmbeddingBagCollectionInterface",
        "EmbeddingCollection",
        "EmbeddingCollectionInterface",
        "get_embedding_names_by_table",
        "process_pooled_embeddings",
        "reorder_inverse_indices",
    ],
    embedding_tower: ["EmbeddingTower", "EmbeddingTowerCollection"],
    feature_processor: [
        "BaseFeatureProcessor",
        "BaseGroupedFeatureProcessor",
        "PositionWeightedModule",
        "PositionWeightedProcessor",
        "position_weighted_module_update_features",
    ],
    lazy_extension: ["LazyModuleExtensionMixin", "lazy_apply"],
    mc_embedding_modules: [
        "BaseManagedCollisionEmbeddingCollection",
        "ManagedCollisionEmbeddingBagCollection",
        "ManagedCollisionEmbeddingCollection",
        "evict",
    ],
    mc_modules: [
        "DistanceLFU_EvictionPolicy",
        "LFU_EvictionPolicy",
        "LRU_EvictionPolicy",
        "MCHEvictionPolicy",
        "MCHEvictionPolicyMetadataInfo",
        "MCHManagedCollisionModule",
        "ManagedCollisionCollection",
        "ManagedCollisionModule",
        "apply_mc_method_to_jt_dict",
        "average_threshold_filter",
        "dynamic_threshold_filter",
    ],
    mlp: ["MLP", "Perceptron"],
    utils: [
        "check_module_output_dimension",
        "construct_jagged_tensors",
        "construct_modulelist_from_single_module",
        "convert_list_of_modules_to_modulelist",
        "extract_module_or_tensor_callable",
        "get_module_output_dimension",
        "init_mlp_weights_xavier_uniform",
    ],
}


def test_every_documented_name_is_there() -> None:
    missing = [
        f"{module.__name__}.{name}"
        for module, names in NAMES.items()
        for name in names
        if not hasattr(module, name)
    ]
    assert missing == []


def test_every_documented_name_is_used_by_a_test_here() -> None:
    tree = ast.parse(Path(__file__).read_text())
    tests = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for test in tests
        for node in ast.walk(test)
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    assert {name for names in NAMES.values() for name in names} - used == set()


def features(weighted: bool = False) -> KeyedJaggedTensor:
    """The batch of the documentation, with ids that only a dynamic table can hold."""
    #        0       1        2  <-- batch
    # "f1"   [0,1] None    [2]
    # "f2"   [3]    [4]    [5,6,7]
    return KeyedJaggedTensor(
        keys=["f1", "f2"],
        values=torch.tensor([0, -1, 2**62, 3, 4, 5, 6, -(2**63)]),
        offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]),
        weights=torch.ones(8) if weighted else None,
    )


def bag_tables(dims: tuple[int, int] = (3, 4), **options: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=dim, num_embeddings=10, feature_names=[f"f{i}"], **options
        )
        for i, dim in enumerate(dims, 1)
    ]


def dynamic_bags(dims: tuple[int, int] = (3, 4), **options: Any) -> DynamicEmbeddingBagCollection:
    weighted = options.pop("is_weighted", False)
    made = make_dynamic(
        EmbeddingBagCollection(tables=bag_tables(dims, **options), is_weighted=weighted)
    )
    assert isinstance(made, DynamicEmbeddingBagCollection)
    return made


def dynamic_sequences(dim: int = 3) -> DynamicEmbeddingCollection:
    made = make_dynamic(
        EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"t{i}", embedding_dim=dim, num_embeddings=10, feature_names=[f"f{i}"]
                )
                for i in (1, 2)
            ]
        )
    )
    assert isinstance(made, DynamicEmbeddingCollection)
    return made


def trains(model: nn.Module, output: Callable[[], torch.Tensor]) -> None:
    """The loss goes down over a few steps, and dynamic rows are among what was learned."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = (output() - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], losses


def as_rows(pooled: Any, dim: int) -> torch.Tensor:
    """[batch, features, dim] of a KeyedTensor whose features have one dim."""
    values: torch.Tensor = pooled.values()
    return values.reshape(len(values), -1, dim)


# ---- collections ----


def test_embedding_bag_collection() -> None:
    ebc = dynamic_bags()
    pooled = ebc(features())
    assert pooled.values().shape == (3, 7)
    assert pooled.keys() == ["f1", "f2"]
    assert pooled.offset_per_key() == [0, 3, 7]  # a list; the document shows a tensor
    assert pooled["f1"][1].eq(0).all()  # the empty bag
    assert not ebc.is_weighted()
    assert [one.name for one in ebc.embedding_bag_configs()] == ["t1", "t2"]
    assert ebc.device.type == "cpu"
    trains(ebc, lambda: ebc(features()).values()[[0, 2]])


def test_embedding_collection() -> None:
    ec = dynamic_sequences()
    embeddings = ec(features())
    assert embeddings["f2"].values().shape == (5, 3)
    assert ec.embedding_dim() == 3
    assert ec.embedding_names_by_table() == [["f1"], ["f2"]]
    assert not ec.need_indices()
    assert [one.name for one in ec.embedding_configs()] == ["t1", "t2"]
    trains(ec, lambda: ec(features())["f2"].values())


def test_interfaces_and_helpers_of_collections() -> None:
    for interface in (
        embedding_modules.EmbeddingBagCollectionInterface,
        embedding_modules.EmbeddingCollectionInterface,
    ):
        assert issubclass(interface, abc.ABC)
        wanted = {name for name in interface.__abstractmethods__ if name != "forward"}
        bags = "EmbeddingBag" in interface.__name__
        ours = DynamicEmbeddingBagCollection if bags else DynamicEmbeddingCollection
        assert all(hasattr(ours, name) for name in wanted), wanted
    tables = bag_tables()
    shared = EmbeddingBagConfig(
        name="t3", embedding_dim=3, num_embeddings=10, feature_names=["f1", "f3"]
    )
    assert embedding_modules.get_embedding_names_by_table([*tables, shared]) == [
        ["f1@t1"],
        ["f2"],
        ["f1@t3", "f3"],
    ]
    # Bags of distinct examples, spread over the batch again.
    pooled = dynamic_bags()(features())
    inverse = embedding_modules.reorder_inverse_indices(
        (["f2", "f1"], torch.tensor([[0, 1, 2, 2], [2, 2, 1, 0]])), ["f1", "f2"]
    )
    assert inverse.tolist() == [[2, 2, 1, 0], [0, 1, 2, 2]]
    spread = embedding_modules.process_pooled_embeddings([pooled["f1"], pooled["f2"]], inverse)
    assert torch.equal(spread[:, :3], pooled["f1"][[2, 2, 1, 0]])


def test_configs() -> None:
    base = embedding_configs.BaseEmbeddingConfig(num_embeddings=5, embedding_dim=4, name="t")
    assert base.get_weight_init_max() == -base.get_weight_init_min()
    with pytest.raises(TypeError, match="pruning_indices_remapping"):  # gone since the document
        embedding_configs.BaseEmbeddingConfig(
            num_embeddings=5, embedding_dim=4, pruning_indices_remapping=None
        )
    table = embedding_configs.EmbeddingTableConfig(
        num_embeddings=5, embedding_dim=4, name="t", pooling=PoolingType.MEAN, is_weighted=True
    )
    assert table.pooling is PoolingType.MEAN
    quant = embedding_configs.QuantConfig(activation=None, weight=None)
    assert quant.per_table_weight_dtype is None
    assert embedding_configs.data_type_to_dtype(DataType.FP16) is torch.float16
    assert embedding_configs.dtype_to_data_type(torch.float32) is DataType.FP32
    assert embedding_configs.data_type_to_sparse_type(DataType.FP32) is SparseType.FP32
    mode = embedding_configs.pooling_type_to_pooling_mode(PoolingType.SUM)
    assert mode is PoolingMode.SUM
    assert embedding_configs.pooling_type_to_str(PoolingType.MEAN) == "mean"
    mean = dynamic_bags(pooling=PoolingType.MEAN)
    assert mean(features()).values().shape == (3, 7)
    with pytest.raises(Exception, match="pooling"):
        EmbeddingBagCollection(tables=bag_tables(pooling=PoolingType.NONE))(features())


# ---- interactions on dynamic embeddings ----


class OnBags(nn.Module):
    """Dynamic bags, then ``over`` on what they give."""

    def __init__(self, dims: tuple[int, int], over: nn.Module, prepare: Any) -> None:
        super().__init__()
        self.bags = dynamic_bags(dims)
        self.over = over
        self.prepare = prepare

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.over(self.prepare(self.bags(features())))
        return out


def test_deepfm_and_factorization_machine() -> None:
    deep = deepfm.DeepFM(dense_module=nn.Linear(16, 5))
    model = OnBags((8, 8), deep, lambda pooled: [as_rows(pooled, 8)])
    assert model().shape == (3, 5)
    trains(model, model)
    machine = OnBags((8, 8), deepfm.FactorizationMachine(), lambda pooled: [as_rows(pooled, 8)])
    assert machine().shape == (3, 1)
    trains(machine, machine)
    # As written: embeddings of several dims at once.
    several = [torch.randn(3, 2, 64), torch.randn(3, 2, 32)]
    assert deepfm.DeepFM(dense_module=nn.Linear(192, 30))(embeddings=several).shape == (3, 30)
    assert deepfm.FactorizationMachine()(embeddings=several).shape == (3, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: crossnet.CrossNet(in_features=7, num_layers=2),
        lambda: crossnet.LowRankCrossNet(in_features=7, num_layers=2, low_rank=3),
        lambda: crossnet.VectorCrossNet(in_features=7, num_layers=2),
        lambda: crossnet.LowRankMixtureCrossNet(
            in_features=7, num_layers=2, num_experts=4, low_rank=3
        ),
    ],
)
def test_crossnets(make: Callable[[], nn.Module]) -> None:
    model = OnBags((3, 4), make(), lambda pooled: pooled.values())
    assert model().shape == (3, 7)
    trains(model, model)


def test_the_documents_crossnets_lack_in_features() -> None:
    with pytest.raises(TypeError, match="in_features"):
        crossnet.CrossNet(num_layers=2)


def test_mlp_perceptron_and_swish() -> None:
    over = nn.Sequential(
        mlp.Perceptron(7, 16, bias=True), activation.SwishLayerNorm(16), mlp.MLP(16, [8, 4])
    )
    model = OnBags((3, 4), over, lambda pooled: pooled.values())
    output = model()
    assert list(output.shape) == [3, 4]  # the document compares list(output)
    trains(model, model)
    assert activation.SwishLayerNorm([4, 5])(torch.randn(2, 3, 4, 5)).shape == (2, 3, 4, 5)


def test_utils() -> None:
    linear = nn.Linear(7, 4)
    assert utils.get_module_output_dimension(linear, 7) == 4
    assert utils.check_module_output_dimension(linear, 7, 4)
    assert not utils.check_module_output_dimension(linear, 7, 5)
    assert utils.extract_module_or_tensor_callable(torch.relu) is torch.relu
    assert isinstance(utils.extract_module_or_tensor_callable(nn.ReLU), nn.ReLU)
    utils.init_mlp_weights_xavier_uniform(linear)
    assert linear.bias.eq(0).all()
    nested = utils.construct_modulelist_from_single_module(linear, (2, 3))
    assert (len(nested), len(nested[0])) == (2, 3)
    listed = utils.convert_list_of_modules_to_modulelist([nn.Linear(7, 4) for _ in range(2)], (2,))
    model = OnBags((3, 4), listed[0], lambda pooled: pooled.values())
    assert model().shape == (3, 4)
    # Flat rows of a dynamic table as jagged tensors.
    ec = dynamic_sequences()
    rows = torch.cat([one.values() for one in ec(features()).values()])
    jagged = utils.construct_jagged_tensors(rows, features(), ["f1", "f2"])
    assert jagged["f2"].lengths().tolist() == [1, 1, 3]
    assert torch.equal(jagged["f1"].values(), ec(features())["f1"].values())


# ---- feature processors ----


def test_position_weighted_modules_before_dynamic_bags() -> None:
    torch.manual_seed(0)
    ebc = dynamic_bags(is_weighted=True)
    weigh = feature_processor.PositionWeightedModule(max_feature_lengths={"f1": 10, "f2": 10})
    assert isinstance(weigh, feature_processor.BaseFeatureProcessor)

    def forward() -> torch.Tensor:
        weighted = weigh(features().to_dict())
        return ebc(KeyedJaggedTensor.from_jt_dict(weighted)).values()[[0, 2]]

    both = nn.ModuleList([ebc, weigh])
    trains(both, forward)
    learned = weigh.position_weights["f2"].detach()
    assert (learned[:3] != 1.0).all()  # positions that occur
    assert (learned[3:] == 1.0).all()
    features_dict = features().to_dict()
    updated = feature_processor.position_weighted_module_update_features(
        features_dict, {"f1": features_dict["f2"]}
    )
    assert torch.equal(updated["f1"].values(), features_dict["f2"].values())


def test_position_weighted_processor_before_dynamic_bags() -> None:
    ebc = dynamic_bags(is_weighted=True)
    processor = feature_processor.PositionWeightedProcessor({"f1": 10, "f2": 10})
    assert isinstance(processor, feature_processor.BaseGroupedFeatureProcessor)
    weighted = processor(features())
    assert weighted.weights().tolist() == [1.0] * 8
    assert {"f1", "f2"} <= {name.rpartition(".")[2] for name in processor.state_dict()}
    assert list(processor.named_buffers()) == []
    plain = dynamic_bags(is_weighted=True)
    trains(nn.ModuleList([ebc, processor]), lambda: ebc(processor(features())).values()[[0, 2]])
    assert plain(features(weighted=True)).values().shape == (3, 7)


@pytest.mark.parametrize("together", [False, True])
def test_feature_processed_collection_becomes_dynamic(together: bool) -> None:
    """What the document's example of the processor means to show, in today's names."""
    lengths = {"f1": 10, "f2": 10}
    processors: Any = {
        key: feature_processor_.PositionWeightedModule(max_feature_length=length)
        for key, length in lengths.items()
    }
    if together:
        processors = feature_processor_.PositionWeightedModuleCollection(lengths)
    static = fp_embedding_modules.FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=bag_tables(), is_weighted=True), processors
    )
    small = KeyedJaggedTensor(
        keys=["f1", "f2"],
        values=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]),
        offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]),
    )
    expected = static(small)
    model = nn.ModuleDict({"fp": static})
    make_dynamic(model, keep_rows=True)
    assert isinstance(model["fp"]._embedding_bag_collection, DynamicEmbeddingBagCollection)
    assert model["fp"].is_weighted()
    got = model["fp"](small)
    for key in ("f1", "f2"):
        assert torch.allclose(got[key], expected[key], atol=1e-6)
    trains(model, lambda: model["fp"](features()).values()[[0, 2]])
    weights = [one for name, one in model.named_parameters() if "position_weight" in name]
    assert weights
    assert all((one[:1] != 1.0).all() for one in weights)


# ---- lazy modules ----


@torch.no_grad()
def fill_with_ones(module: nn.Module) -> None:
    if type(module) is nn.Linear:  # a LazyLinear is one after its first forward
        module.weight.fill_(1.0)


def test_lazy_apply_over_dynamic_bags() -> None:
    linear = nn.LazyLinear(2)
    lazy_extension.lazy_apply(linear, fill_with_ones)
    model = OnBags((3, 4), linear, lambda pooled: pooled.values())
    assert model().shape == (3, 2)
    assert linear.weight.eq(1.0).all()
    linear.weight.data.zero_()
    model()  # only once
    assert linear.weight.eq(0.0).all()
    both = nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(2))
    lazy_extension.lazy_apply(both, fill_with_ones)
    both(torch.randn(2, 10))
    assert all(one.weight.eq(1.0).all() for one in both)


def test_lazy_module_extension() -> None:
    class Lazy(lazy_extension.LazyModuleExtensionMixin, nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.UninitializedParameter()

        def initialize_parameters(self, rows: torch.Tensor, *, scale: float = 1.0) -> None:
            if self.has_uninitialized_params():
                self.weight.materialize(rows.shape[1])
                nn.init.constant_(self.weight, scale)

        def forward(self, rows: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return rows * self.weight

    ebc, lazy = dynamic_bags(), Lazy()
    with pytest.raises(RuntimeError, match="initialized"):  # apply before the first forward
        lazy.apply(fill_with_ones)
    out = lazy(ebc(features()).values(), scale=2.0)
    assert torch.equal(out, 2.0 * ebc(features()).values())
    lazy.apply(fill_with_ones)


# ---- towers ----


class Interaction(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, 2)

    def forward(self, embeddings: Any) -> torch.Tensor:
        if isinstance(embeddings, dict):
            dense = [one.to_padded_dense(3).flatten(1) for one in embeddings.values()]
            out: torch.Tensor = self.linear(torch.cat(dense, dim=1))
            return out
        out = self.linear(embeddings.values())
        return out


def test_towers_become_dynamic() -> None:
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=f"s{i}", embedding_dim=3, num_embeddings=10, feature_names=[f"f{i}"]
            )
            for i in (1, 2)
        ]
    )
    towers = embedding_tower.EmbeddingTowerCollection(
        [
            embedding_tower.EmbeddingTower(
                EmbeddingBagCollection(tables=bag_tables()), Interaction(7)
            ),
            embedding_tower.EmbeddingTower(sequences, Interaction(18)),
        ]
    )
    make_dynamic(towers)
    assert isinstance(towers.towers[0].embedding, DynamicEmbeddingBagCollection)
    assert isinstance(towers.towers[1].embedding, DynamicEmbeddingCollection)
    assert towers(features()).shape == (3, 4)
    trains(towers, lambda: towers(features()))


# ---- managed collision: our module where the document has TorchRec's ----


def test_managed_collision_modules() -> None:
    cpu = torch.device("cpu")
    module = ManagedCollisionModule(8, cpu, mc_modules.LFU_EvictionPolicy())
    assert isinstance(module, mc_modules.ManagedCollisionModule)
    jagged = {"t1": JaggedTensor(values=torch.tensor([9, 9, 4]), lengths=torch.tensor([3]))}
    assert mc_modules.apply_mc_method_to_jt_dict(module, "preprocess", jagged) is jagged
    assert module(jagged)["t1"].values().tolist() == [0, 0, 1]
    # The document's module: it goes on with our state.
    theirs = mc_modules.MCHManagedCollisionModule(
        zch_size=8, device=cpu, eviction_policy=mc_modules.LFU_EvictionPolicy(), eviction_interval=1
    )
    theirs.load_state_dict(module.state_dict())
    assert theirs.eval()(jagged)["t1"].values().tolist() == [0, 0, 1]
    for policy in (
        mc_modules.LFU_EvictionPolicy(),
        mc_modules.LRU_EvictionPolicy(),
        mc_modules.DistanceLFU_EvictionPolicy(decay_exponent=2.0),
    ):
        assert isinstance(policy, mc_modules.MCHEvictionPolicy)
        assert all(
            isinstance(one, mc_modules.MCHEvictionPolicyMetadataInfo)
            for one in policy.metadata_info
        )
        assert ManagedCollisionModule(8, cpu, policy).output_size() == 8
    mask, _ = mc_modules.average_threshold_filter(torch.tensor([1, 1, 4]))
    assert mask.tolist() == [False, False, True]
    mask, _ = mc_modules.dynamic_threshold_filter(
        torch.tensor([1, 1, 4]), threshold_skew_multiplier=1.0
    )
    assert mask.tolist() == [False, False, True]


@pytest.mark.parametrize("bags", [False, True])
def test_managed_collision_collections(bags: bool) -> None:
    kind: Any = EmbeddingBagConfig if bags else EmbeddingConfig
    configs = [
        kind(name=f"t{i}", embedding_dim=3, num_embeddings=10, feature_names=[f"f{i}"])
        for i in (1, 2)
    ]
    cpu = torch.device("cpu")
    managed = mc_modules.ManagedCollisionCollection(
        {one.name: ManagedCollisionModule(10, cpu) for one in configs}, configs
    )
    assert managed.embedding_configs() == configs
    model: Any
    if bags:
        model = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=configs), managed, return_remapped_features=True
        )
    else:
        model = mc_embedding_modules.ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=configs), managed, return_remapped_features=True
        )
    assert isinstance(model, mc_embedding_modules.BaseManagedCollisionEmbeddingCollection)
    _, remapped = model(features())
    assert remapped.values().tolist() == [0, 1, 2, 0, 1, 2, 3, 4]

    def output() -> torch.Tensor:
        out, _ = model(features())
        values: torch.Tensor = out.values()[[0, 2]] if bags else out["f2"].values()
        return values

    trains(model, output)
    assert mc_embedding_modules.evict(managed.evict(), model._embedding_module) is None
