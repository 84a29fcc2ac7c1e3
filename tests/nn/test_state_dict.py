"""state_dict and load_state_dict hold the real content and continue a run bit for bit."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import table_options
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbScoreStrategy,
    FrequencyAdmissionStrategy,
    KVCounter,
    OptimizerArgs,
    ProbabilityAdmissionStrategy,
)

STRATEGY = DynamicEmbScoreStrategy


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As a user saves it: no code runs on loading."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def same(one: Any, two: Any) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )


def batched(rule: str = "adam", **changes: Any) -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(
        [
            table_options(3, score_strategy=STRATEGY.STEP, **changes),
            table_options(5, score_strategy=STRATEGY.LFU, embedding_dtype=torch.bfloat16),
        ],
        table_names=["user", "item"],
        optimizer=rule,
        learning_rate=0.1,
    )


def steps(module: Any, count: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    outs = []
    for _ in range(count):
        ids = torch.randint(0, 60, (24,), generator=draw)
        out = module(ids, torch.tensor([0, 6, 12, 18, 24]))
        out.backward(torch.randn(out.shape, generator=draw))
        outs.append(out.detach())
    return outs


def test_what_is_in_it() -> None:
    module = DynamicEmbedding(4, name="words", optimizer="adam")
    module(torch.tensor([5, -7])).sum().backward()
    state = module.state_dict()
    assert set(state) == {"handle"} | {
        f"words.{name}" for name in ("ids", "embeddings", "state", "scores", "meta")
    }
    assert sorted(state["words.ids"].tolist()) == [-7, 5]
    found = module.table.find(state["words.ids"])
    assert torch.equal(state["words.embeddings"], found.embeddings)
    assert torch.equal(state["words.state"], found.state)
    assert torch.equal(state["words.scores"], found.scores)
    before = state["words.embeddings"].clone()
    module(torch.tensor([5])).sum().backward()
    assert torch.equal(state["words.embeddings"], before)  # a copy, not a view


@pytest.mark.parametrize(
    "rule",
    [
        "sgd",
        "momentum_sgd",
        "adam",
        "exact_adagrad",
        "exact_row_wise_adagrad",
        "partial_row_wise_adam",
        "ftrl",
    ],
)
def test_training_continues_bit_equal(rule: str) -> None:
    module = batched(rule)
    steps(module, 5, seed=1)
    again = batched(rule)
    steps(again, 2, seed=9)  # what was there before goes
    report = again.load_state_dict(through_a_file(module.state_dict()))
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert same(module, again)
    assert again.get_score()["user"] == module.get_score()["user"] == 6
    for one, two in zip(steps(module, 5, seed=2), steps(again, 5, seed=2), strict=True):
        assert torch.equal(one, two)
    assert same(module, again)


@pytest.mark.parametrize("strategy", [*STRATEGY, (STRATEGY.TIMESTAMP, STRATEGY.LFU)])
def test_scores_continue(strategy: Any) -> None:
    modules = [
        BatchedDynamicEmbeddingTables([table_options(2, score_strategy=strategy)], seed=seed)
        for seed in (1, 2)
    ]
    module, again = modules
    if strategy is STRATEGY.CUSTOMIZED:
        module.set_score({"t0": 2**63 + 1})
    for step in range(3):
        module(torch.arange(step, step + 4), torch.tensor([0, 4]))
    again.load_state_dict(through_a_file(module.state_dict()))
    assert same(module, again)
    if not isinstance(strategy, tuple) and strategy is not STRATEGY.TIMESTAMP:
        assert module.get_score() == again.get_score()
        for one in modules:
            one(torch.tensor([1, 77, 78]), torch.tensor([0, 3]))
        assert same(module, again)


@pytest.mark.parametrize(
    ("strategy", "counter"),
    [(FrequencyAdmissionStrategy(4), KVCounter(256)), (ProbabilityAdmissionStrategy(0.2), None)],
)
def test_admission_continues(strategy: Any, counter: Any) -> None:
    options = table_options(
        2,
        admit_strategy=strategy,
        admission_counter=counter,
        score_strategy=STRATEGY.STEP,
    )
    module, again = (
        BatchedDynamicEmbeddingTables([options], seed=seed, learning_rate=0.1) for seed in (1, 2)
    )
    offsets = torch.tensor([0, 30])
    for _ in range(3):
        module(torch.randint(0, 40, (30,)), offsets).sum().backward()
    assert 0 < len(module.tables[0]) < 40
    again.load_state_dict(through_a_file(module.state_dict()))
    for _ in range(5):
        ids = torch.randint(0, 40, (30,))
        out = module(ids, offsets)
        other = again(ids, offsets)
        assert torch.equal(out, other)
        out.sum().backward()
        other.sum().backward()
    assert same(module, again)


def test_new_rows_follow_the_saved_seed() -> None:
    module, again = DynamicEmbedding(4, seed=1), DynamicEmbedding(4, seed=2)
    again.load_state_dict(module.state_dict())
    assert torch.equal(module(torch.arange(9)), again(torch.arange(9)))


@pytest.mark.parametrize("make", ["sgd", "adam", "adagrad"])
def test_under_torch_optim_the_loaded_state_is_used(make: str) -> None:
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }
    module, again = (DynamicEmbedding(4, seed=seed) for seed in (1, 2))

    def train(one: Any, optimizer: Any, count: int) -> None:
        draw = torch.Generator().manual_seed(count)
        for _ in range(count):
            optimizer.zero_grad()
            ids = torch.randint(0, 20, (16,), generator=draw)
            one(ids).backward(torch.randn(16, 4, generator=draw))
            optimizer.step()

    optimizer = optimizers[make](module.parameters())
    train(module, optimizer, 4)
    again.load_state_dict(through_a_file(module.state_dict()))
    train(module, optimizer, 5)
    train(again, optimizers[make](again.parameters()), 5)  # a new optimizer, the rows' state stays
    assert torch.equal(
        module.table.find(torch.arange(20)).embeddings,
        again.table.find(torch.arange(20)).embeddings,
    )
    assert torch.equal(
        module.table.find(torch.arange(20)).state, again.table.find(torch.arange(20)).state
    )


@pytest.mark.parametrize("capacity", [512, 4096, 100_000])
def test_into_another_capacity(capacity: int) -> None:
    module = DynamicEmbedding(4, max_capacity=1024, seed=1)
    ids = torch.arange(200) * -12345
    expected = module(ids)
    again = DynamicEmbedding(4, max_capacity=capacity)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again.eval()(ids), expected)
    assert torch.equal(again.table.find(ids).scores, module.table.find(ids).scores)


def test_rows_that_do_not_fit_are_counted() -> None:
    step = {"score_strategy": STRATEGY.STEP, "bucket_capacity": 16}
    module = DynamicEmbedding(2, options=table_options(2, max_capacity=256, **step))
    for begin in range(0, 60, 4):
        module(torch.arange(begin, begin + 4))
    again = DynamicEmbedding(2, options=table_options(2, max_capacity=16, **step))
    with pytest.warns(UserWarning, match="44 rows of table 'rows' did not fit its 16 slots"):
        again.load_state_dict(module.state_dict())
    assert len(again.table) == 16
    kept = again.table.state_dict()["ids"]
    assert torch.equal(again.table.find(kept).scores, module.table.find(kept).scores)


def counting() -> DynamicEmbedding:
    """Three rows, and counted ids."""
    options = table_options(
        4, admit_strategy=FrequencyAdmissionStrategy(2), admission_counter=KVCounter(64)
    )
    module = DynamicEmbedding(4, optimizer="adam", options=options)
    module(torch.arange(5)).sum().backward()
    module(torch.arange(3)).sum().backward()
    assert len(module.table) == 3
    return module


class Nested(nn.Module):
    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"words": DynamicEmbedding(dim, optimizer="sgd")})
        self.bag = DynamicEmbeddingBag(4, optimizer="adam")
        self.head = nn.Linear(dim, 1)


def test_nested_in_a_model() -> None:
    model, again = Nested(), Nested()
    model.inner["words"](torch.arange(5)).sum().backward()
    model.bag(torch.arange(6).reshape(2, 3)).sum().backward()
    state = through_a_file(model.state_dict())
    assert "inner.words.rows.ids" in state
    assert "bag.rows.embeddings" in state
    again.load_state_dict(state)
    assert same(model, again)


def test_strict_names_what_is_missing_and_unexpected() -> None:
    model, again = Nested(), Nested()
    model.bag(torch.tensor([[1]]))
    state = model.state_dict()
    extra = {**state, "bag.other.ids": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bag\.other\.ids"):
        again.load_state_dict(extra)
    without = {k: v for k, v in state.items() if not k.startswith("bag.rows")}
    with pytest.raises(RuntimeError, match=r"Missing key.*bag\.rows\.ids.*bag\.rows\.meta"):
        again.load_state_dict(without)
    report = again.load_state_dict(extra, strict=False)
    assert report.unexpected_keys == ["bag.other.ids"]
    assert same(model, again)


@pytest.mark.parametrize("fused", [True, False])
def test_another_width_is_refused_and_the_module_is_unchanged(fused: bool) -> None:
    def make(dim: int) -> BatchedDynamicEmbeddingTables:
        return BatchedDynamicEmbeddingTables(
            [table_options(3), table_options(dim)],
            table_names=["user", "item"],
            separate_step=not fused,
            optimizer="adam",
        )

    module, other = make(4), make(5)
    for one in (module, other):
        ids = torch.arange(4) + one.tables[1].dim
        one(ids, torch.tensor([0, 2, 4])).sum().backward()
        if not fused:
            one.step()
    before = module.state_dict()
    with pytest.raises(RuntimeError, match=r"'item'.*\(2, 5\).*\(2, 4\)"):
        module.load_state_dict(other.state_dict())
    after = module.state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_a_refused_state_of_another_optimizer_leaves_an_unfused_module_its_state() -> None:
    module, other = DynamicEmbedding(4), DynamicEmbedding(5, optimizer="sgd")
    other(torch.arange(3))
    adam = torch.optim.Adam(module.parameters())
    module(torch.arange(3)).sum().backward()
    adam.step()
    before = module.state_dict()
    with pytest.raises(RuntimeError, match="'rows'"):
        module.load_state_dict(other.state_dict())
    after = module.state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_state_of_another_optimizer_is_refused_by_a_fused_module() -> None:
    adam, sgd = DynamicEmbedding(4, optimizer="adam"), DynamicEmbedding(4, optimizer="sgd")
    adam(torch.arange(3))
    with pytest.raises(RuntimeError, match=r"'rows'.*ADAM.*SGD"):
        sgd.load_state_dict(adam.state_dict())
    assert len(sgd.table) == 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embeddings", lambda t: t.double(), "embeddings.dtype.*float64.*float32"),
        ("embeddings", lambda t: t[:-1], r"embeddings.shape.*\(2, 4\).*\(3, 4\)"),
        ("scores", lambda t: t[:-1], "scores.shape"),
        ("state", lambda t: t[:, :-1], "state.shape"),
        ("ids", lambda t: t.int(), "ids.dtype.*int32"),
        ("ids", lambda t: t[None], "ids.shape"),
        ("meta", lambda t: t[:-1], "meta"),
        ("meta", lambda t: t + 1, "meta"),
        ("ids", lambda t: t[1:], "has 2 ids; allowed: 3"),
        ("counter_ids", lambda t: t[1:], "has 4 counter_ids; allowed: 5"),
        ("counter_counts", lambda t: t.float(), "counts.*float32"),
    ],
)
def test_damaged_content_is_refused_before_any_change(name: str, change: Any, message: str) -> None:
    module = counting()
    state = module.state_dict()
    damaged = {**state, f"rows.{name}": change(state[f"rows.{name}"])}
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(damaged)
    after = module.state_dict()
    for key, tensor in state.items():
        assert torch.equal(tensor, after[key]), key


def test_assign_keeps_the_handle_that_optimizers_know() -> None:
    module, again = DynamicEmbedding(4, seed=1), DynamicEmbedding(4, seed=2)
    module(torch.arange(3))
    handle = again.handle
    again.load_state_dict(module.state_dict(), assign=True)
    assert again.handle is handle
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    before = again.table.find(torch.arange(3)).embeddings
    again(torch.arange(3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, again.table.find(torch.arange(3)).embeddings)


def test_loading_forgets_waiting_gradients() -> None:
    module = DynamicEmbedding(4, options=table_options(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.arange(3)).sum().backward()
    module.load_state_dict(module.state_dict())
    optimizer.step()
    assert (module.table.find(torch.arange(3)).embeddings == 1.0).all()


def test_every_id_round_trips() -> None:
    ids = torch.tensor([-1, -2, -3, -4, -(2**63), 2**63 - 1, 0, 1])
    module = DynamicEmbedding(4, seed=1)
    expected = module(ids)
    again = DynamicEmbedding(4, seed=2)
    again.load_state_dict(through_a_file(module.state_dict()))
    assert torch.equal(again.eval()(ids), expected)


def test_an_empty_module_round_trips() -> None:
    module, again = DynamicEmbedding(4), DynamicEmbedding(4)
    again(torch.arange(3))
    again.load_state_dict(through_a_file(module.state_dict()))
    assert len(again.table) == 0


def test_options_with_optimizer_args() -> None:
    """The numbers of an optimizer are configuration, not content."""
    fast, slow = (
        DynamicEmbedding(2, optimizer="sgd", optimizer_args=OptimizerArgs(learning_rate=rate))
        for rate in (1.0, 0.1)
    )
    fast(torch.arange(2))
    slow.load_state_dict(fast.state_dict())
    assert slow.table.optimizer.args.learning_rate == 0.1


# ---- tensors that are empty, or lacking ----


def model_of_every_kind() -> nn.ModuleDict:
    """Modules with rows and without, with counters, with state and without."""
    model = nn.ModuleDict(
        {
            "sgd": DynamicEmbedding(3, optimizer="sgd"),
            "adam": DynamicEmbeddingBag(3, optimizer="adam"),
            "empty": DynamicEmbedding(3),
            "counting": counting(),
            "batched": batched(),
            "dense": nn.Linear(3, 1),
        }
    )
    model["sgd"](torch.arange(5)).sum().backward()
    model["adam"](torch.arange(6).reshape(2, 3)).sum().backward()
    model["batched"](torch.arange(3), torch.tensor([0, 3, 3])).sum().backward()  # no item
    return model


def in_older_form(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As it was written before: format 1, with the empty tensors."""
    older = dict(state)
    for name, meta in state.items():
        if not name.endswith(".meta"):
            continue
        older[name] = torch.cat([torch.tensor([1]), meta[1:9]])
        prefix = name.removesuffix("meta")
        rows, dim = int(meta[9]), 5 if prefix.endswith("item.") else 3
        sizes = {"ids": (rows,), "embeddings": (rows, dim), "state": (rows, 0), "scores": (rows,)}
        sizes |= {"counter_ids": (0,), "counter_counts": (0,)}
        for part, size in sizes.items():
            if prefix + part not in state:
                half = prefix.endswith("item.") and part == "embeddings"
                kind = torch.int64 if len(size) == 1 else torch.float32
                older[prefix + part] = torch.empty(size, dtype=torch.bfloat16 if half else kind)
    if "batched.item.state" in older:
        older["batched.item.state"] = torch.empty(0, 10)
    return older


def test_no_tensor_is_empty() -> None:
    state = model_of_every_kind().state_dict()
    assert [name for name, tensor in state.items() if tensor.numel() == 0] == []
    assert "empty.rows.meta" in state
    for name in ("empty.rows.ids", "sgd.rows.state", "batched.item.ids", "adam.rows.counter_ids"):
        assert name not in state


def test_a_dictionary_with_the_empty_tensors_loads() -> None:
    model, again = model_of_every_kind(), model_of_every_kind()
    state = in_older_form(model.state_dict())
    assert len(state) > len(model.state_dict())
    for module in again.values():
        for table in getattr(module, "tables", ()):
            table.insert(torch.tensor([77]), torch.ones(1, table.dim, dtype=table.dtype))
    report = again.load_state_dict(through_a_file(state))
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert same(model, again)


def test_an_older_dictionary_whose_empty_tensors_a_library_dropped_loads() -> None:
    model, again = model_of_every_kind(), model_of_every_kind()
    older = in_older_form(model.state_dict())
    state = {
        name: tensor
        for name, tensor in older.items()
        if tensor.numel() or name.startswith(("empty.", "batched.item"))
    }
    again.load_state_dict(state)
    assert same(model, again)
    # Of a table without rows nothing but its numbers would be left, and these did not count rows.
    for name in ("ids", "embeddings", "scores"):
        del state[f"empty.rows.{name}"]
    with pytest.raises(RuntimeError, match="'rows' has no ids, embeddings, scores; allowed"):
        again.load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_a_table_that_lacks_a_tensor_is_an_error_and_nothing_changes(strict: bool) -> None:
    module, again = counting(), counting()
    again(torch.tensor([50, 50]))
    before = again.state_dict()
    state = module.state_dict()
    for name in state:
        if name == "handle":
            continue
        part = {key: tensor for key, tensor in state.items() if key != name}
        with pytest.raises(RuntimeError, match=f"has no {name.removeprefix('rows.')}"):
            again.load_state_dict(part, strict=strict)
        alone = {"handle": state["handle"], name: state[name]}
        with pytest.raises(RuntimeError, match="the content .*has no"):
            again.load_state_dict(alone, strict=strict)
    after = again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_dictionary_with_nothing_of_a_module_reports_it_and_leaves_it_alone() -> None:
    model, again = Nested(), Nested()
    for one in (model, again):
        one.bag(torch.arange(6).reshape(2, 3)).sum().backward()
    before = copy.deepcopy(again.state_dict())
    dense = {name: one for name, one in model.state_dict().items() if name.startswith("head")}
    report = again.load_state_dict(dense, strict=False)
    assert set(report.missing_keys) == {
        *("inner.words.handle", "bag.handle"),
        *(
            f"{module}.rows.{name}"
            for module in ("inner.words", "bag")
            for name in ("ids", "embeddings", "scores", "meta")
        ),
    }
    after = again.state_dict()
    for name, tensor in before.items():
        assert name in dense or torch.equal(tensor, after[name]), name
    again.bag(torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", ["handle", "user", "handle and user", "item"])
def test_a_part_of_a_modules_tables_is_an_error_and_nothing_changes(
    what: str, strict: bool
) -> None:
    """As of shadows of parameters, which have the handle and no rows."""
    module, again = batched(), batched()
    steps(module, 2, seed=1)
    steps(again, 2, seed=9)
    before = copy.deepcopy(again.state_dict())
    parts = what.split(" and ")
    part = {
        name: one for name, one in module.state_dict().items() if name.partition(".")[0] in parts
    }
    with pytest.raises(RuntimeError, match=r"no rows of this table; allowed: all tables of") as e:
        again.load_state_dict(part, strict=strict)
    for name in ("user", "item"):
        assert (f"table {name!r}: the dictionary has" in str(e.value)) == (name not in parts)
    after = again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    steps(again, 1, seed=2)


def test_shadows_of_parameters_are_no_state_dict() -> None:
    """The dense weights would be averages, and the rows those of now."""
    model = nn.Sequential(DynamicEmbedding(4, seed=1), nn.Linear(4, 1))
    model(torch.arange(3))
    shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
    with pytest.raises(RuntimeError, match="the dictionary has only '0.handle', and no rows"):
        model.load_state_dict(shadow, strict=False)


def shared_by_address(state: dict[str, torch.Tensor]) -> set[str]:
    """What Accelerate leaves out before it writes safetensors: all but the first of the tensors
    whose memory begins at one address and has one size."""
    seen: set[tuple[int, int]] = set()
    shared = set()
    for name, tensor in state.items():
        memory = tensor.untyped_storage()
        place = (memory.data_ptr(), memory.nbytes())
        if place in seen:
            shared.add(name)
        seen.add(place)
    return shared


@pytest.mark.parametrize("way", ["file", "model", "accelerate"])
def test_through_safetensors(way: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, again = model_of_every_kind(), model_of_every_kind()
    file = tmp_path / "model.safetensors"
    if way == "model":
        safetensors.save_model(model, file)
        assert safetensors.load_model(again, file) == (set(), [])
    else:
        state = model.state_dict()
        if way == "accelerate":
            assert shared_by_address(state) == set()
        safetensors.save_file(state, file)
        again.load_state_dict(safetensors.load_file(file))
    assert same(model, again)


def test_torchs_distributed_checkpoint_into_a_module_without_rows_is_an_error(
    tmp_path: Path,
) -> None:
    """It reads only what the dictionary it is given has, and the rows are not among that."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    module, again = DynamicEmbedding(4), DynamicEmbedding(4)
    module(torch.arange(100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a process group
        dcp.save(module.state_dict(), checkpoint_id=tmp_path)
        state = again.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="'rows' has no ids, embeddings, scores"):
        again.load_state_dict(state)
    same_size = DynamicEmbedding(4)
    same_size(torch.arange(100))
    state = same_size.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path)
    same_size.load_state_dict(state)
    assert same(module, same_size)
