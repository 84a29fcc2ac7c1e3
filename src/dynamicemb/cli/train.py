"""``dynamicemb train``: train a click model with dynamic tables and show what goes on."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dynamicemb.cli.arguments import Parser, add_options, build_options
from dynamicemb.cli.signals import interrupts
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.errors import UsageError, wrong_value

if TYPE_CHECKING:
    from rich.console import Console

    from dynamicemb.cli.training.batch import Source
    from dynamicemb.cli.training.ranks import Ranks
    from dynamicemb.cli.training.run import Run

INTERRUPTED = 130


def read_options(arguments: Sequence[str]) -> tuple[TrainOptions, bool]:
    """(the options of a command line and its file, whether they are only to be printed)."""
    parser = Parser(
        "train",
        "Train a click model with dynamic tables, beside hashed static tables of the "
        "same memory. Without options: a synthetic stream, about two minutes. The same command "
        "after a kill goes on from the last checkpoint.",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of the same options")
    parser.add_argument(
        "--print-config", action="store_true", help="print all options as such a file, and end"
    )
    add_options(parser, TrainOptions)
    given = vars(parser.parse(arguments))
    options = build_options(TrainOptions, given, given["config"])
    options.check()
    return options, given["print_config"]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options, only_print = read_options(arguments)
    if only_print:
        from dynamicemb.cli.yaml import write_yaml

        sys.stdout.write(write_yaml(asdict(options)))
        return 0
    if options.tensorboard is not None:  # what is missing is said before anything is done
        import_module("dynamicemb.cli.training.board")
    from dynamicemb.cli.training.ranks import join_ranks, start_ranks, torchrun_size

    size = torchrun_size()
    if size is not None and options.nproc not in (1, size):
        raise wrong_value("--nproc", options.nproc, f"{size}, the processes of torchrun, or none")
    options = replace(options, nproc=size or options.nproc)
    if options.nproc == 1:
        return train_on(None, options)
    if options.device not in ("auto", "cpu"):
        raise UsageError(f"several processes are for the CPU; --device is {options.device}")
    start = start_ranks if size is None else join_ranks
    return start(options.nproc, train_on, options)


def train_on(ranks: Ranks | None, options: TrainOptions) -> int:
    """A run in this process, which may be one of several."""
    # torch's own words about sparse gradients and tracing are not for the users of a command.
    warnings.filterwarnings("ignore", module="torch")
    for name in ("torch.fx", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.sparse.check_sparse_tensor_invariants.disable()
    torch.set_num_threads(options.threads)
    from rich.console import Console

    from dynamicemb.cli.training.run import Run
    from dynamicemb.cli.training.saving import run_folder

    first = ranks is None or ranks.first
    console = Console(highlight=False, quiet=not first)
    source = _source(options)
    device = _device("cpu" if ranks is not None else options.device)
    with run_folder(Path(options.out)) if first else nullcontext():
        run = Run(options, source, device, ranks)
        return _train(run, console, first=first)


def _train(run: Run, console: Console, *, first: bool) -> int:
    """Train to the end, or to a signal; what is shown and written beside checkpoints is the first
    rank's part."""
    from dynamicemb.cli.training.prometheus import serve_metrics
    from dynamicemb.cli.training.report import write_report
    from dynamicemb.cli.training.screen import LiveScreen, PlainScreen
    from dynamicemb.cli.training.summary import summary

    options, source, device = run.options, run.source, run.device
    console.print(f"{source.description}; {options.model}, {device}", soft_wrap=True)
    if run.resumed_from is not None:
        console.print(f"goes on from the checkpoint of step {run.resumed_from:,}", soft_wrap=True)
    live = first and console.is_terminal and not options.plain
    screen = LiveScreen(console) if live else PlainScreen(console)
    with ExitStack() as stack:
        interrupted = stack.enter_context(interrupts())
        if options.metrics_port is not None and first:
            address = stack.enter_context(serve_metrics(run, options.metrics_port))
            console.print(f"metrics: {address}", markup=False, soft_wrap=True)
        watchers: list[Callable[[Run], None]] = [screen.update]
        if options.tensorboard is not None and first:
            from dynamicemb.cli.training.board import write_board

            watchers.append(stack.enter_context(write_board(run, options.tensorboard)))
        stack.enter_context(screen)

        def watch(run: Run) -> None:
            for watcher in watchers:
                watcher(run)

        run.train(on_step=watch, stop=lambda: bool(interrupted))
    for line in summary(run) if first else ():
        console.print(line, markup=False, soft_wrap=True)
    if options.report and run.history.points and first:
        report = write_report(run, Path(options.out) / "report.html")
        console.print(f"report: {report}", markup=False, soft_wrap=True)
    if not run.finished:
        console.print("stopped with a checkpoint; the same command goes on", soft_wrap=True)
        return INTERRUPTED
    return 0


def _source(options: TrainOptions) -> Source:
    if options.data:
        if options.schema is None:
            raise UsageError("--data needs --schema: criteo, or a YAML file that names the columns")
        from dynamicemb.cli.training.files import FileSource
        from dynamicemb.cli.training.schema import read_schema

        return FileSource(options.data, read_schema(options.schema))
    if options.schema is not None:
        raise UsageError("--schema is about --data, which is not there")
    from dynamicemb.cli.training.stream import ClickStream

    return ClickStream(
        days=options.days,
        examples_per_day=options.examples_per_day,
        new_ids=options.new_ids,
        seed=options.seed,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise wrong_value("--device", name, "cpu; there is no such GPU")
    return device
