"""What tests of ``dynamicemb train`` look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dynamicemb.cli.training.stream import ClickStream


def points(out: Path) -> list[dict[str, Any]]:
    """All that a run measured, without times."""
    measured = json.loads((out / "metrics.json").read_text())
    return [
        {key: value for key, value in point.items() if key not in ("seconds", "speed")}
        for point in measured
    ]


def every_item(*, days: int, examples_per_day: int, new_ids: int) -> torch.Tensor:
    """The distinct ids of table "item" in the built-in stream."""
    stream = ClickStream(days=days, examples_per_day=examples_per_day, new_ids=new_ids, seed=0)
    return torch.cat([one.ids[one.size :] for one in stream.batches(0, 500)]).unique()
