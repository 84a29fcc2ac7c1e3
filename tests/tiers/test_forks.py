"""A process that did not open a store changes nothing of it, however it ends, and never hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forking import AFTER, BEFORE
from stores import OPTIONS, assert_holds, ids_in, make_rows, make_ssd

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.tiers import SsdStore
from processes import TIMEOUT_S

PROGRAM = Path(__file__).with_name("forking.py")
ENDS = ["return", "sys.exit", "_exit", "del", "close", "exception"]


def run(*arguments: str) -> list[str]:
    """The lines that Python prints with these arguments. One thread: forks keep no others."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PROGRAM.parent}:{PROGRAM.parents[1]}",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize("access", ["mapped", "direct"])
def test_the_store_of_the_parent_loses_nothing(tmp_path: Path, access: str) -> None:
    printed = run(str(PROGRAM), "store", access, str(tmp_path), *ENDS, "workers")
    ended = [f"{how} ended with {1 if how == 'exception' else 0}" for how in ENDS]
    assert printed == [*ended, "workers read 3200"]
    for how in (*ENDS, "workers"):
        store = make_ssd(tmp_path / how)
        assert ids_in(store) == list(range(AFTER))
        assert_holds(store, range(AFTER))
        store.close()


@pytest.mark.parametrize("access", ["mapped", "direct"])
def test_the_table_of_the_parent_loses_nothing(tmp_path: Path, access: str) -> None:
    printed = run(str(PROGRAM), "table", access, str(tmp_path), *ENDS)
    assert printed == [f"{how} ended with {1 if how == 'exception' else 0}" for how in ENDS]
    sgd = Optimizer(OptimizerKind.SGD, OptimizerArgs())
    for how in ENDS:
        store = SsdStore(OPTIONS, sgd, path=tmp_path / how)
        assert ids_in(store) == list(range(AFTER))
        store.close()


def test_a_server_that_forks_its_workers_reads_a_snapshot_in_them(tmp_path: Path) -> None:
    store = make_ssd(tmp_path / "s")
    store.insert(make_rows(range(BEFORE)))
    store.snapshot("now")
    store.close()
    program = f"""
import os, sys
from stores import assert_holds, make_ssd

store = make_ssd({str(tmp_path / "s")!r}, snapshot="now", direct_io=True)
assert_holds(store, range({BEFORE}))
children = []
for _ in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        assert_holds(store, range({BEFORE}))
        sys.exit(0)
print([os.waitpid(child, 0)[1] for child in children])
assert_holds(store, range({BEFORE}))
"""
    assert run("-c", program) == ["[0, 0, 0]"]


def test_a_child_that_lives_on_does_not_hold_the_folder(tmp_path: Path) -> None:
    program = f"""
import os
from stores import assert_holds, make_rows, make_ssd

store = make_ssd({str(tmp_path / "s")!r})
store.insert(make_rows(range(100)))
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)  # until the parent closes it
    os._exit(0)
store.close()
again = make_ssd({str(tmp_path / "s")!r})
assert_holds(again, range(100))
os.close(writing)
print(os.waitpid(child, 0)[1])
"""
    assert run("-c", program) == ["0"]


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_child_does_not_wait_for_threads_of_its_parent(tmp_path: Path, store: str) -> None:
    """At the fork another thread holds the locks, and a batch is being read ahead."""
    program = f"""
import os, threading, torch
from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbPoolingMode, DynamicEmbTableOptions
from dynamicemb.tiers import HostStore, SsdStore

options = DynamicEmbTableOptions(
    dim=4, max_capacity=4096, caching=True, local_hbm_for_values=2**16,
    external_storage=HostStore if {store!r} == "host" else SsdStore.at({str(tmp_path / "s")!r}),
)
tables = BatchedDynamicEmbeddingTables(
    [options], optimizer="sgd", pooling_mode=DynamicEmbPoolingMode.NONE, seed=1
)
for begin in range(0, 4096, 256):
    tables(torch.arange(begin, begin + 256), torch.arange(257)).sum().backward()
first = torch.arange(256)
expected = tables.tables[0].find(first).embeddings
table = tables.tables[0]
held, end = threading.Event(), threading.Event()

def hold():
    with table.levels.lock:
        held.set()
        end.wait()

tables.prefetch(first, torch.arange(257))
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(120)
    tables.eval()
    read = tables(first, torch.arange(257))
    os._exit(0 if torch.equal(read, expected) else 1)
end.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run("-c", program) == ["0"]
