#!/usr/bin/env bash
# Builds the C++ extension into src/dynamicemb for the python3 at hand, without installing: for the
# comparison of CPU and GPU on a machine that has CMake, a compiler and nanobind alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
cmake -S . -B build/device -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v python3)" \
  -Dnanobind_ROOT="$(python3 -m nanobind --cmake_dir)" > build_device.log 2>&1 || { cat build_device.log; exit 1; }
cmake --build build/device -j 16 --target _engine >> build_device.log 2>&1 || { tail -20 build_device.log; exit 1; }
rm build_device.log
cp build/device/_engine*.so src/dynamicemb/
