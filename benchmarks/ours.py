"""This library as a contender, beside the whole module: id to slot."""

from __future__ import annotations

from dynamicemb import BatchedDynamicEmbeddingTables
from dynamicemb.cli.benching.contenders import Contender
from dynamicemb.cli.benching.workload import Batch


class FindSlots(Contender):
    """id to slot, nothing else."""

    def __init__(self, module: BatchedDynamicEmbeddingTables) -> None:
        self.table = module.tables[0]

    def run(self, batch: Batch) -> None:
        self.table.find_slots(batch.ids)
