"""A program whose processes fork with an open store: forking.py STORE_OR_TABLE ACCESS FOLDER END...

For each end there is a process that opens the store in a folder of that name, has a child that ends
so, flushes more rows and dies by SIGKILL. What children met is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

import torch
from stores import assert_holds, ids_in, make_rows, make_ssd

from dynamicemb import DynamicEmbedding, DynamicEmbTableOptions
from dynamicemb.errors import UsageError
from dynamicemb.tiers import SsdStore

BEFORE, AFTER = 5000, 10000


def child_reads(store: SsdStore) -> None:
    assert_holds(store, range(BEFORE))
    assert ids_in(store) == list(range(BEFORE))
    assert store.size() == BEFORE
    for change in (
        lambda: store.insert(make_rows([1])),
        lambda: store.erase(torch.tensor([1])),
        store.clear,
        store.flush,
        lambda: store.snapshot("x"),
        lambda: store.set_layout(DynamicEmbTableOptions(dim=3, max_capacity=9), None),  # type: ignore[arg-type]
    ):
        try:
            change()
        except (UsageError, AttributeError):
            continue
        raise AssertionError("a forked child changed the store")


def end_child(how: str, store: Any) -> NoReturn:
    """As ``how`` says. ``store`` is the only reference to it in the child."""
    if how == "del":
        del store
        os._exit(0)
    if how == "close":
        with contextlib.suppress(UsageError):  # of rows that the child cannot write
            store.close()
        os._exit(0)
    if how == "_exit":
        os._exit(0)
    if how == "exception":
        raise RuntimeError("the child ends so")
    sys.exit(0)


class Reading(torch.utils.data.Dataset[int]):
    """Looks up rows of the store in a worker."""

    def __init__(self, store: SsdStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        ids = range(index * 50, index * 50 + 50)
        assert_holds(self.store, ids)
        return len(ids)


def with_store(path: str, direct: bool, how: str) -> None:
    store = make_ssd(path, direct_io=direct)
    store.insert(make_rows(range(BEFORE)))
    store.flush()
    assert_holds(store, range(BEFORE))  # its threads have started
    if how == "workers":
        loader = torch.utils.data.DataLoader(Reading(store), batch_size=8, num_workers=2)
        print(how, "read", sum(int(batch.sum()) for batch in loader), flush=True)
    else:
        child = os.fork()
        if child == 0:
            signal.alarm(120)  # a child that hangs is killed by it
            child_reads(store)
            if how == "return":
                return
            holder = [store]
            del store
            end_child(how, holder.pop())
        print(how, "ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    store.insert(make_rows(range(BEFORE, AFTER)))
    store.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def with_table(path: str, direct: bool, how: str) -> None:
    """A cached table: its child may look up, and trains with an error or with rows of its own."""
    options = DynamicEmbTableOptions(
        max_capacity=2**16,
        caching=True,
        local_hbm_for_values=2**17,
        external_storage=SsdStore.at(path, direct_io=direct),
    )
    module = DynamicEmbedding(6, options=options, optimizer="sgd", seed=1)
    for begin in range(0, BEFORE, 500):
        module(torch.arange(begin, begin + 500)).sum().backward()
    module.table.flush()
    ids = torch.arange(BEFORE)
    module.eval()
    rows = module(ids).clone()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        torch.set_num_threads(1)
        assert torch.equal(module(ids), rows)
        module.train()
        with contextlib.suppress(UsageError):
            for begin in range(0, 4 * BEFORE, 500):
                module(torch.arange(begin, begin + 500)).sum().backward()
        if how == "return":
            return
        holder = [module]
        del module
        end_child(how, holder.pop().table.store)
    print(how, "ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    assert torch.equal(module(ids), rows)
    module.train()
    for begin in range(BEFORE, AFTER, 500):
        module(torch.arange(begin, begin + 500)).sum().backward()
    module.table.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main(what: str, access: str, folder: str, *ends: str) -> None:
    work = {"store": with_store, "table": with_table}[what]
    for how in ends:
        process = os.fork()
        if process == 0:
            work(os.path.join(folder, how), access == "direct", how)
            return  # a child of it that ends so
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status == -signal.SIGKILL, (how, status)


if __name__ == "__main__":
    main(*sys.argv[1:])
