"""A training step of the module on the published workload.

10 tables of 1,677,721 rows, dim 128 in float32, sequence mode (no pooling), 104,857 ids per table
and step from a power law with exponent 1.05: 1,048,570 ids, about 350,280 of them distinct. Warm
tables: the ids of every step are there. Published figures are from an H100 (3.35 TB/s).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import Clock, power_law

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    EmbOptimType,
)

TABLES, ROWS, DIM, IDS, EXPONENT = 10, 1_677_721, 128, 104_857, 1.05
EXPECTED_UNIQUE = 350_280


def batches(count: int) -> tuple[list[torch.Tensor], float]:
    """Ids of ``count`` steps, and how many are distinct on average."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    steps, unique = [], []
    for _ in range(count):
        parts = [power_law(IDS, ROWS, EXPONENT, generator) for _ in range(TABLES)]
        unique.append(sum(len(torch.unique(part)) for part in parts))
        steps.append(torch.cat(parts))
    return steps, statistics.mean(unique)


def make(optimizer: EmbOptimType) -> BatchedDynamicEmbeddingTables:
    options = DynamicEmbTableOptions(
        dim=DIM,
        max_capacity=ROWS,
        initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM),
    )
    return BatchedDynamicEmbeddingTables(
        [options] * TABLES,
        pooling_mode=DynamicEmbPoolingMode.NONE,
        optimizer=optimizer,
        learning_rate=0.01,
        device="cuda",
        seed=1,
    )


def measure(clock: Clock, optimizer: EmbOptimType, steps: list[torch.Tensor]) -> dict[str, Any]:
    module = make(optimizer)
    offsets = torch.arange(TABLES * IDS + 1, device="cuda")
    gradient = torch.randn(TABLES * IDS, DIM, device="cuda") * 1e-3
    for ids in steps:  # every id of the run gets its row
        module(ids, offsets)
    outputs: list[torch.Tensor] = []

    def forward(i: int) -> None:
        outputs[:] = [module(steps[i % len(steps)], offsets)]

    def backward(i: int) -> None:
        outputs[0].backward(gradient)

    def train(i: int) -> None:
        forward(i)
        backward(i)

    for i in range(5):
        train(i)
    torch.cuda.synchronize()
    result: dict[str, Any] = {}
    forwards, backwards = [], []
    for i in range(40):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        forward(i)
        events[1].record()
        backward(i)
        events[2].record()
        events[2].synchronize()
        forwards.append(events[0].elapsed_time(events[1]))
        backwards.append(events[1].elapsed_time(events[2]))
    result["forward_ms"] = statistics.median(forwards)
    result["backward_ms"] = statistics.median(backwards)
    result["train_host_ms"], result["train_device_ms"] = apart(train)
    rounds = in_a_row(train)
    result["train_ms"] = statistics.median(rounds)
    result["train_ms_rounds"] = rounds
    # Without the thread of autograd that works for a device: less time of the host.
    with torch.autograd.set_multithreading_enabled(False):
        rounds = in_a_row(train)
        result["train_host_one_thread_ms"], _ = apart(train)
    result["train_one_thread_ms"] = statistics.median(rounds)
    result["train_one_thread_ms_rounds"] = rounds
    result["kernels_us"] = kernels(train, 10)
    module.eval()
    with torch.no_grad():
        result["eval_ms"] = clock.time(forward, repeats=40, cold=False) / 1e3
        result["eval_throughput_ms"] = statistics.median(in_a_row(forward))
        # As a graph of the caller, which copies the ids of a batch to where the graph reads them.
        ids, graph = steps[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(ids, offsets)

        def replay(i: int) -> None:
            ids.copy_(steps[i % len(steps)])
            graph.replay()

        result["eval_graph_ms"] = clock.time(replay, repeats=40, cold=False) / 1e3
    return result


def in_a_row(step: Callable[[int], None]) -> list[float]:
    """Milliseconds of a step, of 100 at a time that nothing waits for."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(100):
            step(i)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begin) * 10)
    return rounds


def apart(step: Callable[[int], None], count: int = 6) -> tuple[float, float]:
    """(host, device) milliseconds of a step: queued while the device sleeps, so that neither waits
    for the other."""
    hosts, devices = [], []
    for _ in range(9):
        torch.cuda.synchronize()
        torch.cuda._sleep(30_000_000)  # clock cycles: 15 ms
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin = time.perf_counter()
        events[0].record()
        for i in range(count):
            step(i)
        events[1].record()
        hosts.append((time.perf_counter() - begin) / count * 1e3)
        events[1].synchronize()
        devices.append(events[0].elapsed_time(events[1]) / count)
    return statistics.median(hosts), statistics.median(devices)


def kernels(step: Callable[[int], None], count: int) -> dict[str, float]:
    """Microseconds per step of every kernel, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(count):
            step(i)
        torch.cuda.synchronize()
    times = {
        event.key[:60]: event.self_device_time_total / count for event in profile.key_averages()
    }
    return dict(sorted(times.items(), key=lambda item: -item[1])[:30])


def run(clock: Clock) -> dict[str, Any]:
    steps, unique = batches(20)
    result: dict[str, Any] = {
        "ids": TABLES * IDS,
        "mean_unique": unique,
        "mean_unique_expected": EXPECTED_UNIQUE,
    }
    for optimizer in (EmbOptimType.ADAM, EmbOptimType.SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        result[optimizer.value] = measure(clock, optimizer, steps)
        torch.cuda.empty_cache()
    return result
