"""Libraries we compare with, beside the static tables of ``dynamicemb.cli.benching.contenders``,
whose rules hold here too.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dynamicemb.cli.benching.contenders import Contender, NotInstalled
from dynamicemb.cli.benching.timing import Sample
from dynamicemb.cli.benching.workload import DIM, Batch, Workload

HERE = Path(__file__).resolve().parent


class ManagedCollision(Contender):
    """TorchRec's MCHManagedCollisionModule and EmbeddingCollection, evaluation, all ids known."""

    def __init__(self, work: Workload) -> None:
        try:
            import torchrec
            from torchrec.modules import mc_embedding_modules, mc_modules
        except (ImportError, OSError) as error:
            raise NotInstalled(f"pip install --no-deps torchrec ({error})") from error
        size = work.n + 1  # the last row is for ids that are not known
        collision = mc_modules.MCHManagedCollisionModule(
            zch_size=size,
            device=torch.device("cpu"),
            eviction_policy=mc_modules.LFU_EvictionPolicy(),
            eviction_interval=10,
        )
        order = torch.argsort(work.ids)
        collision._mch_sorted_raw_ids[: work.n] = work.ids[order]
        collision._mch_remapped_ids_mapping[: work.n] = order
        table = torchrec.EmbeddingConfig(
            name="t",
            embedding_dim=DIM,
            num_embeddings=size,
            feature_names=["f"],
            init_fn=lambda weight: weight.data.uniform_(-0.1, 0.1),
        )
        self.module = mc_embedding_modules.ManagedCollisionEmbeddingCollection(
            torchrec.EmbeddingCollection(tables=[table], device=torch.device("cpu")),
            mc_modules.ManagedCollisionCollection(
                managed_collision_modules={"t": collision}, embedding_configs=[table]
            ),
        )
        self.module.eval()
        self.features = torchrec.KeyedJaggedTensor
        self.check(work)

    def check(self, work: Workload) -> None:
        """All ids map to their own row: a silent miss would be a cheaper lookup."""
        feature = self.features.from_lengths_sync(
            keys=["f"], values=work.ids[:1000], lengths=torch.ones(1000, dtype=torch.int64)
        )
        rows, _ = self.module(feature)
        weight = self.module._embedding_collection.embeddings["t"].weight
        if not torch.equal(rows["f"].values(), weight[:1000]):
            raise AssertionError("MCHManagedCollisionModule does not map the ids as filled in")

    @torch.no_grad()
    def run(self, batch: Batch) -> None:
        feature = self.features(keys=["f"], values=batch.ids, offsets=batch.offsets)
        rows, _ = self.module(feature)
        rows["f"].values()


class BoostFlatMap(Contender):
    """``boost::unordered_flat_map`` from id to slot, one thread; compiled on the spot."""

    def __init__(self, work: Workload, include: str | None = None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "boost_flat.so"
            command = ["g++", "-std=c++17", "-O3", "-shared", "-fPIC", "-DNDEBUG"]
            command += [f"-I{include}"] if include else []
            command += [str(HERE / "boost_flat.cpp"), "-o", str(library)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except OSError as error:
                raise NotInstalled(f"install g++ ({error})") from error
            except subprocess.CalledProcessError as error:
                why = next((x for x in error.stderr.splitlines() if "error" in x), "g++ failed")
                raise NotInstalled(
                    "install the headers of Boost 1.81 or later (Debian 12: libboost1.81-dev) "
                    f"or name them with --boost-include ({why})"
                ) from error
            self.library = ctypes.CDLL(str(library))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self.library.map_new.restype = pointer
        self.library.map_new.argtypes = [pointer, count]
        self.library.map_delete.argtypes = [pointer]
        self.library.map_find.argtypes = [pointer, pointer, count, pointer]
        self.map = self.library.map_new(work.ids.data_ptr(), work.n)

    def run(self, batch: Batch) -> None:
        slots = torch.empty_like(batch.ids)
        n = batch.ids.numel()
        self.library.map_find(self.map, batch.ids.data_ptr(), n, slots.data_ptr())

    def close(self) -> None:
        self.library.map_delete(self.map)
        self.map = None


class Tfra(Contender):
    """TensorFlow Recommenders-Addons: ``tfra_worker.py`` under an interpreter of its own.

    The worker times itself and waits for the next request in between, so it takes turns with the
    contenders of this process.
    """

    INSTALL = (
        "python3.11 -m venv TFRA && TFRA/bin/pip install tensorflow-cpu==2.16.2 tf_keras==2.16.0 "
        "'setuptools<81' tensorflow-recommenders-addons==0.8.1, then --tfra-python TFRA/bin/python"
    )

    ENVIRONMENT: ClassVar = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_USE_LEGACY_KERAS": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
    }

    def __init__(
        self,
        work: Workload,
        batches: dict[str, list[Batch]],
        *,
        python: str | None,
        optimizer: str | None,
        threads: int,
    ) -> None:
        if python is None:
            raise NotInstalled(self.INSTALL)
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        np.save(folder / "ids.npy", work.ids.numpy())
        for distribution, of in batches.items():
            np.save(folder / f"{distribution}.npy", torch.stack([b.ids for b in of]).numpy())
        command = [python, str(HERE / "tfra_worker.py"), str(folder), optimizer or "none"]
        self.errors = open(folder / "errors.txt", "w+")  # noqa: SIM115 - closed in close()
        try:
            self.process = subprocess.Popen(
                [*command, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=os.environ | self.ENVIRONMENT,
            )
        except OSError as error:
            raise NotInstalled(f"--tfra-python {python}: {error}") from error
        try:
            self._receive()
        except NotInstalled:
            self.close()
            raise

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # TensorFlow writes to standard output too
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.errors.seek(0)
        last = self.errors.read().strip().splitlines()[-1:]
        raise NotInstalled(f"the TFRA worker ended: {' '.join(last)}; {self.INSTALL}")

    def run(self, batch: Batch) -> Sample:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{batch.distribution} {batch.index}\n")
        self.process.stdin.flush()
        return Sample(**self._receive())

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self.errors.close()
        self.folder.cleanup()
