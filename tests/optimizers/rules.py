"""The update rules in plain NumPy, in double precision, on the rows that a step touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dynamicemb import DynamicEmbedding, OptimizerArgs

Array = np.ndarray


def new_state(rule: str, dim: int, args: OptimizerArgs) -> dict[str, Array]:
    start = args.initial_accumulator_value
    return {
        "sgd": {},
        "momentum_sgd": {"m": np.zeros(dim)},
        "adam": {"m": np.zeros(dim), "v": np.zeros(dim)},
        "exact_adagrad": {"G": np.full(dim, start)},
        "exact_row_wise_adagrad": {"G": np.full((), start)},
        "partial_row_wise_adam": {"m": np.zeros(dim), "v": np.zeros(())},
        "ftrl": {"z": np.zeros(dim), "n": np.full(dim, start)},
        "smart_decay_adam": {"m": np.zeros(dim), "v": np.zeros(dim), "last": np.zeros(())},
    }[rule]


def update(
    rule: str, w: Array, s: dict[str, Array], g: Array, args: OptimizerArgs, step: int
) -> Array:
    """The row after one update with the summed gradient ``g``; ``s`` changes in place."""
    lr = args.learning_rate
    if "adagrad" in rule:
        lr /= 1 + (step - 1) * args.lr_decay
    if args.maximize:
        g = -g
    decoupled = args.weight_decay_mode == 2 or (args.weight_decay_mode == 0 and "adam" in rule)
    if decoupled:
        w = w * (1 - lr * args.weight_decay)
    else:
        g = g + args.weight_decay * w
    if rule == "sgd":
        return w - lr * g
    if rule == "momentum_sgd":
        keep = 1.0 - (args.dampening if step > 1 else 0.0)
        s["m"] = args.momentum * s["m"] + keep * g
        return w - lr * (g + args.momentum * s["m"] if args.nesterov else s["m"])
    if rule.endswith("adagrad"):
        s["G"] = s["G"] + (np.mean(g * g) if "row_wise" in rule else g * g)
        return w - lr * g / (np.sqrt(s["G"]) + args.eps)
    if rule == "smart_decay_adam":
        b1, b2, passed = args.beta1, args.beta2, step - int(s["last"])
        missed = s["m"] * sum(b1**skipped for skipped in range(1, passed))
        s["m"] = b1**passed * s["m"] + (1 - b1) * g
        s["v"] = b2**passed * s["v"] + (1 - b2) * g * g
        s["last"] = np.array(step)
        return w - lr * (s["m"] + missed) / (np.sqrt(s["v"]) + args.eps)
    if rule.endswith("adam"):
        b1, b2 = args.beta1, args.beta2
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = b2 * s["v"] + (1 - b2) * (np.mean(g * g) if "row_wise" in rule else g * g)
        m, v = s["m"] / (1 - b1**step), s["v"] / (1 - b2**step)
        return w - lr * m / (np.sqrt(v) + args.eps)
    assert rule == "ftrl"
    sigma = (np.sqrt(s["n"] + g * g) - np.sqrt(s["n"])) / lr
    s["z"] = s["z"] + g - sigma * w
    s["n"] = s["n"] + g * g
    shrunk = np.sign(s["z"]) * np.maximum(np.abs(s["z"]) - args.lambda1, 0)
    return -shrunk / ((args.beta + np.sqrt(s["n"])) / lr + args.lambda2)


class Reference:
    """Rows of a dictionary, updated by :func:`update`."""

    def __init__(self, rule: str, dim: int, args: OptimizerArgs) -> None:
        self.rule, self.dim, self.args = rule, dim, args
        self.rows: dict[int, Array] = {}
        self.state: dict[int, dict[str, Array]] = {}
        self.steps = 0

    def add(self, id_: int, row: Sequence[float]) -> None:
        self.rows[id_] = np.array(row, dtype=np.float64)
        self.state[id_] = new_state(self.rule, self.dim, self.args)

    def step(self, ids: Sequence[int], gradients: Array) -> None:
        self.steps += 1
        if self.args.gradient_clipping:
            gradients = np.clip(gradients, -self.args.max_gradient, self.args.max_gradient)
        sums: dict[int, Array] = {}
        for id_, gradient in zip(ids, gradients, strict=True):
            sums[id_] = sums.get(id_, 0.0) + gradient
        for id_, gradient in sums.items():
            self.rows[id_] = update(
                self.rule, self.rows[id_], self.state[id_], gradient, self.args, self.steps
            )

    def flat_state(self, id_: int) -> Array:
        """The state in the order of the table's columns."""
        parts = [np.atleast_1d(part) for part in self.state[id_].values()]
        if self.rule == "smart_decay_adam":  # an even number of floats, then 64 bits
            parts[2:] = [np.zeros(self.dim % 2), parts[2].astype(np.int64).view(np.float32)]
        return np.concatenate(parts) if parts else np.zeros(0)


def run_beside_reference(
    rule: str,
    dim: int,
    arguments: dict[str, float | bool | int],
    *,
    steps: int = 8,
    batch: int = 14,
    pool: int = 9,
    change: Callable[[int, DynamicEmbedding, OptimizerArgs], None] | None = None,
) -> tuple[DynamicEmbedding, Reference]:
    """Train a fused module and the reference on the same random batches, with duplicates.

    ``change(step, module, args of the reference)`` may change a number before a step.
    """
    draw = torch.Generator().manual_seed(dim)
    args = OptimizerArgs(**arguments)  # type: ignore[arg-type]
    module = DynamicEmbedding(dim, optimizer=rule, optimizer_args=args, seed=dim)
    reference = Reference(rule, dim, OptimizerArgs(**arguments))  # type: ignore[arg-type]
    ids_of = torch.randint(-(2**62), 2**62, (pool,), generator=draw)
    module.table.find_or_insert(ids_of)
    for id_, row in zip(ids_of.tolist(), module.table.find(ids_of).embeddings, strict=True):
        reference.add(id_, row.tolist())
    for step in range(steps):
        if change is not None:
            change(step, module, reference.args)
        ids = ids_of[torch.randint(0, pool, (batch,), generator=draw)]
        gradient = torch.randn(batch, dim, generator=draw)
        module(ids).backward(gradient)
        reference.step(ids.tolist(), gradient.double().numpy())
    return module, reference


def assert_equal(module: DynamicEmbedding, reference: Reference, tolerance: float = 2e-5) -> None:
    """Rows and state agree within single precision."""
    ids = list(reference.rows)
    found = module.table.find(torch.tensor(ids))
    assert found.found.all()
    rows = np.stack([reference.rows[id_] for id_ in ids])
    np.testing.assert_allclose(found.embeddings.numpy(), rows, rtol=tolerance, atol=tolerance)
    state = np.stack([reference.flat_state(id_) for id_ in ids])
    assert found.state.shape == state.shape
    np.testing.assert_allclose(found.state.numpy(), state, rtol=tolerance, atol=tolerance)
