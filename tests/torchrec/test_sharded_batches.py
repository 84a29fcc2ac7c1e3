"""Sharded dynamic tables: train pipelines, and batches of every shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sharded
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from dynamicemb import (
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from ranks import Ranks

BATCH = 12


# ---- pipelines ----


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory())


class Piped(nn.Module):
    """The model in the shape that train pipelines want."""

    def __init__(self, net: sharded.Net) -> None:
        super().__init__()
        self.collection = net.collection
        self.bags = net.bags

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = sharded.loss_of(self.collection(batch.features), batch.features, self.bags)
        return loss, loss.detach()


def prefetching(model: DistributedModelParallel, batches: list[Batch]) -> list[torch.Tensor]:
    """Training in the order of TorchRec's prefetch pipeline, which itself needs CUDA streams: rows
    of the next batch are prefetched after the forward and before the backward of this one."""
    collection = model.module.collection
    bags = model.module.bags

    def start(one: Batch) -> tuple[Batch, Any, Any]:
        context = collection.create_context()
        given = collection.input_dist(context, one.features).wait().wait()
        collection.prefetch(dist_input=given, ctx=context)
        return one, context, given

    losses = []
    ready = start(batches[0])
    for after in [*batches[1:], None]:
        one, context, given = ready
        out = collection.compute_and_output_dist(context, given)
        loss = sharded.loss_of(out, one.features, bags)
        if after is not None:
            ready = start(after)
        loss.backward()
        losses.append(loss.detach())
    return losses


def piped(rank: int, world_size: int, *, bags: bool, dedup: bool) -> None:
    tables = sharded.configs(bags)
    sizes = sharded.even(BATCH, world_size)
    batches = [
        Batch(sharded.share(sharded.wide(sharded.batch(step, BATCH)), sizes, rank))
        for step in range(8)
    ]
    options = {
        "users": DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU),
        "goods": DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.STEP),
    }
    results = []
    for pipeline in ("none", "sparse_dist", "prefetch"):
        torch.manual_seed(3)
        model = sharded.dynamic_model(
            Piped(sharded.Net(tables)), sharded.SGD, world_size, dedup=dedup, options=options
        )
        losses = []
        if pipeline == "prefetch":
            losses = prefetching(model, batches)
        elif pipeline == "sparse_dist":
            running = TrainPipelineSparseDist(model, model.fused_optimizer, sharded.CPU)
            stream = iter(batches)
            losses = [running.progress(stream) for _ in batches]
        else:
            for one in batches:
                loss, _ = model(one)
                loss.backward()
                losses.append(loss.detach())
        rows = sharded.dynamic_rows(model, sharded.wide_ids(torch.arange(sharded.ROWS)))
        users = sharded.dynamic_tables(model)["users"]
        scores = users.find(sharded.wide_ids(torch.arange(sharded.ROWS))).scores
        results.append((losses, rows, scores))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_train_pipelines_give_the_same_losses(ranks: Ranks) -> None:
    ranks.run(2, piped, bags=False, dedup=True)
    ranks.run(2, piped, bags=True, dedup=False)


# ---- batches of every shape ----


def unequal(rank: int, world_size: int, *, bags: bool) -> None:
    """Ranks without an id and batches of different sizes, against TorchRec's own tables."""
    tables = sharded.configs(bags)
    start = sharded.rows_at_start(tables)
    shapes = [[6, 6], [5, 5], [4, 4], [4, 4]]
    if not bags:  # TorchRec's pooled tables over gloo need one size on all ranks
        shapes[:2] = [[7, 5], [1, 11]]
    without_ids = [[], [], [1], [0, 1]]
    batches = []
    for step, (sizes, empty) in enumerate(zip(shapes, without_ids, strict=True)):
        one = sharded.share(sharded.batch(step, sum(sizes)), sizes, rank)
        if rank in empty:  # as a data loader may make it: with other element types
            one = KeyedJaggedTensor(
                keys=one.keys(),
                values=torch.empty(0, dtype=torch.int32),
                lengths=torch.zeros(len(one.lengths()), dtype=torch.int32),
                stride=sizes[rank],
            )
        batches.append(one)
    static = sharded.static_model(sharded.Net(tables), sharded.SGD, world_size)
    sharded.set_static(static, start)
    plain = [
        KeyedJaggedTensor(
            keys=one.keys(),
            values=one.values().to(torch.int64),
            lengths=one.lengths().to(torch.int64),
            stride=one.stride(),
        )
        for one in batches
    ]
    expected = sharded.train(static, plain)
    expected_rows = sharded.static_rows(static)
    for dedup in (False,) if bags else (False, True):
        model = sharded.dynamic_model(sharded.Net(tables), sharded.SGD, world_size, dedup=dedup)
        sharded.insert_owned(model, start)
        losses = sharded.train(model, batches)
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
        rows = sharded.dynamic_rows(model, torch.arange(sharded.ROWS))
        torch.testing.assert_close(rows, expected_rows, rtol=1e-6, atol=1e-6)


def test_ranks_without_ids_and_of_different_sizes(ranks: Ranks) -> None:
    ranks.run(2, unequal, bags=False)
    ranks.run(2, unequal, bags=True)


def ragged(step: int, rank: int, examples: int) -> KeyedJaggedTensor:
    """A batch whose features repeat examples: each has distinct ones and where they go. Ranks have
    the same number, as TorchRec needs over gloo."""
    strides = [[(3 * step + number) % 4 + 1] for number in range(len(sharded.KEYS))]
    generator = torch.Generator().manual_seed(31 * step + rank)
    lengths = torch.randint(0, 4, (sum(s[0] for s in strides),), generator=generator)
    inverse = torch.stack(
        [torch.randint(0, s[0], (examples,), generator=generator) for s in strides]
    )
    return KeyedJaggedTensor(
        keys=sharded.KEYS,
        values=torch.randint(0, sharded.ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=(sharded.KEYS, inverse),
    )


def plain(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with every example written out."""
    examples = features.inverse_indices()[1].shape[1]
    values, lengths = [], []
    for key, inverse in zip(features.keys(), features.inverse_indices()[1], strict=True):
        parts = features[key].values().split(features[key].lengths().tolist())
        values.extend(parts[one] for one in inverse.tolist())
        lengths.append(features[key].lengths()[inverse])
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride=examples,
    )


def variable(rank: int, world_size: int, *, bags: bool) -> None:
    mean = sharded.PoolingType.MEAN
    tables = sharded.configs(bags, {"users": mean, "goods": mean})
    start = sharded.rows_at_start(tables)
    batches = [ragged(step, rank, 6) for step in range(6)]
    static = sharded.static_model(sharded.Net(tables), sharded.SGD, world_size)
    sharded.set_static(static, start)
    expected = sharded.train(static, batches)
    expected_rows = sharded.static_rows(static)
    model = sharded.dynamic_model(sharded.Net(tables), sharded.SGD, world_size)
    sharded.insert_owned(model, start)
    losses = sharded.train(model, batches)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
    rows = sharded.dynamic_rows(model, torch.arange(sharded.ROWS))
    torch.testing.assert_close(rows, expected_rows, rtol=1e-6, atol=1e-6)
    if world_size > 1 or not bags:  # there TorchRec's gradients are not those of the written out
        return
    # Two groups, which TorchRec's tables refuse on the CPU: against the batch written out.
    tables = sharded.configs(bags, {"users": mean})
    results = []
    for given in (batches, [plain(one) for one in batches]):
        model = sharded.dynamic_model(sharded.Net(tables), sharded.SGD, world_size)
        sharded.insert_owned(model, start)
        losses = sharded.train(model, given)
        results.append((losses, sharded.dynamic_rows(model, torch.arange(sharded.ROWS))))
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=2e-6)


def test_a_batch_size_for_each_feature(ranks: Ranks) -> None:
    ranks.run(2, variable, bags=True)
    ranks.run(2, variable, bags=False)
    ranks.run(1, variable, bags=True)
