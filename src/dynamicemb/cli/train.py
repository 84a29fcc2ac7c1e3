"""``dynamicemb train``: train a click model with dynamic tables and show what goes on."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dynamicemb.cli.arguments import Parser, add_options, build_options
from dynamicemb.cli.signals import interrupts
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.errors import UsageError, wrong_value

if TYPE_CHECKING:
    from dynamicemb.cli.training.batch import Source
    from dynamicemb.cli.training.ranks import Ranks

INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(
        prog="dynamicemb train",
        description="Train a click model with dynamic tables, beside hashed static tables of the "
        "same memory. Without options: a synthetic stream, about two minutes. The same command "
        "after a kill goes on from the last checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of the same options")
    parser.add_argument(
        "--print-config", action="store_true", help="print all options as such a file, and end"
    )
    add_options(parser, TrainOptions)
    given = vars(parser.parse(arguments))
    options = build_options(TrainOptions, given, given["config"])
    if given["print_config"]:
        from dynamicemb.cli.yaml import write_yaml

        sys.stdout.write(write_yaml(asdict(options)))
        return 0
    if options.nproc == 1:
        return _train(None, options)
    from dynamicemb.cli.training.ranks import start_ranks

    if _device(options.device).type != "cpu" or options.store != "memory":
        raise UsageError("--nproc above 1 is for --device cpu and --store memory, up to now")
    return start_ranks(options.nproc, _train, options)


def _train(ranks: Ranks | None, options: TrainOptions) -> int:
    """A run in this process, which may be one of several."""
    # torch's own words about sparse gradients and tracing are not for the users of a command.
    warnings.filterwarnings("ignore", module="torch")
    for name in ("torch.fx", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.sparse.check_sparse_tensor_invariants.disable()
    torch.set_num_threads(options.threads)
    from rich.console import Console

    from dynamicemb.cli.training.prometheus import serve_metrics
    from dynamicemb.cli.training.report import write_report
    from dynamicemb.cli.training.run import Run
    from dynamicemb.cli.training.screen import LiveScreen, PlainScreen
    from dynamicemb.cli.training.summary import summary

    first = ranks is None or ranks.first
    console = Console(highlight=False, quiet=not first)
    source = _source(options)
    device = _device(options.device)
    run = Run(options, source, device, ranks)
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
        stack.enter_context(screen)
        run.train(on_step=screen.update, stop=lambda: bool(interrupted))
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
