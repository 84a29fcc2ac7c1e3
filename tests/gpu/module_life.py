"""What ``module_lives.py`` draws and compares: modules, batches, their whole content."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import eager_graph  # noqa: E402
from lives import COUNTED, difference  # noqa: E402

import dynamicemb as de  # noqa: E402
from dynamicemb.errors import UsageError  # noqa: E402
from dynamicemb.options import MAX_BUCKET_CAPACITY  # noqa: E402
from dynamicemb.table import create, cuda_batch, cuda_replay  # noqa: E402
from tables import Clock, contents  # noqa: E402

if not ON_GPU:
    import interpreter

Score, Mode, Pooling = (
    de.DynamicEmbScoreStrategy, de.DynamicEmbInitializerMode, de.DynamicEmbPoolingMode
)  # fmt: skip
PAIRS = ((Score.TIMESTAMP, Score.LFU), (Score.LFU, Score.TIMESTAMP))
SIMPLE = (Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, Score.LFU, PAIRS[0])
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
RULES = (
    *("sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad"),
    *("partial_row_wise_adam", "momentum_sgd", "ftrl"),
)
TORCH_OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
)
replayed = [0]  # batches so far


class _Counted(cuda_batch.Batch):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        replayed[0] += settings.get("replayed", False)


vars(cuda_replay)["Batch"] = _Counted


class Picky(de.AdmissionStrategy):
    """Admits by id and count, and writes the rows of those that it rejects itself."""

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return (keys % 3 != 0) | (frequencies > 1)

    def initialize_non_admitted_embeddings(
        self, buffer: torch.Tensor, indices: torch.Tensor
    ) -> None:
        buffer[indices] = 0.25


class Moody(Picky):
    """Refuses to answer now and then."""

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        if int(keys.sum()) % 7 == 0:
            raise UsageError("not today")
        return super().admit(keys, frequencies)


@dataclass
class Form:
    """What a module is; drawn once, made twice. ``training``: "fused", "step" or "torch"."""

    kind: str
    tables: list[de.DynamicEmbTableOptions]
    features: list[int]
    pooling: de.DynamicEmbPoolingMode
    output: torch.dtype
    training: str
    rule: str
    args: dict[str, Any]
    torch_optimizer: int
    padding: int | None
    last_offset: bool
    prefetches: bool
    replays: bool
    tick: int
    seed: int

    def __str__(self) -> str:
        """Without what is as always."""
        usual = vars(de.DynamicEmbTableOptions())
        tables = [{k: v for k, v in vars(t).items() if v != usual[k]} for t in self.tables]
        own = {name: value for name, value in vars(self).items() if name != "tables"}
        return "\n  ".join(map(str, (own, *tables)))


def draw_initializer(r: Random) -> de.DynamicEmbInitializerArgs:
    mode = r.choice(list(Mode))
    settings: dict[str, Any] = {
        Mode.CONSTANT: {"value": r.choice((0.0, 0.5, -3.0))},
        Mode.NORMAL: {"mean": 0.5, "std_dev": r.choice((0.1, 1.0))},
        Mode.DEBUG: {},
    }.get(mode, {"lower": -0.5, "upper": r.choice((0.5, None))})
    return de.DynamicEmbInitializerArgs(mode=mode, **settings)


def draw_table(r: Random, dim: int, simple: bool) -> de.DynamicEmbTableOptions:
    """``simple``: one whose batches can be replayed."""
    widths = (16, 16, 16, 32, 32, 48, 64, 128)
    width = r.choice(widths if simple else (*widths, 2048, MAX_BUCKET_CAPACITY))
    rows = r.choice((16, 100)) if width == MAX_BUCKET_CAPACITY else width * r.choice((1, 1, 2, 3))
    rows = min(rows, 2048)
    options: dict[str, Any] = {}
    kind = None if simple else r.choice((None,) * 4 + ("frequency", "probability", "picky"))
    rejected = r.choice((None, draw_initializer(r)))
    if kind == "frequency":
        options["admit_strategy"] = de.FrequencyAdmissionStrategy(r.choice((2, 3)), rejected)
        width_ = r.choice((16, 1024))
        options["admission_counter"] = de.KVCounter(r.choice((16, 4096)), bucket_capacity=width_)
    elif kind == "probability":
        options["admit_strategy"] = de.ProbabilityAdmissionStrategy(0.5, 7, rejected)
    elif kind == "picky":
        options["admit_strategy"] = r.choice((Picky(), Moody()))
    check = de.DynamicEmbCheckMode
    missing = de.DynamicEmbInitializerArgs(mode=Mode.CONSTANT, value=r.choice((0.0, 1.5)))
    return de.DynamicEmbTableOptions(
        dim=dim,
        max_capacity=rows,
        init_capacity=None if simple else r.choice((None, None, 1, max(1, rows // 3))),
        max_load_factor=r.choice((0.5, 0.75, 0.9, 1.0, 0.0)),
        bucket_capacity=width,
        embedding_dtype=r.choice(DTYPES),
        score_strategy=r.choice(SIMPLE if simple else [*Score, *PAIRS]),
        initializer_args=draw_initializer(r),
        eval_initializer_args=missing,
        safe_check_mode=r.choice((*(check.IGNORE,) * 6, *check)),
        **options,
    )


def draw_args(r: Random, rule: str) -> dict[str, Any]:
    some: dict[str, Any] = {
        "stochastic_rounding": False, "gradient_clipping": True, "max_gradient": 0.5,
        "eps": 1e-3, "beta1": 0.5, "beta2": 0.9, "weight_decay": 0.05, "maximize": True,
        "weight_decay_mode": 1, "initial_accumulator_value": 0.1, "momentum": 0.5,
    }  # fmt: skip
    if rule == "ftrl":
        some |= {"lambda1": 0.01, "lambda2": 0.1, "beta": 1.0}
    if rule == "momentum_sgd":
        some |= r.choice(({"nesterov": True}, {"dampening": 0.1}))
    if "adagrad" in rule:
        some |= {"lr_decay": 0.1}
    args = {name: value for name, value in some.items() if r.random() < 0.25}
    if r.random() < 0.1 and rule != "ftrl":
        args |= {"weight_decay": 0.05, "weight_decay_mode": 2}
    return {"learning_rate": r.choice((0.01, 0.1, 1.0)), **args}


def draw_form(r: Random) -> Form:
    kind = r.choice(("batched",) * 4 + ("embedding", "bag"))
    pooling = r.choice(list(Pooling))
    if kind != "batched":
        bagged = r.choice((Pooling.SUM, Pooling.MEAN))
        pooling = Pooling.NONE if kind == "embedding" else bagged
    count = r.choice((1, 1, 2, 3, 4)) if kind == "batched" else 1
    dims = r.choices((1, 3, 4, 5, 8, 12, 20, 33), k=count)
    if pooling is Pooling.NONE or r.random() < 0.3:
        dims = dims[:1] * count
    simple = r.random() < 0.5
    tables = [draw_table(r, dim, simple) for dim in dims]
    if r.random() < 0.3 and len(set(dims)) == 1:  # one class of tables, one launch
        tables = tables[:1] * count
    rule, training = r.choice(RULES), r.choice(("fused", "fused", "step", "torch"))
    return Form(
        kind=kind,
        tables=tables,
        features=[r.choice((1, 1, 2, 3)) for _ in dims] if kind == "batched" else [1],
        pooling=pooling,
        output=r.choice(DTYPES),
        training=training,
        rule=rule,
        args=draw_args(r, rule),
        torch_optimizer=r.randrange(len(TORCH_OPTIMIZERS)),
        padding=r.choice((None, -1, 0)) if kind != "batched" else None,
        last_offset=r.random() < 0.5,
        prefetches=kind == "batched" and r.random() < 0.5,
        replays=simple or r.random() < 0.5,
        tick=r.choice((0, 1, 1)),
        seed=r.randrange(2**63),
    )


class Side:
    """One of the two modules, and what hangs on it."""

    def __init__(self, form: Form, cuda: bool) -> None:
        self.form, self.cuda = form, cuda
        self.device = torch.device("cuda" if cuda and ON_GPU else "cpu")
        usual = create._new_table
        if cuda and not ON_GPU:
            interpreter.use_for_all_tables()
        try:
            module = self._made()
        finally:
            create._new_table = usual
        self.device = module.device
        clock = Clock(step=form.tick)
        for table in module.tables:
            table._clock_function = clock
        self.saved: dict[str, Any] | None = None
        self.adopt(module)

    def _made(self) -> Any:
        form, fused = self.form, self.form.training == "fused"
        if form.kind == "batched":
            features = [t for t, n in enumerate(form.features) for _ in range(n)]
            return de.BatchedDynamicEmbeddingTables(
                form.tables, None, features, pooling_mode=form.pooling, output_dtype=form.output,
                device=self.device, optimizer=form.rule, seed=form.seed, separate_step=not fused,
                **form.args,
            )  # fmt: skip
        options: dict[str, Any] = {
            "options": form.tables[0], "seed": form.seed, "device": self.device, "name": "t0",
            "padding_idx": form.padding, "output_dtype": form.output,
        }  # fmt: skip
        if fused:
            options |= {"optimizer": form.rule, "optimizer_args": de.OptimizerArgs(**form.args)}
        dim = form.tables[0].dim
        assert dim is not None
        if form.kind == "embedding":
            return de.DynamicEmbedding(dim, **options)
        mode = form.pooling.name.lower()
        return de.DynamicEmbeddingBag(
            dim, mode=mode, include_last_offset=form.last_offset, **options
        )

    def adopt(self, module: Any) -> None:
        """Go on with this module."""
        self.module = module
        self.waiting: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # for backward
        self.marks: list[list[int]] = [[] for _ in module.tables]
        self.thresholds: list[dict[str, int]] = []
        self.optimizer: torch.optim.Optimizer | None = None
        if self.form.training == "torch":
            self.optimizer = TORCH_OPTIMIZERS[self.form.torch_optimizer](module.parameters())

    def prepare(self) -> None:
        """Replay batches where the form says so; groups are made anew now and then."""
        if self.cuda:
            for group in (self.module._group, *(table.group for table in self.module.tables)):
                if not self.form.replays:
                    group._replay._works = False
                elif not ON_GPU and not group._replay._works:
                    eager_graph.use_for(group._replay)

    def state(self) -> list[Any]:
        """Everything in the module and its tables."""
        state = self.module.state_dict().items()
        parts: list[Any] = [(name, value) for name, value in state if name != "handle"]
        for table in self.module.tables:
            stats, ids = table.stats(), contents(table).ids.to(self.device)
            parts += [(name, getattr(stats, name)) for name in (*COUNTED, "capacity")]
            parts += sorted(asdict(table.progress()).items())
            parts += [("slots", table.find_slots(ids)), ("len", len(table))]
            parts += [("optimizer", table.optimizer.kind.name)]
        return [*parts, ("prefetched", self.module.prefetched)]

    def norm(self) -> Near | None:
        """What the handle says of gradients."""
        grad = self.module.handle.grad
        return None if grad is None else Near(float(grad))


class Near(float):
    """A number that is added in another order."""

    def is_near(self, other: Near) -> bool:
        if math.isfinite(self) and math.isfinite(other):
            return math.isclose(self, other, rel_tol=1e-5)
        return not math.isfinite(self) and not math.isfinite(other)


def same(a: Any, b: Any) -> str | None:
    """What differs, if anything does. NaNs are equal: they keep no payload through float16."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = a.detach().cpu(), b.detach().cpu()
        if a.dtype == b.dtype and a.shape == b.shape:
            x, y = a, b
            if a.is_floating_point():
                size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
                nan = torch.isnan(a) & torch.isnan(b)
                x, y = (one.contiguous().masked_fill(nan, 0).view(size) for one in (a, b))
            if torch.equal(x, y):
                return None
        return difference(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        found = ((place, same(x, y)) for place, (x, y) in enumerate(zip(a, b, strict=True)))
        name = a[0] if a and isinstance(a[0], str) else ""
        return next((f"{name}[{place}] {text}" for place, text in found if text), None)
    if isinstance(a, dict) and isinstance(b, dict):
        return same(sorted(a.items()), sorted(b.items()))
    if isinstance(a, Near) and isinstance(b, Near):
        return None if a.is_near(b) else f"{a} and {b}"
    return None if type(a) is type(b) and a == b else f"{a!r:.300} and {b!r:.300}"


def said(error: object) -> str:
    """A message, without what is another number elsewhere: devices and marks."""
    text = str(error).replace("cuda:0", "cpu")
    return re.sub(r"(mark|since) \d+", r"\1 some", text)


def shaped(tensor: torch.Tensor, form: str, device: torch.device) -> torch.Tensor:
    """The same numbers with gaps between them, or at an odd address, or unsigned."""
    tensor = tensor.to(device)
    if form == "strided":
        return torch.stack((tensor, torch.zeros_like(tensor)), 1)[:, 0]
    if form == "misaligned":
        return torch.cat((tensor[:1], tensor))[min(1, len(tensor)) :]
    return tensor.view(torch.uint64) if form == "unsigned" else tensor


FORMS = ("plain",) * 4 + ("strided", "misaligned")


@dataclass
class Batch:
    """Ids and bags of a call; ``rows``: of a two-dimensional input, 0 for one of one dimension."""

    ids: torch.Tensor
    offsets: torch.Tensor
    forms: tuple[str, str]
    rows: int

    def placed(self, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        ids = shaped(self.ids, self.forms[0], side.device)
        return ids, shaped(self.offsets, self.forms[1], side.device)

    def __str__(self) -> str:
        ids = f"{len(self.ids)} ids {self.ids.tolist()[:6]}"
        return f"{ids}, {len(self.offsets) - 1} bags, {'/'.join(self.forms)}"
