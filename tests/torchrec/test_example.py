"""The example that users start from runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrec_dlrm.py"


def test_example_on_two_ranks(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folder = tmp_path / "dump"
    options = ["--pipeline", "--steps", "60", "--path", str(folder)]
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLE), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "after 60 steps: loss" in done.stdout
    assert "loaded from" in done.stdout
    assert "static tables: days" in done.stderr
    assert (folder / "model.embeddings").is_dir()
