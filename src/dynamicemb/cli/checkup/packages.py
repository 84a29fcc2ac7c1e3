"""Python, torch, this library and the packages it can use."""

from __future__ import annotations

import importlib
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from dynamicemb import __version__, _engine
from dynamicemb.cli.checkup.finding import Finding, Status
from dynamicemb.cli.machine import git_commit, version
from dynamicemb.missing_engine import MissingEngine

OLDEST_PYTHON = (3, 11)
LIBRARY = "dynamicemb"
PIP = f"{sys.executable} -m pip install"
#: What TorchRec needs on a machine without a GPU.
ON_CPU = "fbgemm-gpu-cpu tensordict torchmetrics pyre-extensions iopath tqdm"
#: Packages whose import name is another one.
MODULES = {"pyyaml": "yaml"}
#: The extra that brings a package, and what it is for.
USES = {
    "torch": ("", ""),
    "numpy": ("", ""),
    "triton": ("gpu", "tables on a GPU"),
    "torchrec": ("torchrec", "TorchRec modules, dynamicemb train"),
    "safetensors": ("safetensors", "import and export of .safetensors"),
    "pyarrow": ("parquet", "import and export of .parquet, Parquet files of dynamicemb train"),
    "redis": ("redis", "stores at redis:// URLs"),
    "rich": ("cli", "the live screen of dynamicemb train"),
    "pyyaml": ("cli", "configuration files of dynamicemb train"),
    "tensorboard": ("tensorboard", "dynamicemb train --tensorboard"),
}


@dataclass(frozen=True)
class Wanted:
    """A package that the library names: at least this version, with this extra ("": always)."""

    name: str
    at_least: str
    extra: str


def wanted_packages() -> list[Wanted]:
    """What the metadata of the installed library says; the first extra that names a package. In a
    source tree that is not installed: all that are known, of any version."""
    found: dict[str, Wanted] = {}
    try:
        lines = metadata.requires(LIBRARY) or []
    except metadata.PackageNotFoundError:
        return [Wanted(name, "", extra) for name, (extra, _) in USES.items()]
    for line in lines:
        matched = re.match(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?", line)
        if matched is None:
            continue
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)""", line)
        one = Wanted(matched[1].lower(), matched[2] or "", extra[1] if extra else "")
        found.setdefault(one.name, one)
    return list(found.values())


def package_findings() -> Iterator[Finding]:
    yield _python()
    commit, where = git_commit(), "" if version(LIBRARY) else ", not installed"
    detail = f"{__version__}{where}{f', commit {commit}' if commit else ''}"
    yield Finding(LIBRARY, Status.OK, detail)
    yield engine_finding()
    for one in wanted_packages():
        yield _package(one)
    yield _fbgemm()


def _python() -> Finding:
    allowed = ".".join(map(str, OLDEST_PYTHON))
    fine = sys.version_info >= OLDEST_PYTHON
    status = Status.OK if fine else Status.BROKEN
    detail = platform.python_version() + ("" if fine else f"; needed: {allowed} or later")
    return Finding("Python", status, detail, essential=True)


def engine_finding() -> Finding:
    """The C++ extension and the instructions it uses."""
    name = "C++ engine"
    if isinstance(_engine, MissingEngine):
        return Finding(
            name,
            Status.BROKEN,
            "not built: there are no tables in main memory and no checkpoints",
            f"{PIP} --force-reinstall --no-deps {LIBRARY}",
            essential=True,
        )
    return Finding(name, Status.OK, f"instruction set {_engine.instruction_set()}", essential=True)


def _package(one: Wanted) -> Finding:
    essential = one.extra == ""
    what = f"{LIBRARY}[{one.extra}]" if one.extra else _at_least(one)
    command = f"{PIP} '{what}'"
    if one.name == "torchrec" and torch.version.cuda is None:
        # Its metadata names the package of FBGEMM for CUDA.
        command = f"{PIP} {ON_CPU} && {PIP} --no-deps '{_at_least(one)}'"
    _, use = USES.get(one.name, ("", ""))
    found = version(one.name)
    if found is None:
        status = Status.BROKEN if essential else Status.MISSING
        return Finding(one.name, status, f"for {use}" if use else "", command, essential)
    if one.at_least and _numbers(found) < _numbers(one.at_least):
        detail = f"{found}; needed: {one.at_least} or later"
        return Finding(one.name, Status.BROKEN, detail, command + " --upgrade", essential)
    problem = import_problem(MODULES.get(one.name, one.name))
    if problem is not None:
        return Finding(one.name, Status.BROKEN, f"{found}: {problem}", command, essential)
    return Finding(one.name, Status.OK, found, essential=essential)


def _at_least(one: Wanted) -> str:
    return f"{one.name}>={one.at_least}" if one.at_least else one.name


def _fbgemm() -> Finding:
    fitting = "fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu"
    command = f"{PIP} {fitting}"
    here = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if version(name) is not None]
    if not here:
        return Finding(fitting, Status.MISSING, "for TorchRec, and to compare with", command)
    name, found = here[0], version(here[0])
    problem = import_problem("fbgemm_gpu")
    if problem is not None:
        return Finding(name, Status.BROKEN, f"{found}: {problem} (is it of this torch?)", command)
    if torch.version.cuda and name != fitting:
        return Finding(name, Status.NOTE, f"{found}; torch is for CUDA, and this is not", command)
    return Finding(name, Status.OK, str(found))


def import_problem(module: str) -> str | None:
    """Why a module cannot be imported; ``None`` if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # a package of somebody else: anything may happen
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text.partition("+")[0])[:3])
