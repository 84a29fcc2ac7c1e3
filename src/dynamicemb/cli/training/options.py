"""The options of ``dynamicemb train``."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from dynamicemb.cli.arguments import MAX_PORT, MAX_THREADS, option
from dynamicemb.errors import UsageError, check_path, wrong_value
from dynamicemb.table.base import MAX_DIM

MODEL_NAMES = ("dlrm", "deepfm", "dcn")
OPTIMIZER_NAMES = ("adagrad", "rowwise_adagrad", "sgd", "adam")
TABLE_NAMES = DYNAMIC, ZCH, HASHED = ("dynamic", "zch", "hashed")
SCORE_NAMES = ("step", "timestamp", "lfu", "timestamp_lfu", "no_eviction")

#: Options that may change between a run and its continuation.
MAY_CHANGE = frozenset(
    {
        *("out", "fresh", "plain", "report", "threads", "days", "max_examples"),
        *("checkpoint_minutes", "checkpoint_steps", "keep", "metrics_port", "tensorboard"),
        *("delta_minutes", "delta_steps"),
    }
)


def _admission(name: str, value: str) -> str:
    allowed = "none, frequency:N (N occurrences, 2 or more), probability:P (0 < P <= 1)"
    match = re.fullmatch(r"none|frequency:(\d+)|probability:(\d*\.?\d+)", value)
    if match is None or (match[1] and int(match[1]) < 2):
        raise wrong_value(name, value, allowed)
    if match[2] and not 0 < float(match[2]) <= 1:
        raise wrong_value(name, value, allowed)
    return value


TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
REMOTE = ("redis://", "rediss://", "unix://", "redis+cluster://", "redis+sentinel://")


def _ttl(name: str, value: str) -> str:
    if not re.fullmatch(r"none|[1-9]\d*(steps|s|m|h|d)", value):
        raise wrong_value(name, value, "none, Nsteps, or a time: Ns, Nm, Nh, Nd")
    return value


def _folder(name: str, value: str) -> str:
    return check_path(name, value, "a folder")


def _files(name: str, value: str) -> str:
    return check_path(name, value, "files and globs")


def _schema(name: str, value: str) -> str:
    return check_path(name, value, "criteo, or a YAML file")


def _store(name: str, value: str) -> str:
    if value.startswith("ssd:"):
        check_path(name, value[4:], "ssd:FOLDER, a folder")
        return value
    if value == "memory" or value.startswith(REMOTE):
        return value
    shown = value.rpartition("@")[2] or value  # a URL may have a password
    raise wrong_value(name, shown, f"memory, ssd:FOLDER, {', '.join(REMOTE)}")


def _device(name: str, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise wrong_value(name, value, "auto, cpu, cuda, cuda:N")
    return value


@dataclass
class TrainOptions:
    """Every option of a run; the order is that of the help."""

    # the examples
    data: list[str] = option(  # noqa: RUF009
        (),
        "Parquet, CSV or TSV files and globs instead of the built-in stream",
        many=True,
        check=_files,
    )
    schema: str | None = option(
        None, "of --data: criteo, or a YAML file that names the columns", check=_schema
    )
    days: int = option(16, "days of the built-in stream", minimum=1)
    examples_per_day: int = option(400_000, "examples of a day of the built-in stream", minimum=1)
    new_ids: int = option(
        20_000, "items born per day in the built-in stream; half as many users", minimum=1
    )
    max_examples: int | None = option(None, "stop after so many examples", minimum=1)
    batch_size: int = option(2048, "examples of a step", minimum=1)
    seed: int = option(
        0, "of the built-in stream, the rows and the dense layers", minimum=0, maximum=2**63 - 1
    )
    # the model
    model: str = option("dlrm", "the model", choices=MODEL_NAMES)
    dim: int = option(16, "columns of a row", minimum=1, maximum=MAX_DIM)
    optimizer: str = option("adagrad", "of the rows", choices=OPTIMIZER_NAMES)
    lr: float = option(0.1, "learning rate of the rows", above=0.0)
    dense_lr: float = option(0.01, "learning rate of the dense layers (Adam)", above=0.0)
    baseline: bool = option(True, "train hashed static tables of the same memory beside it")
    # the tables
    tables: list[str] = option(  # noqa: RUF009
        (DYNAMIC,),
        "dynamic tables, zch (TorchRec's managed collision, on our index), hashed static tables; "
        "several are trained side by side, and the first is the one that counts",
        choices=TABLE_NAMES,
        many=True,
    )
    capacity: int = option(
        65_536, "rows of a dynamic table at most; other kinds have its memory", minimum=1
    )
    score: str = option("step", "what decides which row makes room", choices=SCORE_NAMES)
    admission: str = option(
        "none",
        "which new ids get a row: none (all), frequency:N, probability:P",
        check=_admission,
    )
    ttl: str = option(
        "none",
        "rows not used for so long are removed: Nsteps (score step), Ns, Nm, Nh, Nd (timestamp)",
        check=_ttl,
    )
    store: str = option(
        "memory",
        "where all rows are, --capacity of them also in memory: memory, ssd:FOLDER, redis://...",
        check=_store,
    )
    init_std: float = option(0.1, "standard deviation of a new row's values", minimum=0.0)
    # the run
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:N", check=_device)
    nproc: int = option(1, "processes, each with a share of every table and batch", minimum=1)
    threads: int = option(1, "threads of torch and of the tables", minimum=1, maximum=MAX_THREADS)
    window: int = option(100_000, "examples of the sliding window of the metrics", minimum=1)
    log_every: int = option(50, "steps between two points of the metrics", minimum=1)
    out: str = option(
        "dynamicemb-run", "folder of checkpoints, metrics and the report", check=_folder
    )
    checkpoint_minutes: float = option(
        0.5, "minutes between two checkpoints; 0: none by time", minimum=0.0
    )
    checkpoint_steps: int = option(0, "steps between two checkpoints; 0: none by steps", minimum=0)
    keep: int = option(2, "checkpoints to keep", minimum=1)
    delta_minutes: float = option(
        0.0, "minutes between two deltas of the rows, for serving; 0: none by time", minimum=0.0
    )
    delta_steps: int = option(0, "steps between two deltas; 0: none by steps", minimum=0)
    fresh: bool = option(False, "start over, whatever checkpoints there are")
    plain: bool = option(False, "lines instead of the live screen")
    metrics_port: int | None = option(
        None,
        "serve the metrics for Prometheus on this port of the loopback address",
        minimum=0,
        maximum=MAX_PORT,
    )
    tensorboard: str | None = option(
        None, "folder for the metrics as TensorBoard reads them", check=_folder
    )
    report: bool = option(True, "write report.html at the end")

    @property
    def kinds(self) -> list[str]:
        """Every kind of table that is trained, the one that counts first."""
        return list(dict.fromkeys([*self.tables, *([HASHED] if self.baseline else [])]))

    @property
    def writes_deltas(self) -> bool:
        return bool(self.delta_minutes or self.delta_steps)

    def check(self) -> None:
        """Raise ``UsageError`` for options that do not go together."""
        if len(set(self.tables)) < len(self.tables):
            raise UsageError(f"--tables {' '.join(self.tables)} has a kind twice")
        if DYNAMIC not in self.tables:
            for name, value, nothing in (
                ("--admission", self.admission, "none"),
                ("--ttl", self.ttl, "none"),
                ("--store", self.store.partition(":")[0], "memory"),
                ("--delta-minutes", self.delta_minutes, 0),
                ("--delta-steps", self.delta_steps, 0),
            ):
                if value != nothing:
                    raise UsageError(
                        f"{name} is for dynamic tables; --tables is {' '.join(self.tables)}"
                    )
        if self.ttl != "none" and self.store != "memory":
            raise UsageError("--ttl is for --store memory: rows in a store do not expire")
        if ZCH in self.tables and self.score == "no_eviction":
            raise UsageError(
                "--score no_eviction is not for --tables zch, which always makes room for new ids"
            )
        static = [kind for kind in self.tables if kind != DYNAMIC]
        if self.nproc > 1 and self.optimizer == "adam" and static:
            raise UsageError(
                f"--optimizer adam is not for --tables {static[0]} in several processes: fbgemm "
                "has no such kernel on the CPU; allowed: sgd, adagrad, rowwise_adagrad"
            )

    @property
    def lifetime(self) -> dict[str, float | int]:
        """``--ttl`` as arguments of ``expire_rows``; empty for none."""
        if self.ttl == "none":
            return {}
        if self.ttl.endswith("steps"):
            return {"steps": int(self.ttl.removesuffix("steps"))}
        return {"age": int(self.ttl[:-1]) * TIMES[self.ttl[-1]]}

    def public(self) -> dict[str, Any]:
        """All options, without the user and password in a URL."""
        values = asdict(self)
        values["store"] = re.sub(r"//.*@", "//...@", self.store)
        return values

    def difference(self, other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """``{option: (theirs, ours)}`` where the run of ``other``, its public options, is not this
        one."""
        return {
            name: (other.get(name), value)
            for name, value in self.public().items()
            if name not in MAY_CHANGE and other.get(name) != value
        }
