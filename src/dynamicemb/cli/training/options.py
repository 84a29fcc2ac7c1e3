"""The options of ``dynamicemb train``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dynamicemb.cli.arguments import option
from dynamicemb.errors import wrong_value

MODEL_NAMES = ("dlrm", "deepfm", "dcn")
OPTIMIZER_NAMES = ("adagrad", "rowwise_adagrad", "sgd", "adam")
SCORE_NAMES = ("step", "timestamp", "lfu", "timestamp_lfu", "no_eviction")

#: Options that may change between a run and its continuation.
MAY_CHANGE = frozenset(
    {
        *("out", "fresh", "plain", "report", "threads", "days", "max_examples"),
        *("checkpoint_minutes", "checkpoint_steps", "keep"),
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


def _device(name: str, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise wrong_value(name, value, "auto, cpu, cuda, cuda:N")
    return value


@dataclass
class TrainOptions:
    """Every option of a run; the order is that of the help."""

    # the examples
    data: list[str] = option(  # noqa: RUF009
        (), "Parquet, CSV or TSV files and globs instead of the built-in stream", many=True
    )
    schema: str | None = option(None, "of --data: criteo, or a YAML file that names the columns")
    days: int = option(16, "days of the built-in stream", minimum=1)
    examples_per_day: int = option(400_000, "examples of a day of the built-in stream", minimum=1)
    new_ids: int = option(
        20_000, "items born per day in the built-in stream; half as many users", minimum=1
    )
    max_examples: int | None = option(None, "stop after so many examples", minimum=1)
    batch_size: int = option(2048, "examples of a step", minimum=1)
    seed: int = option(0, "of the built-in stream, the rows and the dense layers", minimum=0)
    # the model
    model: str = option("dlrm", "the model", choices=MODEL_NAMES)
    dim: int = option(16, "columns of a row", minimum=1)
    optimizer: str = option("adagrad", "of the rows", choices=OPTIMIZER_NAMES)
    lr: float = option(0.1, "learning rate of the rows", above=0.0)
    dense_lr: float = option(0.01, "learning rate of the dense layers (Adam)", above=0.0)
    baseline: bool = option(True, "train hashed static tables of the same memory beside it")
    # the tables
    capacity: int = option(65_536, "rows of a table at most", minimum=1)
    score: str = option("step", "what decides which row makes room", choices=SCORE_NAMES)
    admission: str = option(
        "none",
        "which new ids get a row: none (all), frequency:N, probability:P",
        check=_admission,
    )
    init_std: float = option(0.1, "standard deviation of a new row's values", minimum=0.0)
    # the run
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:N", check=_device)
    threads: int = option(1, "threads of torch and of the tables", minimum=1)
    window: int = option(100_000, "examples of the sliding window of the metrics", minimum=1)
    log_every: int = option(50, "steps between two points of the metrics", minimum=1)
    out: str = option("dynamicemb-run", "folder of checkpoints, metrics and the report")
    checkpoint_minutes: float = option(
        0.5, "minutes between two checkpoints; 0: none by time", minimum=0.0
    )
    checkpoint_steps: int = option(0, "steps between two checkpoints; 0: none by steps", minimum=0)
    keep: int = option(2, "checkpoints to keep", minimum=1)
    fresh: bool = option(False, "start over, whatever checkpoints there are")
    plain: bool = option(False, "lines instead of the live screen")
    report: bool = option(True, "write report.html at the end")

    def difference(self, other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """``{option: (theirs, ours)}`` where the run of ``other`` is not this one."""
        return {
            name: (other.get(name), value)
            for name, value in vars(self).items()
            if name not in MAY_CHANGE and other.get(name) != value
        }
