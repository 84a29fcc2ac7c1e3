"""A table's rows and a parameter server: what is evicted goes there, what is fetched comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from dynamicemb.errors import UsageError, check_integer, wrong_type, wrong_value
from dynamicemb.tde.shards import LocalShard, local_shards
from dynamicemb.tde.streams import Moment
from dynamicemb.tde.write_back import WriteBack
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import RemoteRows

#: Numbers (not bytes) of a row's weight and states that one push sends at most.
DEFAULT_PS_CHUNK_SIZE = 8 * 1024 * 1024

#: What rows that the server does not have become: from ids to weights [n, dim].
NewRows = Callable[[torch.Tensor], torch.Tensor]

_fetchers = ThreadPoolExecutor(8, thread_name_prefix="dynamicemb fetch")


class FetchHandle:
    """A fetch that was begun; :meth:`wait` returns when its rows are in the table. If the server
    failed, it raises, and calling it again tries again."""

    def __init__(self, work: Callable[[], Moment]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._future: Future[Moment] | None = None
        self._written: Moment | None = None
        self.done = False

    def start(self) -> None:
        self._future = _fetchers.submit(self._work)

    def wait(self) -> None:
        with self._lock:
            if not self.done:
                future, self._future = self._future, None
                self._written = self._work() if future is None else future.result()
                self.done = True
        if self._written is not None:
            self._written.wait()


class _ShardServer:
    """One shard, its rows at the server, and those on their way."""

    def __init__(self, table: str, shard: LocalShard, url: str, chunk_size: int) -> None:
        self.shard = shard
        self.rows: RemoteRows = open_rows(url, shard.table_name(table), shard.row_format)
        self.behind = WriteBack(self.rows)
        numbers = sum(part.count for part in shard.row_format.parts)
        self.chunk = chunk_size // max(1, numbers)
        if self.chunk < 1:
            raise wrong_value("chunk_size", chunk_size, f"at least {numbers}, one row")


class PS:
    """The rows of a table and of its optimizer's states, and a parameter server behind them.

    ``ids`` is int64 [n, 2]: ids, and the slots (rows of the table) they have; a rank looks after
    the slots it holds. Where every rank has a copy of the whole table, the first one writes.

    Args:
        table_name: the name of the rows at the server.
        tensors: the weight, then the states, whose first dimension is the slots: tensors, or
            ShardedTensors. A state may have a number per row, [rows].
        url: of the server; see docs/parameter_server.md.
        chunk_size: numbers of one push at most.
    """

    def __init__(
        self,
        table_name: str,
        tensors: Sequence[Any],
        url: str,
        chunk_size: int = DEFAULT_PS_CHUNK_SIZE,
    ) -> None:
        check_integer("chunk_size", chunk_size, minimum=1)
        shards, copies = local_shards(tensors)
        self._writes = not copies or dist.get_rank() == 0
        self._servers = [_ShardServer(table_name, one, url, chunk_size) for one in shards]
        self._dim = int(tensors[0].shape[1])
        #: The devices that the rows are on.
        self.devices = [one.shard.tensors[0].device for one in self._servers]
        self._lock = threading.Lock()
        self._written = Moment(())  # rows that were fetched last
        self._unfinished: dict[FetchHandle, torch.Tensor] = {}  # to the ids it is about

    def evict(self, ids: torch.Tensor) -> None:
        """Write rows to the server; returns when they are there."""
        self.put(ids)
        self.flush()

    def put(self, ids: torch.Tensor) -> None:
        """Copy rows now and write them to the server in the background, in order. Rows whose fetch
        did not end are as they were at the server, and are left out."""
        ids = _pairs(ids)
        with self._lock:
            pending = [one for one in self._unfinished.values() if len(one)]
        if pending:
            ids = ids[~torch.isin(ids[:, 0], torch.cat(pending))]
        if not self._writes:
            return
        with self._lock:
            written = self._written
        written.wait()
        for server in self._servers:
            mine = ids[server.shard.here(ids[:, 1])]
            for part in mine.split(server.chunk):
                server.behind.put(part[:, 0].contiguous(), server.shard.read(part[:, 1]))

    def flush(self) -> None:
        """Wait until everything is at the server; StoreError if it cannot be."""
        for server in self._servers:
            server.behind.flush()

    def raise_error(self) -> None:
        """Raise what went wrong in the background since the last call, which is tried again."""
        for server in self._servers:
            server.behind.raise_error()

    def fetch(
        self,
        ids: torch.Tensor,
        time: int = 0,
        reinit: bool = False,
        weight_init_min: float = 0.0,
        weight_init_max: float = 0.0,
    ) -> FetchHandle:
        """Begin to read rows from the server into their slots.

        Rows that the server does not have stay as they are, or with ``reinit`` get a weight drawn
        uniformly from [weight_init_min, weight_init_max] and states of 0. ``time`` is accepted for
        compatibility: every handle waits for its own rows.
        """
        low, high = float(weight_init_min), float(weight_init_max)
        if low > high:
            raise wrong_value("weight_init_min", low, f"at most weight_init_max = {high}")

        def uniform(new: torch.Tensor) -> torch.Tensor:
            return torch.empty(len(new), self._dim, device="cpu").uniform_(low, high)

        return self.begin_fetch(ids, uniform if reinit else None)

    def begin_fetch(self, ids: torch.Tensor, new_rows: NewRows | None) -> FetchHandle:
        """:meth:`fetch`, with ``new_rows`` for those that the server does not have (``None``: they
        stay as they are)."""
        ids = _pairs(ids).clone()

        before = Moment(self.devices)

        def work() -> Moment:
            before.wait()
            for server in self._servers:
                mine = ids[server.shard.here(ids[:, 1])]
                if len(mine):
                    self._fetch(server, mine, new_rows)
            with self._lock:
                self._unfinished.pop(handle, None)
                self._written = Moment(self.devices)
                return self._written

        handle = FetchHandle(work)
        with self._lock:
            self._unfinished[handle] = ids[:, 0]
        handle.start()
        return handle

    def settle(self) -> None:
        """Try again what could not be fetched."""
        with self._lock:
            handles = list(self._unfinished)
        for handle in handles:
            handle.wait()

    @staticmethod
    def _fetch(server: _ShardServer, ids: torch.Tensor, new_rows: NewRows | None) -> None:
        wanted, slots = ids[:, 0].contiguous(), ids[:, 1]
        found, rows = server.behind.find(wanted)
        rest = (~found).nonzero().squeeze(1)
        if len(rest) == len(wanted):
            found, rows = server.rows.pull(wanted)
        elif len(rest):
            found[rest], rows[rest] = server.rows.pull(wanted[rest])
        missing = (~found).nonzero().squeeze(1)
        if not len(missing):
            server.shard.write(slots, rows)
            return
        if new_rows is None:
            server.shard.write(slots[found], rows[found])
            return
        row_format = server.shard.row_format
        begin, width = server.shard.column, row_format.parts[0].count
        weight = new_rows(wanted[missing])[:, begin : begin + width]
        states = [
            torch.zeros(len(weight), part.count, device="cpu") for part in row_format.parts[1:]
        ]
        rows[missing] = row_format.pack([weight, *states])
        server.shard.write(slots, rows)

    def close(self) -> None:
        """Write what is on its way, and give the connections back."""
        self.flush()
        for server in self._servers:
            server.rows.close()


def _pairs(ids: object) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64:
        raise wrong_type("ids", getattr(ids, "dtype", ids), "an int64 tensor [n, 2]")
    if ids.dim() != 2 or ids.shape[1] != 2:
        raise wrong_value("ids.shape", tuple(ids.shape), "[n, 2]: ids and slots")
    return ids.cpu()


class PSCollection:
    """The :class:`PS` of every table of a collection.

    Args:
        path: of the collection in the model; rows of table t are at the server as ``path.t``.
        plan: {table: (ParameterSharding, tensors)}.
        url: of the server, or a function from table names to URLs.
        ps_config: ``{"chunk_size": ...}``.
    """

    def __init__(
        self,
        path: str,
        plan: Mapping[str, tuple[Any, Sequence[Any]]],
        url: str | Callable[[str], str],
        ps_config: Mapping[str, Any] | None = None,
    ) -> None:
        config = dict(ps_config or {})
        chunk_size = config.pop("chunk_size", DEFAULT_PS_CHUNK_SIZE)
        if config:
            raise wrong_value("a key of ps_config", next(iter(config)), "chunk_size")
        self._path = path
        self._tables = {
            name: PS(f"{path}.{name}", tensors, url(name) if callable(url) else url, chunk_size)
            for name, (_, tensors) in plan.items()
        }

    def table_names(self) -> list[str]:
        return list(self._tables)

    def __getitem__(self, table: str) -> PS:
        return self._tables[table]

    @staticmethod
    def fromModule(
        path: str,
        sharded_module: Any,
        params_plan: Mapping[str, Any],
        url: str | Callable[[str, str], str],
        ps_config: Mapping[str, Any] | None = None,
    ) -> PSCollection:
        """Of a collection that DistributedModelParallel sharded: its weights and the states of its
        fused optimizer. ``url`` may be a function of (path, table name)."""
        plan = {
            name: (sharding, tensors_of(path, sharded_module, name))
            for name, sharding in params_plan.items()
        }

        def url_of(name: str) -> str:
            return url(path, name) if callable(url) else url

        return PSCollection(path, plan, url_of, ps_config)


def tensors_of(path: str, sharded_module: Any, table: str) -> list[Any]:
    """The weight of a table of a sharded collection, then its optimizer's states."""
    state = sharded_module.state_dict()
    keys = [f"{kind}.{table}.weight" for kind in ("embeddings", "embedding_bags")]
    key = next((one for one in keys if one in state), None)
    if key is None:
        raise UsageError(f"{path!r} has no weight of table {table!r}: it has {sorted(state)}")
    states: Mapping[str, Any] = {}
    if getattr(sharded_module, "fused_optimizer", None) is not None:
        states = sharded_module.fused_optimizer.state_dict()["state"].get(key, {})
    # Names differ (momentum1, exp_avg_sq, row_counter); what is not per row (iter) does not travel.
    rows = state[key].size(0)
    return [state[key], *(one for one in states.values() if one.size().numel() >= rows)]
