"""Batches whose ids became slots, made ready ahead of the training step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import UsageError, check_integer, wrong_type, wrong_value
from dynamicemb.tde.id_transformer_group import IDTransformerGroup
from dynamicemb.tde.ps import FetchHandle
from dynamicemb.tde.streams import Moment

_GROUP = "_id_transformer_group"


def wrap(
    url: str | Callable[[str, str], str],
    dataloader: Iterable[Any],
    module: nn.Module,
    configs_dict: Mapping[str, Sequence[BaseEmbeddingConfig]],
    *,
    data_info: Mapping[int, str] | None = None,
    eviction_config: Mapping[str, Any] | None = None,
    transform_config: Mapping[str, Any] | None = None,
    ps_config: Mapping[str, Any] | None = None,
    parallel: bool = True,
    num_prefetch: int = 0,
    in_flight: int = 0,
) -> DataLoader:
    """Put a parameter server under the tables of a TorchRec model: the tables become caches of it.

    Returns the dataloader to iterate instead of ``dataloader``; ``module`` stays the model, and is
    its attribute ``module``. :func:`save` writes what is only in the tables.

    Args:
        url: of the server, ``"redis://127.0.0.1:6379/?prefix=model"``, ``"memory://name"``, or of
            a plug-in; or a function of (path, table name). See docs/parameter_server.md.
        dataloader: an iterable of batches, which are tuples or lists with KeyedJaggedTensors among
            their elements. Batches come out as tuples, each once, in the same order.
        module: a DistributedModelParallel.
        configs_dict: {path of a sharded collection in the model: its table configs}.
            ``num_embeddings`` are the rows that fit; ids may be any int64.
        data_info: {position in a batch: path}. Default: the KeyedJaggedTensors of a batch belong
            to the paths of configs_dict, in order.
        eviction_config: default ``{"type": "mixed_lru_lfu"}``; see :class:`IDTransformer`.
        transform_config: accepted for compatibility.
        ps_config: ``{"chunk_size": ...}``, numbers of one push.
        parallel: whether several collections work at the same time.
        num_prefetch: batches that are made ready, in another thread, while one is trained. 0: none;
            a batch is made ready when it is asked for.
        in_flight: batches before the last one handed out that may still be in training, for
            pipelines that ask for batches ahead: 1 for TorchRec's TrainPipelineBase, 2 for
            TrainPipelineSparseDist, 3 for PrefetchTrainPipelineSparseDist. UsageError where one of
            the latter two has too few.

    A table must hold the distinct ids of num_prefetch + in_flight + 1 batches (of all ranks).
    """
    if getattr(module, _GROUP, None) is not None:
        raise UsageError(
            "the module already has a parameter server; for other data make "
            "DataLoader(module._id_transformer_group, dataloader, ...)"
        )
    check_integer("num_prefetch", num_prefetch, minimum=0)
    check_integer("in_flight", in_flight, minimum=0)
    group = IDTransformerGroup(
        url,
        module,
        configs_dict,
        eviction_config=eviction_config,
        transform_config=transform_config,
        ps_config=ps_config,
        parallel=parallel,
    )
    loader = DataLoader(
        group, dataloader, data_info=data_info, num_prefetch=num_prefetch, in_flight=in_flight
    )
    setattr(module, _GROUP, group)
    loader.module = module
    return loader


def save(module: nn.Module) -> None:
    """Write all rows of a wrapped model that changed since the last call to its parameter server,
    with their optimizer states; all ranks call it, between steps. A new process that wraps the
    model with the same URL goes on from there."""
    group = getattr(module, _GROUP, None)
    if not isinstance(group, IDTransformerGroup):
        raise wrong_value("module", type(module).__name__, "a module that tde.wrap was given")
    group.save()


class DataLoader:
    """Iterates ``dataloader`` with ids replaced by slots; see :func:`wrap`. One iteration at a
    time: a new one ends the one before."""

    def __init__(
        self,
        id_transformer_group: IDTransformerGroup,
        dataloader: Iterable[Any],
        *,
        data_info: Mapping[int, str] | None = None,
        num_prefetch: int = 0,
        in_flight: int = 0,
    ) -> None:
        self._group = id_transformer_group
        self._dataloader = dataloader
        self.module: nn.Module | None = None
        self._data_info = None if data_info is None else dict(data_info)
        for position, path in (self._data_info or {}).items():
            check_integer("a position in data_info", position, minimum=0)
            if path not in self._group:
                allowed = ", ".join(map(repr, self._group.paths))
                raise wrong_value(f"data_info[{position}]", path, allowed)
        self._num_prefetch = check_integer("num_prefetch", num_prefetch, minimum=0)
        self._in_flight = check_integer("in_flight", in_flight, minimum=0)
        self._iterator: DataLoaderIter | None = None

    def __iter__(self) -> DataLoaderIter:
        if self._iterator is not None:
            self._iterator.close()
        self._group.release()
        self._group.set_hold(self._num_prefetch + self._in_flight)
        self._iterator = DataLoaderIter(
            self._group,
            iter(self._dataloader),
            self._data_info,
            self._num_prefetch,
            self._in_flight,
        )
        return self._iterator

    def __len__(self) -> int:
        return len(self._dataloader)  # type: ignore[arg-type]


class _Work:
    """Makes batches ready; what the thread of an iteration knows (and not the iteration itself, so
    that one that is dropped ends)."""

    def __init__(
        self, group: IDTransformerGroup, batches: Iterator[Any], data_info: dict[int, str] | None
    ) -> None:
        self.group = group
        self.batches = batches
        self.data_info = data_info
        self.ready: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._batch: Any = None  # one that was taken and could not be made ready
        self._changed = threading.Condition()
        self._allowed = self._begun = 0
        self._trained = group.moment()  # the steps that slots may be taken from
        self._closing = False

    def allow(self, batches: int = 1) -> None:
        """Let the thread make so many more batches ready, after what the caller's streams do."""
        trained = self.group.moment()
        with self._changed:
            self._trained = trained
            self._allowed += batches
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def run(self) -> None:
        """In the thread: as many batches as are allowed. An iteration that is closed comes to that
        number too, so that no rank waits for another."""
        while True:
            with self._changed:
                while self._begun == self._allowed and not self._closing:
                    self._changed.wait()
                if self._begun == self._allowed:
                    return
                self._begun += 1
                trained = self._trained
            trained.wait()
            item = self.next()
            self.ready.put(item)
            if item.end:
                return

    def next(self) -> _Item:
        """The next batch, made ready."""
        told = False  # whether the other ranks know what happens here
        try:
            if self._batch is None:
                try:
                    self._batch = next(self.batches)
                except StopIteration:
                    told = True
                    self.group.exchange.end(self.group.parts)
                    return _Item(end=True)
            batch = self._batch
            places = self._places(batch)
            kjts = {path: batch[position] for position, path in places.items()}
            parts = self.group.collect(kjts)
            told = True
            done, handles = self.group.apply(kjts, parts)
            self._batch = None
            out = list(batch)
            for position, path in places.items():
                out[position] = done[path]
            return _Item(tuple(out), handles, made=self.group.moment())
        except BaseException as error:
            if not told:
                self.group.exchange.fail(self.group.parts)
            return _Item(error=error)

    def _places(self, batch: Any) -> dict[int, str]:
        """{position in the batch: path}."""
        if not isinstance(batch, Sequence):
            raise wrong_type("a batch", type(batch).__name__, "a tuple or a list")
        if self.data_info is not None:
            if self.data_info and max(self.data_info) >= len(batch):
                raise wrong_value(
                    "a position in data_info", max(self.data_info), f"below {len(batch)}"
                )
            return self.data_info
        paths = self.group.paths
        found = [i for i, one in enumerate(batch) if isinstance(one, KeyedJaggedTensor)]
        if len(found) > len(paths):
            raise wrong_value(
                "the number of KeyedJaggedTensors of a batch", len(found), f"{len(paths)} at most"
            )
        return dict(zip(found, paths, strict=False))


class _Item:
    """A batch and its handles, or the end, or an error."""

    def __init__(
        self,
        batch: tuple[Any, ...] | None = None,
        handles: list[FetchHandle] | None = None,
        *,
        made: Moment | None = None,
        end: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.batch, self.handles, self.end, self.error = batch, handles or [], end, error
        self._made = made

    def hand_over(self) -> tuple[Any, ...]:
        """The batch, for what the caller's streams do from now on."""
        assert self.batch is not None
        for handle in self.handles:
            handle.wait()
        if self._made is not None:
            self._made.wait()
        for one in self.batch:
            if isinstance(one, KeyedJaggedTensor) and one.values().is_cuda:
                one.record_stream(torch.cuda.current_stream(one.values().device))
        return self.batch


class DataLoaderIter:
    """One iteration. Batch n is made ready when batch n - num_prefetch is asked for: then those
    before it are trained, and only their slots may go to other ids.

    ``next`` raises what went wrong. No batch is lost by it: another ``next`` tries again.
    """

    def __init__(
        self,
        group: IDTransformerGroup,
        batches: Iterator[Any],
        data_info: dict[int, str] | None,
        num_prefetch: int,
        in_flight: int = 0,
    ) -> None:
        self._work = _Work(group, batches, data_info)
        self._in_flight = in_flight
        self._head: _Item | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if num_prefetch:
            self._work.allow(num_prefetch)
            self._thread = threading.Thread(
                target=self._work.run, daemon=True, name="dynamicemb prefetch"
            )
            self._thread.start()

    def __iter__(self) -> DataLoaderIter:
        return self

    def __next__(self) -> tuple[Any, ...]:
        if self._closed:
            raise StopIteration
        self._work.group.check_in_flight(self._in_flight)
        if self._head is None:
            if self._thread is None:
                self._head = self._work.next()
            else:
                self._work.allow()
                self._head = self._work.ready.get()
        item = self._head
        if item.end:
            raise StopIteration
        if item.error is not None:
            self._head = None
            raise item.error
        batch = item.hand_over()
        self._head = None
        return batch

    def close(self) -> None:
        """End the iteration; batches that were made ready are dropped."""
        self._closed = True
        self._work.close()
        if self._thread is not None:
            self._thread.join()

    def __del__(self) -> None:
        work = self.__dict__.get("_work")
        if work is not None:
            work.close()


__all__ = ["DataLoader", "DataLoaderIter", "save", "wrap"]
