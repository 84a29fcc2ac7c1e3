"""CPU against CUDA through whole modules: random operations on two of them, everything compared.

    PYTHONPATH=src:tests:tests/gpu python tests/gpu/module_lives.py [--seed K] [--seeds N]
        [--seconds S] [--operations N] [--skip 3,5] [--shrink] [--verbose]

A life is a function of its seed: a module and its tables, then operations. Each operation is drawn
from (seed, its number), so that ``--skip`` leaves some out and keeps the others; ``--shrink`` looks
for those that a failing life needs. Without a GPU the kernels run under Triton's interpreter, and
batches of a size that comes again as ``eager_graph.py`` replays them.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

os.environ["DYNAMICEMB_CSTM_SCORE_CHECK"] = "0"

import torch
from module_life import (
    DTYPES,
    FORMS,
    ON_GPU,
    Batch,
    Pooling,
    Score,
    Side,
    draw_form,
    draw_initializer,
    replayed,
    said,
    same,
    shaped,
)

from dynamicemb.errors import DynamicEmbError, InvalidArgumentError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import Table, cuda_batch, cuda_replay
from tables import EXTREME_IDS, contents, signed

Action = Callable[[Side], Any]
OPERATIONS = {
    "train": 40, "forward": 8, "unused": 4, "backward": 12, "step": 4, "gradients": 2,
    "evaluate": 6, "prefetch": 10, "mode": 8, "table": 25, "save": 2, "load": 3, "copied": 1,
    "dump": 3,
}  # fmt: skip
ON_TABLES = {
    "insert": 6, "assign": 5, "train": 5, "erase": 5, "find": 5, "export": 4, "clear": 1,
    "initial": 1, "expire": 2, "expire_after": 0.5, "mark": 2, "changed": 6, "log": 0.7,
    "optimizer": 1, "reserve": 1, "reset_stats": 1, "get_score": 1,
}  # fmt: skip


class Life:
    """Two modules, and the operations: each draws, notes what it does, and returns what is then
    done on both sides."""

    def __init__(self, seed: int) -> None:
        self.seed, r = seed, Random(seed)
        self.log: list[str] = []
        self.queue: list[Batch] = []  # prefetched
        self.candidate: Batch | None = None  # that may have been prefetched
        while True:
            self.form = draw_form(r)
            if not ON_GPU:  # so that ids of a bucket meet other programs, and some are sorted
                cuda_batch.PLACES, cuda_batch.COMMITTED = r.choice(((8, 16), (256, 512)))
                crowded = {"CROWDED": r.choice((3, 128, 128))}
                vars(cuda_batch).update(crowded)
                vars(cuda_replay).update(crowded)
            try:
                self.sides = [Side(self.form, cuda) for cuda in (False, True)]
                break
            except InvalidArgumentError:  # arguments that do not go together
                continue
        slots = min(200, max(one.max_capacity or 0 for one in self.form.tables))
        self.pool = [*EXTREME_IDS, *range(2, slots)]
        self.pool += [r.randrange(-(2**63), 2**63) for _ in range(slots)]
        self.sizes = [r.choice((3, 5, 8, 9, 10, 24, 40)) for _ in range(r.choice((1, 1, 2, 4)))]
        self.bags = r.choice((1, 2, 3))
        self.score = r.choice((0, 1, 1, 100, 2**63 - 3))
        for table in range(len(self.form.tables)):
            self.set_score(table)

    # ---- what operations are made of ----

    def note(self, *words: object) -> None:
        self.log[-1] += f" {' '.join(map(str, words))};"

    def set_score(self, table: int) -> None:
        for side in self.sides:
            one = side.module.tables[table]
            if self.score and one.options.score_strategy is Score.CUSTOMIZED:
                one.set_score(self.score)

    def ids(self, r: Random, n: int) -> torch.Tensor:
        how, pool = r.random(), self.pool
        if how < 0.2:  # hot ones
            few = r.sample(pool, 2)
            ids = [r.choice(few) if r.random() < 0.9 else r.choice(pool) for _ in range(n)]
        elif how < 0.5 and n <= len(pool):
            ids = r.sample(pool, n)
        else:
            ids = [pool[int(len(pool) * r.random() ** 2)] for _ in range(n)]
        return torch.tensor(ids, dtype=torch.int64)

    def counts(self, r: Random, n: int) -> torch.Tensor:
        return torch.tensor([r.choice((1, 2, 300)) for _ in range(n)], dtype=torch.int64)

    def noise(self, r: Random, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(r.randrange(2**32)))

    def batch(self, r: Random) -> Batch:
        n = r.choice(self.sizes) if r.random() < 0.8 else r.choice((0, 1, 5, 8, 9, 10, 33, 100))
        n = r.choice((300, 600)) if r.random() < 0.03 else n
        bags = self.bags if r.random() < 0.8 else r.choice((1, 4))
        cuts = sorted(r.choices(range(n + 1), k=bags * sum(self.form.features) - 1))
        dtype = r.choice((torch.int64, torch.int64, torch.int32))
        forms = r.choice((*FORMS, "unsigned")), r.choice(FORMS)
        rows = r.choice((0, 0, 1, 2)) if n and n % 2 == 0 else 0
        return Batch(self.ids(r, n), torch.tensor([0, *cuts, n], dtype=dtype), forms, rows)

    def next_batch(self, r: Random) -> Batch:
        training = self.sides[0].module.training
        return self.queue[0] if self.queue and training and r.random() < 0.95 else self.batch(r)

    def weights(self, r: Random, batch: Batch) -> torch.Tensor | None:
        mean = self.form.kind == "bag" and self.form.pooling is Pooling.MEAN
        if self.form.pooling is Pooling.NONE or mean or r.random() < 0.5:
            return None
        dtype = r.choice((torch.float32, torch.float32, torch.float16, torch.float64))
        return self.noise(r, len(batch.ids)).to(dtype)

    def call(self, r: Random, batch: Batch, *, keep: bool = False) -> Action:
        """Run the module; ``keep``: for backward."""
        weights, wanted, strided = self.weights(r, batch), r.random() < 0.6, r.random() < 0.3
        self.note(batch, "" if weights is None else f"{weights.dtype} weights")

        def action(side: Side) -> Any:
            ids, offsets = batch.placed(side)
            own = None
            if weights is not None:
                own = weights.to(side.device, copy=True)
                own = shaped(own, "strided", side.device) if strided else own
                own.requires_grad_(wanted)
            if self.form.kind == "batched":
                out = side.module(ids, offsets, own)
            elif self.form.kind == "embedding":
                out = side.module(ids.view(batch.rows, -1) if batch.rows else ids)
            elif batch.rows:
                both = None if own is None else own.view(batch.rows, -1)
                out = side.module(ids.view(batch.rows, -1), None, both)
            else:
                out = side.module(ids, offsets[: None if self.form.last_offset else -1], own)
            if keep and out.requires_grad:
                side.waiting = [*side.waiting[-3:], (out, own)]
            return out.detach().clone()

        return action

    # ---- operations ----

    def forward(self, r: Random) -> Action:
        return self.call(r, self.next_batch(r), keep=True)

    def unused(self, r: Random) -> Action:
        """A forward of training that nothing goes back through."""
        how, run = r.choice((torch.no_grad, torch.enable_grad)), self.call(r, self.next_batch(r))

        def action(side: Side) -> Any:
            with how():
                return run(side)

        return action

    def backward(self, r: Random) -> Action:
        place, number = r.randrange(4), r.randrange(2**32)
        kind, scale = r.choice(("drawn",) * 3 + ("sum", "turned")), r.choice((1.0, 1.0, 1e-3, 0.0))
        of_two, of_weights = r.random() < 0.1, r.random() < 0.05
        self.note(f"{place}, gradient {kind} * {scale}{' of two' * of_two}")

        def gradient(out: torch.Tensor) -> torch.Tensor:
            if kind == "sum":
                return torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
            drawn = self.noise(Random(number), *out.shape).mul(scale).to(out)
            return drawn.mT.contiguous().mT if kind == "turned" and out.dim() > 1 else drawn

        def action(side: Side) -> Any:
            if not side.waiting:
                return None
            out, weights = side.waiting.pop(place % len(side.waiting))
            if of_weights and weights is not None and weights.requires_grad:
                return torch.autograd.grad(out, [weights], gradient(out)), side.norm()
            some = [(out, weights)]
            if of_two and side.waiting:
                some.append(side.waiting.pop())
            torch.autograd.backward([out for out, _ in some], [gradient(out) for out, _ in some])
            return [None if one is None else one.grad for _, one in some], side.norm()

        return action

    def train(self, r: Random) -> Action:
        done = [self.forward(r), self.backward(r)]
        if self.form.training != "fused" and r.random() < 0.7:
            done.append(self.step(r))
        return lambda side: [one(side) for one in done]

    def step(self, r: Random) -> Action:
        zeroed = r.choice((None, True, True, False))
        self.note("zero_grad", zeroed)

        def action(side: Side) -> Any:
            if side.optimizer is None:
                return self.form.training == "fused" or side.module.step()
            side.optimizer.step()
            if zeroed is not None:
                side.optimizer.zero_grad(set_to_none=zeroed)
            return side.norm()

        return action

    def gradients(self, r: Random) -> Action:
        """They are halved (they and their norm stay exact) or forgotten."""
        how = r.choice(("zero", "none", "half"))
        self.note(how)

        def action(side: Side) -> Any:
            if how != "half":
                side.module.zero_grad(set_to_none=how == "none")
            elif side.module.handle.grad is not None:
                side.module.handle.grad.mul_(0.5)
            return side.norm()

        return action

    def evaluate(self, r: Random) -> Action:
        run = self.call(r, self.batch(r))

        def action(side: Side) -> Any:
            before = side.module.training
            side.module.eval()
            try:
                return run(side)
            finally:
                side.module.train(before)

        return action

    def prefetch(self, r: Random) -> Action:
        if not self.form.prefetches:
            return self.evaluate(r)
        self.candidate = batch = self.batch(r)
        counts = self.counts(r, len(batch.ids)) if r.random() < 0.4 else None
        self.note(batch, "with counts" * (counts is not None))

        def action(side: Side) -> Any:
            own = None if counts is None else counts.to(side.device)
            return side.module.prefetch(*batch.placed(side), frequency_counters=own)

        return action

    def mode(self, r: Random) -> Action:
        """Learning rates, the clock, scores, types of outputs, frozen rows, evaluation."""
        what = r.choice(("lr", "lr", "clock", "clock", "score", "score", "dtype", "frozen", "eval"))
        lr, dtype, back = r.choice((0.0, 0.05, 0.5)), r.choice(DTYPES), r.random() < 0.6
        tick, jump = r.choice((1, 1, 7, 1000, -5, 2**40)), r.random() < 0.05
        if what == "score":
            self.score = min(max(self.score + r.choice((0, 1, 1, 9, -3, 2**60)), 1), 2**64 - 1)
            self.set_score(r.randrange(len(self.form.tables)))
        self.note(what, {"lr": lr, "dtype": dtype, "clock": tick, "score": self.score}.get(what))

        def action(side: Side) -> Any:
            module, clock = side.module, side.module.tables[0]._clock_function
            if what == "lr" and side.optimizer is not None:
                side.optimizer.param_groups[0]["lr"] = lr
            elif what == "lr":
                module.set_learning_rate(lr)
            elif what == "clock":
                clock.time = 2**63 - 2 if jump else max(clock.time + tick, 0)
            elif what == "dtype":
                module.to(dtype)
            elif what == "frozen":
                module.handle.requires_grad_(back)
            elif what == "eval":
                module.train(back)

        return action

    def rows(self, r: Random, n: int) -> Callable[[Table], dict[str, Any]]:
        """Rows to give to a table."""
        stated, scored, number = r.random() < 0.4, r.random() < 0.5, r.randrange(2**32)
        top = r.choice((3, 1000, 2**62))
        words = torch.tensor([signed(r.randint(0, top)) for _ in range(2 * n)], dtype=torch.int64)

        def given(table: Table) -> dict[str, Any]:
            own, device = Random(number), table.device
            rows = {"embeddings": self.noise(own, n, table.dim).to(device, table.dtype)}
            if stated:
                rows["state"] = self.noise(own, n, table.state_dim).abs().to(device)
            if scored:
                shape = (n,) if table.score_words == 1 else (n, 2)
                rows["scores"] = words[: math.prod(shape)].view(shape).to(device)
            return rows

        return given

    def table(self, r: Random) -> Action:
        """Something that is done to one table."""
        what = r.choices(list(ON_TABLES), list(ON_TABLES.values()))[0]
        t, n = r.randrange(len(self.form.tables)), r.choice((0, 1, 3, 8, 9, 20, 60))
        ids, counts, rows = self.ids(r, n), self.counts(r, n), self.rows(r, n)
        initializer = r.choice((None, draw_initializer(r)))
        form, number = r.choice((*FORMS, "unsigned")), r.randrange(60)
        evicted, flag = r.random() < 0.5, r.random() < 0.5
        threshold = r.choice((0, 1, 5, 100, 2**63, 2**64 - 1, self.score))
        limit = threshold if flag else None
        accumulated = r.choice((0.0, 0.1, 0.25))
        kind = r.choice([one for one in OptimizerKind if one is not OptimizerKind.SMART_DECAY_ADAM])
        self.note(what, f"t{t}: {n} ids {ids.tolist()[:6]} {form} {number} {threshold} {flag}")

        def action(side: Side) -> Any:
            table, own = side.module.tables[t], shaped(ids, form, side.device)
            if what == "insert":
                out = table.insert(own, return_evicted=evicted, **rows(table))
                return out.written, vars(out.evicted) if evicted else None
            if what == "assign":
                return table.assign(own, **rows(table))
            if what == "train":
                given = counts.to(side.device) if flag else None
                batch = table.find_or_insert(own, counts=given, return_evicted=evicted)
                gone = vars(batch.evicted) if evicted else None
                return batch.embeddings, batch.slots, gone
            if what == "find":
                found = vars(table.find(own))
                return found, table.find_slots(own), table.contains(own)
            if what == "initial":
                return table.initial_rows(own, initializer)
            if what == "export":
                return vars(contents(table, batch_size=number, score_threshold=limit))
            if what == "expire":
                return table.expire(threshold, slots=number)
            if what == "expire_after":
                steps = table.options.score_strategy is Score.STEP
                return table.expire_after(**({"steps": 3} if steps else {"age": 1e-7}))
            if what == "optimizer":  # which a torch.optim class would set again
                args = OptimizerArgs(learning_rate=0.05, initial_accumulator_value=accumulated)
                torch_sets = self.form.training == "torch"
                return torch_sets or table.set_optimizer(Optimizer(kind, args))
            if what == "mark":
                side.marks[t].append(table.mark_changes())
            elif what == "changed" and side.marks[t] and not self.form.prefetches:
                mark = side.marks[t][number % len(side.marks[t])]
                changed = vars(contents(table, changed_since=mark, score_threshold=limit))
                return changed, table.logs_removals and table.removed_since(mark)
            elif what == "log":
                return table.log_removals(100 if flag else None)
            elif what != "changed":
                takes: dict[str, tuple[Any, ...]] = {"reserve": (number,), "erase": (own,)}
                return getattr(table, what)(*takes.get(what, ()))
            return None

        return action

    def save(self, r: Random) -> Action:
        def action(side: Side) -> Any:
            side.saved = side.module.state_dict()
            return [item for item in side.saved.items() if item[0] != "handle"]

        return action

    def load(self, r: Random) -> Action:
        """What was saved; or each the content of the other."""
        crossed = r.random() < 0.4
        self.note("crossed" * crossed)
        saved = [side.module.state_dict() if crossed else side.saved for side in self.sides]
        given = dict(zip(self.sides, reversed(saved) if crossed else saved, strict=True))

        def action(side: Side) -> Any:
            state = given[side]
            if state is None:
                return None
            moved = {
                name: value if name.endswith("meta") else value.to(side.device)
                for name, value in state.items()
            }
            return str(side.module.load_state_dict(moved))

        return action

    def copied(self, r: Random) -> Action:
        """A deep copy, which may take the place of the module."""
        stays = r.random() < 0.5
        self.note("used from now on" * stays)

        def action(side: Side) -> Any:
            before, side.module = side.module, copy.deepcopy(side.module)
            state = side.state()
            if stays:
                side.adopt(side.module)
            else:
                side.module = before
            return state

        return action

    def dump(self, r: Random) -> Action:
        """Incremental dumps, scores and rows by table name."""
        what, place = r.choice(("dump", "dump", "score", "rows")), r.randrange(4)
        self.note(what)

        def action(side: Side) -> Any:
            module, known = side.module, side.thresholds
            if self.form.kind != "batched":
                return None
            if what == "rows":
                return module.export_keys_values(module.table_names[-1], batch_size=7)
            if what == "score":
                known.append(module.get_score())
                return known[-1]
            asked = known[place % len(known)] if known else dict.fromkeys(module.table_names, 0)
            rows, scores = module.incremental_dump(asked)
            known.append(scores)
            return None if self.form.prefetches else rows, scores

        return action

    # ---- living ----

    def both(self, action: Action) -> None:
        """Do it on both sides and compare what they say: results, refusals, warnings."""
        answers = []
        for side in self.sides:
            side.prepare()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    result, refusal = action(side), None
                except (DynamicEmbError, RuntimeError) as error:
                    if not isinstance(error, DynamicEmbError) and "loading" not in str(error):
                        raise
                    result, refusal = None, f"{type(error).__name__}: {said(error)}"
            warned = [said(one.message) for one in caught if "table '" in str(one.message)]
            answers.append((result, refusal, sorted(warned)))
        if answers[0][1]:
            self.note(answers[0][1])
        text = same(*answers)
        assert not text, f"result {text}"

    def operate(self, number: int) -> None:
        r = Random(f"{self.seed}/{number}")
        name = r.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        self.log.append(f"{number} {name}")
        self.candidate = None
        self.both(getattr(self, name)(r))
        left, there = (side.module.prefetched for side in self.sides)
        assert left == there, f"{left} and {there} batches are prefetched"
        if left > len(self.queue) and self.candidate is not None:
            self.queue.append(self.candidate)
        self.queue = self.queue[len(self.queue) - left :]
        if r.random() < 0.4:
            self.compare()

    def compare(self) -> None:
        text = same(*(side.state() for side in self.sides))
        assert not text, f"state {text}"


def live(seed: int, operations: int, skipped: frozenset[int]) -> tuple[str, Life]:
    """A life, and what differed in it."""
    life, number = Life(seed), 0
    try:
        for number in range(operations):
            if number not in skipped:
                life.operate(number)
        life.compare()
    except AssertionError as error:
        return f"operation {number}: {error}", life
    except Exception:
        return f"operation {number}: {traceback.format_exc()[-1500:]}", life
    return "", life


def shrink(seed: int, operations: int, skipped: frozenset[int]) -> frozenset[int]:
    """Operations without which a failing life fails as well."""
    for size in (16, 8, 4, 2, 1):
        for begin in range(0, operations, size):
            tried = skipped | set(range(begin, min(begin + size, operations)))
            if tried != skipped and live(seed, operations, tried)[0]:
                skipped = tried
    return skipped


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--seeds", type=int, default=10**9, help="lives at most")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--operations", type=int, default=50, help="of each life")
    parser.add_argument("--skip", default="", help="operations that are left out")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show lives that do not fail, too")
    args = parser.parse_args()
    if args.seeds == 10**9 and args.seconds == math.inf:
        parser.error("--seeds or --seconds is needed")
    skipped = frozenset(int(one) for one in args.skip.split(",") if one)
    begin, lives, done, failures = time.perf_counter(), 0, 0, 0
    for seed in range(args.seed, args.seed + args.seeds):
        if time.perf_counter() - begin > args.seconds:
            break
        text, life = live(seed, args.operations, skipped)
        if text and args.shrink:
            last = int(text.split(":")[0].split()[1]) + 1
            text, life = live(seed, last, shrink(seed, last, skipped))
        lives, done, failures = lives + 1, done + len(life.log), failures + bool(text)
        if text or args.verbose:
            title = f"seed {seed}: {text or 'equal'}"
            print(title, life.form, *life.log, sep="\n  ", flush=True)
    where = "a GPU" if ON_GPU else "the interpreter"
    seconds = time.perf_counter() - begin
    print(f"{done} operations, {replayed[0]} replayed batches on {where} in {seconds:.0f} s")
    print(f"{lives} module lives, {failures} failures", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
