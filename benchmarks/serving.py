"""How long a ServingTable takes to open and to look ids up, by the size of the table.

python benchmarks/serving.py [--rows 100000 10000000] [--dim 64] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dynamicemb import DynamicEmbDump, DynamicEmbTableOptions
from dynamicemb.nn import BatchedDynamicEmbeddingTables
from dynamicemb.serving import ServingTable


def filled(rows: int, dim: int) -> BatchedDynamicEmbeddingTables:
    """A model whose table has ``rows`` rows."""
    options = DynamicEmbTableOptions(dim=dim, max_capacity=2 * rows)
    model = BatchedDynamicEmbeddingTables([options], table_names=["t"], seed=1)
    for begin in range(0, rows, 2**20):
        ids = torch.arange(begin, min(rows, begin + 2**20)) * 7919
        model.tables[0].insert(ids, torch.randn(len(ids), dim))
    return model


def milliseconds(times: Iterator[float]) -> str:
    return f"{1e3 * statistics.median(times):.2f} ms"


def seconds_to_dump(
    path: Path, model: BatchedDynamicEmbeddingTables, index: bool
) -> Iterator[float]:
    for _ in range(5):
        begin = time.perf_counter()
        DynamicEmbDump(path, model, serving_index=index, allow_overwrite=True)
        yield time.perf_counter() - begin


def seconds_to_open(path: Path) -> Iterator[float]:
    for _ in range(20):
        begin = time.perf_counter()
        ServingTable(path).close()
        yield time.perf_counter() - begin


def seconds_to_find(serving: ServingTable, rows: int, batch: int) -> Iterator[float]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        ids = torch.randint(rows, (batch,), generator=generator) * 7919
        begin = time.perf_counter()
        found, _ = serving.find(ids)
        yield time.perf_counter() - begin
        assert found.all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 10_000_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--folder", help="where to write the checkpoints; default: temporary")
    given = parser.parse_args()
    print(f"dim {given.dim}, {torch.get_num_threads()} threads")
    for rows in given.rows:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            model = filled(rows, given.dim)
            print(f"{rows:,} rows")
            for index in (False, True):
                path = Path(folder) / str(index)
                times = list(seconds_to_dump(path, model, index))
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                print(
                    f"  {'with' if index else 'without'} index: {size / 1e9:.3f} GB, dumped in "
                    f"{milliseconds(iter(times))}, opened in {milliseconds(seconds_to_open(path))}"
                )
                serving = ServingTable(path)
                for batch in (100, 1000, 100_000):
                    times = list(seconds_to_find(serving, rows, batch))
                    rate = batch / statistics.median(times) / 1e6
                    print(f"    {batch:,} ids: {milliseconds(iter(times))}, {rate:.1f} million/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory of this process {peak:.2f} GB")


if __name__ == "__main__":
    main()
