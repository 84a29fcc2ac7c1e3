"""The processor, memory, threads, GPUs and disk of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from dynamicemb.cli.checkup.finding import Finding, Status
from dynamicemb.cli.machine import available_bytes, cpu_model
from dynamicemb.cli.output import bytes_text

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DRIVER = Path("/proc/driver/nvidia/version")
OPENMP = re.compile(r"\S*/(?:lib)?(gomp|iomp5|omp)[-.][^/\s]*")
BLOCK = 4096


def hardware_findings(folder: Path) -> Iterator[Finding]:
    """``folder``: on the disk that is looked at."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processor", Status.OK, f"{cpu_model()}, {cores} of {os.cpu_count()} cores")
    yield Finding("memory", Status.OK, f"{bytes_text(available_bytes())} free")
    yield threads_finding(cores or 1)
    yield huge_pages_finding(HUGE_PAGES)
    yield from gpu_findings()
    yield disk_finding(folder)


def threads_finding(cores: int) -> Finding:
    """Threads of torch and of the engine, and the OpenMP runtimes that are loaded."""
    given = os.environ.get("OMP_NUM_THREADS")
    detail = f"{torch.get_num_threads()} of torch and the engine"
    if given is not None:
        detail += f" (OMP_NUM_THREADS={given})"
    runtimes = openmp_runtimes()
    if runtimes:
        detail += f"; OpenMP: {', '.join(runtimes)}"
    if len(runtimes) > 1:
        return Finding("threads", Status.NOTE, detail + ": they compete for the cores")
    if torch.get_num_threads() > cores:
        return Finding(
            "threads",
            Status.NOTE,
            f"{detail}; more than the {cores} cores",
            f"export OMP_NUM_THREADS={cores}",
        )
    return Finding("threads", Status.OK, detail)


def openmp_runtimes() -> list[str]:
    """Names of the libraries in this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({Path(one[0]).name for one in OPENMP.finditer(maps)})


def huge_pages_finding(file: Path) -> Finding:
    """Whether large tables get pages of 2 MiB: lookups in them are up to half again as fast."""
    name = "huge pages"
    try:
        chosen = re.search(r"\[(\w+)\]", file.read_text())
    except OSError:
        return Finding(name, Status.NOTE, "the system does not say whether it has them")
    if chosen is None or chosen[1] == "never":
        return Finding(
            name,
            Status.NOTE,
            "never given: lookups in large tables are slower",
            f"echo madvise | sudo tee {file}",
        )
    return Finding(name, Status.OK, chosen[1])


def gpu_findings() -> Iterator[Finding]:
    driver = _driver()
    if torch.cuda.is_available():
        for place in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(place)
            major, minor = torch.cuda.get_device_capability(place)
            yield Finding(
                f"GPU {place}",
                Status.OK,
                f"{torch.cuda.get_device_name(place)}, compute capability {major}.{minor}, "
                f"{bytes_text(free)} of {bytes_text(total)} free, CUDA {torch.version.cuda}, "
                f"driver {driver or 'unknown'}",
            )
    elif driver is not None and torch.version.cuda is None:
        yield Finding(
            "GPU",
            Status.MISSING,
            f"driver {driver} is there, but torch {torch.__version__} has no CUDA",
            f"{sys.executable} -m pip install --force-reinstall torch",
        )
    elif driver is not None:
        yield Finding(
            "GPU", Status.BROKEN, f"driver {driver} is there, but torch sees no GPU", "nvidia-smi"
        )
    else:
        yield Finding("GPU", Status.MISSING, "none; tables are in main memory")


def _driver() -> str | None:
    """The version of NVIDIA's driver; ``None`` if there is none."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER.read_text())
        if found is not None:
            return found[1]
    except OSError:
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def disk_finding(folder: Path) -> Finding:
    """Free space, and whether files can be read past the page cache, as ``direct_io`` wants."""
    free = bytes_text(shutil.disk_usage(folder).free)
    if not hasattr(os, "O_DIRECT"):
        return Finding("disk", Status.NOTE, f"{folder}: {free} free; this system has no O_DIRECT")
    file = folder / f".dynamicemb-doctor-{os.getpid()}"
    try:
        file.write_bytes(bytes(BLOCK))
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(
            "disk",
            Status.NOTE,
            f"{folder}: {free} free; SsdStore(direct_io=True) goes through the page cache here: "
            f"{reason}",
        )
    finally:
        file.unlink(missing_ok=True)
    return Finding("disk", Status.OK, f"{folder}: {free} free, O_DIRECT is possible")
