"""Runs a module as ``python -m`` does, with TorchRec on a GPU of a machine that has torch alone.

    tests/gpu/torchrec_site.sh     # where there is a network; then carry build/gpu_site
    bash tests/gpu/build_engine.sh # on the machine with the GPU, if not done yet
    python3 tests/gpu/with_torchrec.py pytest tests/tde/test_wrap_on_a_gpu.py

Packages come from build/gpu_site where the machine has none; FBGEMM's CUDA kernels are replaced by
what tests/fbgemm_on_cuda.py has, so nothing here says how fast anything is.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    front = [str(ROOT / "src"), str(ROOT / "tests")]
    sys.path[:1] = ["", *front]
    sys.path.append(str(ROOT / "build" / "gpu_site"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*front, sys.path[-1]])
    import fbgemm_on_cuda

    fbgemm_on_cuda.install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
