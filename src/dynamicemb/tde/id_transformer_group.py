"""All collections of a model that have a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import UsageError, check_bool, wrong_type, wrong_value
from dynamicemb.tde.distributed import Exchange
from dynamicemb.tde.id_transformer_collection import IDTransformerCollection
from dynamicemb.tde.ps import FetchHandle, PSCollection, tensors_of
from dynamicemb.tde.streams import Moment, on_these_streams
from dynamicemb.tde.utils import _get_sharded_modules_recursive


class IDTransformerGroup:
    """The :class:`IDTransformerCollection` of each of a model's sharded collections.

    Args:
        url: of the parameter server, or a function of (path, table name).
        module: a DistributedModelParallel.
        configs_dict: {path of a sharded collection: its configs}.
        eviction_config, transform_config: see :class:`IDTransformer`.
        ps_config: ``{"chunk_size": ...}``; see :class:`PS`.
        parallel: whether collections work at the same time, in threads.

    All ranks make it together; the seed of new rows is drawn from the first rank's torch generator.
    """

    def __init__(
        self,
        url: str | Callable[[str, str], str],
        module: nn.Module,
        configs_dict: Mapping[str, Sequence[BaseEmbeddingConfig]],
        *,
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
        ps_config: Mapping[str, Any] | None = None,
        parallel: bool = True,
    ) -> None:
        for attribute in ("plan", "module"):
            if not hasattr(module, attribute):
                raise wrong_type("module", module, "a torchrec DistributedModelParallel")
        if not isinstance(configs_dict, Mapping) or not configs_dict:
            raise wrong_type("configs_dict", configs_dict, "{path: configs}, not empty")
        plan = module.plan
        sharded = _get_sharded_modules_recursive(module.module, "", plan)  # type: ignore[arg-type]
        for path in configs_dict:
            if path not in sharded:
                raise wrong_value("a path of configs_dict", path, ", ".join(map(repr, sharded)))
        self.exchange = Exchange()
        seed = self._agreed_seed()
        self._collections: dict[str, IDTransformerCollection] = {}
        self._modules = {path: sharded[path][0] for path in configs_dict}
        for path, configs in configs_dict.items():
            collection, params_plan = sharded[path]
            names = [config.name for config in configs]
            for config in configs:
                if config.name not in params_plan:
                    raise wrong_value(
                        f"a table of configs_dict[{path!r}]", config.name, ", ".join(params_plan)
                    )
                rows = tensors_of(path, collection, config.name)[0].size(0)
                if config.num_embeddings > rows:  # slots would lie outside of the table
                    raise wrong_value(
                        f"num_embeddings of table {config.name!r}",
                        config.num_embeddings,
                        f"at most {rows}, the rows that the table has in the model",
                    )
            chosen = {name: params_plan[name] for name in names}
            servers = PSCollection.fromModule(path, collection, chosen, url, ps_config)
            self._collections[path] = IDTransformerCollection(
                configs,
                eviction_config,
                transform_config,
                servers,
                seed=seed,
                exchange=self.exchange,
            )
        self._threads: ThreadPoolExecutor | None = None
        if check_bool("parallel", parallel) and len(self._collections) > 1:
            self._threads = ThreadPoolExecutor(
                len(self._collections), thread_name_prefix="dynamicemb ids"
            )

    def _agreed_seed(self) -> int:
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_()
        if self.exchange.world_size > 1:
            seed = self.exchange.gather([seed.view(1)])[0][0].view(())
        return int(seed) % 2**64

    @property
    def paths(self) -> list[str]:
        return list(self._collections)

    def __contains__(self, path: object) -> bool:
        return path in self._collections

    def __getitem__(self, path: str) -> IDTransformerCollection:
        return self._collections[path]

    def moment(self) -> Moment:
        """What this thread has given the GPUs that hold the rows to do so far."""
        return Moment(device for one in self._collections.values() for device in one.devices)

    @property
    def parts(self) -> int:
        return sum(one.parts for one in self._collections.values())

    def transform(
        self, kjts: Mapping[str, KeyedJaggedTensor]
    ) -> tuple[dict[str, KeyedJaggedTensor], list[FetchHandle]]:
        """({path: features with slots for ids}, handles to wait for); see
        :meth:`IDTransformerCollection.transform`. On several ranks all give the same paths."""
        return self.apply(kjts, self.collect(kjts))

    def collect(self, kjts: Mapping[str, KeyedJaggedTensor]) -> list[torch.Tensor]:
        """The ids of each table of each collection. Changes nothing, asks no other rank."""
        for path in kjts:
            if path not in self._collections:
                raise wrong_value("a path", path, ", ".join(map(repr, self._collections)))
        collected = {path: self._collections[path].collect(kjt) for path, kjt in kjts.items()}
        absent = [torch.empty(0, dtype=torch.int64, device="cpu")]
        return [
            part
            for path, one in self._collections.items()
            for part in collected.get(path, absent * one.parts)
        ]

    def apply(
        self, kjts: Mapping[str, KeyedJaggedTensor], parts: Sequence[torch.Tensor]
    ) -> tuple[dict[str, KeyedJaggedTensor], list[FetchHandle]]:
        """:meth:`transform`, of what :meth:`collect` returned; all ranks together."""
        everyone = self.exchange.gather(parts)
        begin = 0
        work: list[tuple[str, Callable[[], Any]]] = []
        for path, one in self._collections.items():
            of_ranks = [rank[begin : begin + one.parts] for rank in everyone]
            begin += one.parts
            if path in kjts:
                work.append((path, _bind(one, kjts[path], of_ranks)))
        if self._threads is None or len(work) < 2:
            results = [do() for _, do in work]
        else:
            here = [on_these_streams(do, self._collections[path].devices) for path, do in work]
            results = [f.result() for f in [self._threads.submit(do) for do in here]]
        out = {path: kjt for (path, _), (kjt, _) in zip(work, results, strict=True)}
        return out, [handle for _, handles in results for handle in handles]

    def check_in_flight(self, in_flight: int) -> None:
        """UsageError if a train pipeline of TorchRec runs the model that asks for more than
        ``in_flight`` batches before one is trained: their slots would be given away."""
        for path, module in self._modules.items():
            ahead = _batches_ahead(module)
            if in_flight < ahead:
                raise UsageError(
                    f"{path!r} runs in a train pipeline that asks for {ahead} batches before one "
                    f"is trained, and in_flight is {in_flight}; allowed: {ahead} or more, as in "
                    f"tde.wrap(..., in_flight={ahead})"
                )

    def set_hold(self, batches: int) -> None:
        """See :meth:`IDTransformerCollection.set_hold`."""
        for one in self._collections.values():
            one.set_hold(batches)

    def release(self) -> None:
        """No batch is in flight any more."""
        for one in self._collections.values():
            one.release()

    def save(self) -> None:
        """Write all rows that changed since the last call to the parameter server."""
        for one in self._collections.values():
            one.save()

    def __del__(self) -> None:
        threads = self.__dict__.get("_threads")
        if threads is not None:
            threads.shutdown(wait=False)


def _bind(
    collection: IDTransformerCollection, kjt: KeyedJaggedTensor, everyone: list[list[torch.Tensor]]
) -> Callable[[], Any]:
    return lambda: collection.apply(kjt, everyone)


def _batches_ahead(module: nn.Module) -> int:
    """How many batches the pipeline asks for ahead that took over the module's forward; 0: none."""
    kind = type(module.__dict__.get("forward"))
    if not kind.__module__.startswith("torchrec.distributed.train_pipeline"):
        return 0
    return 3 if "Prefetch" in kind.__name__ else 2
