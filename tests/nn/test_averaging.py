"""Moving averages of models: torch's AveragedModel averages rows as it averages weights, and what
writes averages of its own into parameters is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import bag_pair, embedding_pair, rows_of, table_options, wild
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbDump,
    DynamicEmbedding,
    DynamicEmbLoad,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    UsageError,
)
from dynamicemb.dcp import DynamicTables
from dynamicemb.dump_load import get_dynamic_emb_module
from dynamicemb.exchange import export_table
from dynamicemb.incremental_dump import apply_delta, dump_delta, incremental_dump

ROWS, DIM = 40, 7
IDS = torch.arange(6)

WAYS: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "swa one by one": {"avg_fn": get_swa_avg_fn()},
    "swa together": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema together": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.7), "use_buffers": True},
    "a function of mine": {"avg_fn": lambda old, new, count: torch.maximum(old, new) / (count + 1)},
}


class Model(nn.Module):
    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = rows
        self.head = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.head(self.rows(*inputs))


def train(model: Model, inputs: tuple[Any, ...], target: torch.Tensor, optimizer: Any) -> None:
    optimizer.zero_grad()
    (model(*inputs).squeeze(-1) - target).square().sum().backward()
    optimizer.step()


KINDS: dict[str, Callable[[], tuple[Any, nn.Module]]] = {
    "torch's optimizer": lambda: embedding_pair(ROWS, DIM),
    "fused": lambda: embedding_pair(ROWS, DIM, optimizer="sgd"),
    "bags": lambda: bag_pair(ROWS, DIM),
    "in a cache": lambda: embedding_pair(
        ROWS,
        DIM,
        options=table_options(DIM, caching=True, local_hbm_for_values=16 * 200, bucket_capacity=16),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_averaged_as_those_of_torchs_modules(kind: str, way: str) -> None:
    """With SGD both train to the same bits, so the averages have the same bits too."""
    ours, dense = KINDS[kind]()
    models = [Model(ours), Model(dense)]
    if ours.fused:
        ours.set_learning_rate(0.1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    averages = [AveragedModel(model, **WAYS[way]) for model in models]
    for _ in range(6):
        places, target = torch.randperm(ROWS)[:24], torch.randn(24)
        offsets = () if kind != "bags" else (torch.arange(24),)
        for model, optimizer, ids in zip(models, optimizers, (wild(places), places), strict=True):
            train(model, (ids, *offsets), target, optimizer)
        for average, model in zip(averages, models, strict=True):
            average.update_parameters(model)
    averaged = rows_of(averages[0].module.rows, ROWS)
    assert torch.equal(averaged, averages[1].module.rows.weight)
    assert not torch.equal(averaged, rows_of(ours, ROWS))
    assert torch.equal(rows_of(ours, ROWS), dense.weight)  # as it was
    for mine, theirs in zip(
        averages[0].module.head.parameters(), averages[1].module.head.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_averaged_as_weights_of_16_bits(dtype: torch.dtype) -> None:
    module, dense = DynamicEmbedding(4, dtype=dtype), nn.Embedding(ROWS, 4, dtype=dtype)
    averages = []
    weights = torch.randn(5, ROWS, 4).to(dtype)
    for one in (module, dense):
        average = AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for weight in weights:
            if one is module:
                module.table.insert(torch.arange(ROWS), weight)
            else:
                dense.weight.data.copy_(weight)
            average.update_parameters(one)
        averages.append(average.module)
    found = averages[0].table.find(torch.arange(ROWS)).embeddings
    assert torch.equal(found, averages[1].weight)


def tables_of_two() -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(
        [
            table_options(3, score_strategy=DynamicEmbScoreStrategy.LFU),
            table_options(
                3, max_capacity=64, bucket_capacity=16, score_strategy=DynamicEmbScoreStrategy.STEP
            ),
        ],
        table_names=["calm", "busy"],
        pooling_mode=DynamicEmbPoolingMode.NONE,
        learning_rate=0.1,
        seed=1,
    )


@pytest.mark.parametrize("way", ["equal weights", "ema one by one", "ema together"])
def test_rows_that_come_and_go(way: str) -> None:
    """A row begins with the model's when its id is new, and goes when the model's goes."""
    module = tables_of_two()
    average = AveragedModel(module, **WAYS[way])
    expected: list[dict[int, torch.Tensor]] = [{}, {}]
    for step in range(25):
        ids = torch.cat([torch.randint(0, 60, (20,)), torch.randint(0, 400, (20,))])
        out = module(ids, torch.tensor([0, 20, 40]))
        out.backward(torch.randn(out.shape))
        average.update_parameters(module)
        for table, known in zip(module.tables, expected, strict=True):
            now: dict[int, torch.Tensor] = {}
            for rows in table.export():
                now |= dict(zip(rows.ids.tolist(), rows.embeddings.cpu(), strict=True))
            for id_ in [*known]:
                if id_ not in now:
                    del known[id_]
            for id_, row in now.items():
                if id_ not in known:
                    known[id_] = row.clone()
                elif way == "equal weights":
                    known[id_] = known[id_] + (row - known[id_]) / (step + 1)
                else:
                    known[id_] = 0.9 * known[id_] + 0.1 * row
    assert module.tables[1].stats().evictions > 100
    for mine, theirs, known in zip(average.module.tables, module.tables, expected, strict=True):
        ids = torch.tensor(list(known))
        found = mine.find(ids)
        assert found.found.all()
        assert len(mine) == len(theirs) == len(known)
        rows = torch.stack(list(known.values()))
        torch.testing.assert_close(found.embeddings.cpu(), rows, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.scores, theirs.find(ids).scores)
    assert average.module.tables[0] is not module.tables[0]


@pytest.mark.parametrize("way", ["equal weights", "ema together"])
def test_a_table_of_two_modules_is_averaged_once(way: str) -> None:
    """``copy.copy`` gives a second module over the same tables."""
    first = DynamicEmbedding(4, seed=1)
    model = nn.ModuleList([first, copy.copy(first)])
    alone = copy.deepcopy(first)
    averages = [AveragedModel(one, **WAYS[way]) for one in (model, alone)]
    for step in range(4):
        rows = torch.full((6, 4), float(step))
        for one, average in zip((first, alone), averages, strict=True):
            one.table.insert(IDS, rows)
            average.update_parameters(model if one is first else alone)
    mine = averages[0].module
    assert mine[0].table is mine[1].table
    assert torch.equal(
        mine[0].table.find(IDS).embeddings, averages[1].module.table.find(IDS).embeddings
    )


def test_an_average_that_lacks_room_warns_with_numbers() -> None:
    """Ids that fit the cache and the store of the model's table may not fit those of another."""
    options = table_options(
        4, max_capacity=192, bucket_capacity=16, caching=True, local_hbm_for_values=16 * 96
    )
    module = BatchedDynamicEmbeddingTables(
        [options], optimizer="adam", pooling_mode=DynamicEmbPoolingMode.NONE, seed=1
    )
    average = AveragedModel(module)
    warned = []
    for _ in range(30):
        module(torch.randint(0, 600, (20,)), torch.tensor([0, 20])).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            average.update_parameters(module)
        mine, theirs = (len(one.tables[0]) for one in (average.module, module))
        expected = [f"the average of table 't0' has {mine} of {theirs} rows"]
        said = [str(one.message).partition(";")[0] for one in caught]
        assert said == (expected if mine < theirs else [])
        warned += said
    assert warned


def test_an_average_is_saved_loaded_and_goes_on() -> None:
    model = Model(DynamicEmbedding(DIM, seed=1))
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(6):
        train(model, (torch.arange(step, step + 9),), torch.ones(9), optimizer)
        averages[0].update_parameters(model)
        if step == 2:
            averages[1].load_state_dict(averages[0].state_dict())
        if step > 2:
            averages[1].update_parameters(model)
    ids = torch.arange(14)
    with torch.no_grad():
        assert torch.equal(averages[0].eval()(ids), averages[1].eval()(ids))


def test_batch_norm_of_an_average_is_updated() -> None:
    model = nn.Sequential(DynamicEmbedding(DIM, seed=1), nn.BatchNorm1d(DIM))
    model(torch.arange(8))
    average = AveragedModel(model)
    average.update_parameters(model)
    average.requires_grad_(False)  # ids that it does not know are read, and not inserted
    update_bn([torch.arange(8), torch.arange(4, 12)], average)
    assert len(average.module[0].table) == 8
    assert average.module[1].num_batches_tracked == 2
    mean = average.module[0].eval()(torch.cat([torch.arange(8), torch.arange(4, 12)])).mean(0)
    torch.testing.assert_close(average.module[1].running_mean, mean)


def test_a_model_with_other_tables_is_refused() -> None:
    average = AveragedModel(Model(DynamicEmbedding(DIM)))
    for other in (DynamicEmbedding(DIM, name="other"), DynamicEmbedding(DIM, dtype=torch.float16)):
        with pytest.raises(UsageError, match="allowed: the model that it was made of"):
            average.update_parameters(Model(other))
    assert average.n_averaged == 0


# ---- writes to parameters that know nothing of rows ----


def go_on(model: nn.Module) -> None:
    """Train until the handle's value is another one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(IDS).sum().backward()
        optimizer.step()


class OwnAverage(AveragedModel):
    """Overrides what this library extends."""

    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.detach().lerp_(theirs.detach(), 0.1)


def own_average(model: nn.Module) -> nn.Module:
    average = OwnAverage(model)
    go_on(model)
    average.update_parameters(model)
    return average.module


def by_state_dict(model: nn.Module) -> nn.Module:
    """As in timm's ModelEmaV2."""
    average = copy.deepcopy(model).eval()
    go_on(model)
    new = model.state_dict()
    with torch.no_grad():
        for name, mine in average.state_dict().items():
            if name in ("rows.handle", "head.0.weight"):  # rows of two moments differ in number
                mine.copy_(0.9 * mine + 0.1 * new[name])
    return average


def by_floats_of_state_dict(model: nn.Module) -> nn.Module:
    """As in Ultralytics' ModelEMA."""
    average = copy.deepcopy(model).eval()
    go_on(model)
    new = model.state_dict()
    for name, mine in average.state_dict().items():
        if mine.dtype.is_floating_point:
            mine *= 0.9
            mine += 0.1 * new[name].detach()
    return average


def by_foreach(model: nn.Module) -> nn.Module:
    """As in timm's ModelEmaV3."""
    average = copy.deepcopy(model)
    go_on(model)
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight=0.1)
    return average


def compiled(model: nn.Module) -> nn.Module:
    average = copy.deepcopy(model)
    go_on(model)

    @torch.compile(backend="aot_eager")
    def update() -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)

    with torch.no_grad():
        update()
    return average


def by_shadows(model: nn.Module) -> nn.Module:
    """As in torch_ema and diffusers' EMAModel: copies of parameters, copied back for evaluation."""
    shadows = [parameter.clone().detach() for parameter in model.parameters()]
    go_on(model)
    for shadow, parameter in zip(shadows, model.parameters(), strict=True):
        shadow.sub_(0.1 * (shadow - parameter.detach()))
    for shadow, parameter in zip(shadows, model.parameters(), strict=True):
        parameter.data.copy_(shadow.data)
    return model


def by_swapping(model: nn.Module) -> nn.Module:
    """As Lightning's WeightAveraging does around validation."""
    average = AveragedModel(model)
    go_on(model)
    average.update_parameters(model)
    for mine, theirs in zip(average.module.parameters(), model.parameters(), strict=True):
        kept = mine.data.clone()
        mine.data.copy_(theirs.data)
        theirs.data.copy_(kept)
    return model


def by_assigning_data(model: nn.Module) -> nn.Module:
    shadows = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    go_on(model)
    for name, parameter in model.named_parameters():
        parameter.data = shadows[name]
    return model


def by_an_initialiser(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    return model


def by_a_vector(model: nn.Module) -> nn.Module:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return model


def by_clipping(model: nn.Module) -> nn.Module:
    """As in a Wasserstein GAN."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    return model


def by_replacing_parameters(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones_like(parameter)))
    return model


WRITERS = [
    own_average,
    by_state_dict,
    by_floats_of_state_dict,
    by_foreach,
    compiled,
    by_shadows,
    by_swapping,
    by_assigning_data,
    by_an_initialiser,
    by_a_vector,
    by_clipping,
    by_replacing_parameters,
]
REFUSED = "handle.*The rows did not change.*Allowed: .*AveragedModel.*To recover, load the rows"


@pytest.mark.parametrize("fused", [None, "sgd"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_write_that_leaves_the_rows_as_they_are_is_an_error_at_the_next_use(
    write: Callable[[nn.Module], nn.Module], fused: str | None, tmp_path: Path
) -> None:
    model = Model(DynamicEmbedding(DIM, optimizer=fused))
    model(IDS).sum().backward()
    saved = copy.deepcopy(model.state_dict())
    written = write(model)
    table = written.rows.table
    uses: list[Callable[[], Any]] = [
        lambda: written.train()(IDS),
        lambda: written.eval()(IDS),
        written.state_dict,
        lambda: copy.deepcopy(written),
        lambda: copy.copy(written.rows),
        lambda: pickle.dumps(written),
        lambda: DynamicEmbDump(str(tmp_path / "dump"), written),
        lambda: dump_delta(str(tmp_path / "chain"), written),
        lambda: incremental_dump(written, 0),
        lambda: export_table(written, tmp_path / "rows.npz"),
        lambda: DynamicTables(written).state_dict(),
        lambda: torch.compile(written, backend="eager")(IDS),
        lambda: AveragedModel(model).update_parameters(written),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=REFUSED):
            use()
    get_dynamic_emb_module(written)  # a search reads nothing
    assert len(table) == len(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written.load_state_dict(saved)  # its rows are those of the file
    if write is not by_replacing_parameters or fused:
        written.train()(IDS)
    written.eval()(IDS)
    written.state_dict()


NO_LOADS: dict[str, Callable[[Model], Any]] = {
    "to": lambda model: model.to("cpu"),
    "to float64": lambda model: model.to("cpu", torch.float64),
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "share_memory": lambda model: model.share_memory(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "an empty dictionary": lambda model: model.load_state_dict({}, strict=False),
    "a dense dictionary": lambda model: model.load_state_dict(
        model.head.state_dict(prefix="head."), strict=False
    ),
}


@pytest.mark.parametrize("write", [by_an_initialiser, by_shadows, by_replacing_parameters])
@pytest.mark.parametrize("way", NO_LOADS)
def test_what_does_not_load_rows_does_not_forget_a_write(
    write: Callable[[nn.Module], nn.Module], way: str
) -> None:
    model = Model(DynamicEmbedding(DIM))
    model(IDS).sum().backward()
    write(model)
    NO_LOADS[way](model)
    with pytest.raises(UsageError, match=REFUSED):
        model.rows.eval()(IDS)


def loaders(saved: Model, tmp_path: Path) -> dict[str, Callable[[Model], Any]]:
    """Ways to replace all rows by those of ``saved``."""
    DynamicEmbDump(str(tmp_path / "dump"), saved)
    dump_delta(str(tmp_path / "chain"), saved)
    state, tables = saved.rows.state_dict(), DynamicTables(saved).state_dict()
    return {
        "load_state_dict": lambda model: model.rows.load_state_dict(state),
        "assign": lambda model: model.rows.load_state_dict(state, assign=True),
        "DynamicEmbLoad": lambda model: DynamicEmbLoad(str(tmp_path / "dump"), model),
        "apply_delta": lambda model: apply_delta(str(tmp_path / "chain"), model),
        "DynamicTables": lambda model: DynamicTables(model).load_state_dict(tables),
        "accept_written": lambda model: model.rows.accept_written(),
    }


@pytest.mark.parametrize(
    "way",
    [
        "load_state_dict",
        "assign",
        "DynamicEmbLoad",
        "apply_delta",
        "DynamicTables",
        "accept_written",
    ],
)
def test_new_rows_settle_what_was_written(way: str, tmp_path: Path) -> None:
    """Training scripts initialise all parameters, and load a checkpoint then."""
    saved = Model(DynamicEmbedding(DIM, seed=1))
    go_on(saved)
    load = loaders(saved, tmp_path)[way]
    model = Model(DynamicEmbedding(DIM, seed=1))
    model(IDS)
    by_an_initialiser(model)
    load(model)
    if way != "accept_written":
        assert torch.equal(model.rows(IDS), saved.rows(IDS))
    go_on(model)
    model.state_dict()
    by_an_initialiser(model)
    with pytest.raises(UsageError, match=REFUSED):
        model(IDS)


def test_new_rows_of_one_of_two_tables_settle_nothing(tmp_path: Path) -> None:
    module = tables_of_two()
    module(torch.arange(40), torch.tensor([0, 20, 40]))
    DynamicEmbDump(str(tmp_path), module)
    by_an_initialiser(module)
    DynamicEmbLoad(str(tmp_path), module, table_names=["calm"])
    with pytest.raises(UsageError, match=REFUSED):
        module.export_keys_values("calm")
    DynamicEmbLoad(str(tmp_path), module)
    module.export_keys_values("calm")


def test_a_state_dict_that_fails_leaves_the_handle_as_it_was() -> None:
    model, other = DynamicEmbedding(DIM), DynamicEmbedding(DIM + 1)
    state = other.state_dict()
    state["handle"] = torch.ones(1)
    before = model.handle.item()
    with pytest.raises(RuntimeError, match="meta|embeddings"):
        model.load_state_dict({**state, "rows.embeddings": torch.ones(1, DIM + 1)})
    assert model.handle.item() == before
    model(IDS)


def test_a_handle_is_brought_up_with_the_rows() -> None:
    """It is a function of the content, so that equal models have equal dictionaries."""
    model, again = Model(DynamicEmbedding(DIM, seed=1)), Model(DynamicEmbedding(DIM, seed=1))
    seen = set()
    for step in range(130):
        for one in (model, again):
            one(IDS).sum().backward()
            one.zero_grad()
        if step == 70:
            again = copy.deepcopy(again)
        if step == 100:
            again.load_state_dict(copy.deepcopy(model.state_dict()))
        value = model.state_dict()["rows.handle"]
        assert torch.equal(value, again.state_dict()["rows.handle"])
        assert 2.0**-5 <= value.item() < 2.0**-4
        assert value.half().item() == value.bfloat16().item() == value.item()
        seen.add(value.item())
    assert len(seen) == 7  # a new one at powers of two, and at each 64th batch


def test_what_only_reads_or_moves_parameters_is_no_write() -> None:
    model = Model(DynamicEmbedding(DIM, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        train(model, (IDS,), torch.ones(6), optimizer)
        penalty = sum(parameter.abs().sum() for parameter in model.parameters())
        (model(IDS).sum() + penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        [parameter.clone() for parameter in model.parameters()]
        [parameter.data.norm() for parameter in model.parameters()]
        nn.utils.parameters_to_vector(model.parameters())
        copy.deepcopy(model.state_dict())
        model.load_state_dict(model.state_dict())
        model.load_state_dict(model.state_dict(), assign=True)
        model.half().float().to("cpu").share_memory()
        copy.copy(model.rows)(IDS)
        copy.deepcopy(model)(IDS)
        pickle.loads(pickle.dumps(model))(IDS)
        model.requires_grad_(False)(IDS)
        model.requires_grad_(True)
        model.zero_grad()
    model(IDS)


def test_a_write_of_the_same_value_is_no_write() -> None:
    """Broadcasts, steps of 0, evaluation with other weights that are put back."""
    model = Model(DynamicEmbedding(DIM, seed=1))
    for _ in range(3):
        go_on(model)
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data)
            parameter.data = parameter.data.clone()
            parameter.detach().add_(0.0)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector, model.parameters())
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        by_an_initialiser(model)
        with pytest.raises(UsageError, match=REFUSED):
            model.eval()(IDS)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        model.eval()(IDS)
        parameters = {name: one.detach().clone() for name, one in model.named_parameters()}
        torch.func.functional_call(model, parameters, (IDS,))
        model.train()


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_around_a_fused_embedding(search: str | None) -> None:
    """It adds 0 to the handle, and its line search puts parameters back."""
    model = Model(DynamicEmbedding(DIM, optimizer="sgd"))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn=search)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(IDS) - 1).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert model.rows.table.step > 32
    model.state_dict()


@pytest.mark.parametrize("fused", [None, "sgd"])
def test_a_graph_that_holds_the_handle_stays_valid(fused: str | None) -> None:
    """The module changes the value in backward, where autograd must not see a change in place."""
    model, other = (Model(DynamicEmbedding(DIM, seed=1, optimizer=fused)) for _ in range(2))
    for _ in range(10):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        model(IDS).sum().backward()
        penalty.backward()
        other(IDS).sum().backward()
        for one in (model, other):
            if fused is None:
                torch.optim.SGD(one.rows.parameters(), lr=0.1).step()
            one.zero_grad()
    assert torch.equal(model.rows(IDS), other.rows(IDS))  # a penalty is none of rows


def test_the_handle_is_a_parameter() -> None:
    module = DynamicEmbedding(DIM)
    handle = module.handle
    assert isinstance(handle, nn.Parameter)
    assert isinstance(nn.Parameter(handle), nn.Parameter)
    assert type(nn.Parameter(handle.data)) is nn.Parameter
    assert isinstance(type(handle)(torch.ones(1), requires_grad=False), nn.Parameter)
    assert not isinstance(handle.detach(), nn.Parameter)
    assert type(handle.clone()) is type(module.state_dict()["handle"]) is torch.Tensor
    for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert type(copied) is nn.Parameter
        assert torch.equal(copied, handle)
    for copied in (copy.deepcopy(handle.detach()), pickle.loads(pickle.dumps(handle.detach()))):
        assert type(copied) is torch.Tensor
    assert isinstance(module.state_dict(keep_vars=True)["handle"], nn.Parameter)


def test_a_module_that_is_made_in_inference_mode_is_used_outside() -> None:
    with torch.inference_mode():
        module = DynamicEmbedding(DIM)
        copied = copy.deepcopy(module)
    for one in (module, copied):
        one(IDS).sum().backward()
        one.half().float()
        one.load_state_dict(copy.deepcopy(one).state_dict())
        with torch.inference_mode():
            one.half()
            one.eval()(IDS)
        one.float().train()(IDS)
        by_an_initialiser(one)
        with pytest.raises(UsageError, match=REFUSED):
            one(IDS)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_leaves_the_handle_of_a_fused_module_alone(compiled: bool) -> None:
    model = Model(DynamicEmbedding(DIM, optimizer="sgd"))
    call = torch.compile(model, backend="aot_eager") if compiled else model
    optimizers = [torch.optim.RMSprop(model.parameters(), lr=0.1)]
    optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for optimizer in optimizers * 2:
        optimizer.zero_grad()
        call(IDS).sum().backward()
        optimizer.step()
    call(IDS)
