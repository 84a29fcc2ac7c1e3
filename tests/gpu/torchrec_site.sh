#!/usr/bin/env bash
# Makes build/gpu_site: TorchRec, fbgemm-gpu-cpu and what they import, for Python 3.12 and torch 2.11
# on a machine that has torch for CUDA but neither these packages nor a network. Carry that folder
# there (40 MB) and run tests/gpu/with_torchrec.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
pip=${PIP:-python3 -m pip}
downloads=build/gpu_downloads site=build/gpu_site
mkdir -p "$downloads" && rm -rf "$site" && mkdir -p "$site"
$pip download -q --no-deps -d "$downloads" --python-version 3.12 --only-binary :all: \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
  fbgemm-gpu-cpu==1.6.0 tensordict==0.11.0 pyre-extensions==0.0.32 typing-inspect==0.9.0 \
  mypy-extensions==1.2.0 pyvers==0.2.3 orjson==3.13.0 portalocker==4.4.2 redis==8.1.0 tqdm==4.70.1 \
  pytest==9.2.0 pluggy iniconfig packaging pygments hypothesis==6.170.15 sortedcontainers nanobind==3.1.0 cloudpickle \
  pytest-xdist==3.8.0 execnet==2.1.2 rich==15.0.0 markdown-it-py mdurl pyyaml==6.0.3
# torchrec's wheel names Python 3.11 in its tag and is plain Python; iopath has no wheel
$pip download -q --no-deps -d "$downloads" --only-binary :all: torchrec==1.6.1
$pip download -q --no-deps --no-binary :all: -d "$downloads" iopath==0.1.10
for wheel in "$downloads"/*.whl; do unzip -q -o "$wheel" -d "$site"; done
tar xzf "$downloads"/iopath-0.1.10.tar.gz --strip-components 1 -C "$site" iopath-0.1.10/iopath
du -sh "$site"
