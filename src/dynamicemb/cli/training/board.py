"""The metrics of a run as TensorBoard reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamicemb.errors import UsageError, missing_package

try:
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb train --tensorboard", "tensorboard", "tensorboard") from error

if TYPE_CHECKING:
    from dynamicemb.cli.training.history import Point
    from dynamicemb.cli.training.run import Run


def scalars(point: Point) -> Iterator[tuple[str, float]]:
    """(tag, value) of everything that was measured."""
    yield "run/examples", point.examples
    yield "run/examples_per_second", point.speed
    if point.day is not None:
        yield "run/day", point.day
    for name, metrics in point.metrics.items():
        for key, value in metrics.items():
            yield f"{key}/{name}", value
    for name, table in point.tables.items():
        for key, value in table.items():
            yield f"table {name}/{key}", value


@contextmanager
def write_board(run: Run, folder: str) -> Iterator[Callable[[Run], None]]:
    """Yields what is to be called after every step: it writes the points that are new. Points after
    the checkpoint that a run goes on from are replaced."""
    try:
        writer = SummaryWriter(folder, purge_step=run.steps + 1 if run.steps else None)
    except OSError as error:
        raise UsageError(f"--tensorboard {folder} cannot be used: {error.strerror}") from error
    written = len(run.history.points)

    def update(run: Run) -> None:
        nonlocal written
        for point in run.history.points[written:]:
            for tag, value in scalars(point):
                writer.add_scalar(tag, value, point.step)
        if len(run.history.points) > written:
            writer.flush()
        written = len(run.history.points)

    try:
        yield update
        update(run)  # the last point comes after the last step
    finally:
        writer.close()
