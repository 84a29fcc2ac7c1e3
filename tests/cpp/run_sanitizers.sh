#!/usr/bin/env bash
# Builds and runs the C++ tests plainly (once per instruction set), under the address and undefined
# behaviour sanitizers, and under the thread sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."

build() {  # name, sanitizers
  cmake -S . -B "build/sanitize-$1" -DDYNAMICEMB_PYTHON=OFF -DDYNAMICEMB_TESTS=ON \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDYNAMICEMB_SANITIZE="$2" >/dev/null
  cmake --build "build/sanitize-$1" --target engine_tests slot_map_tests store_tests -j "$(nproc)" >/dev/null
}

build plain ""
for isa in baseline avx2 avx512; do
  echo "== plain, $isa"
  DYNAMICEMB_ISA=$isa build/sanitize-plain/engine_tests
done
build/sanitize-plain/slot_map_tests
build/sanitize-plain/store_tests
build address address,undefined
echo "== address and undefined behaviour"
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 build/sanitize-address/engine_tests
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 build/sanitize-address/slot_map_tests
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 build/sanitize-address/store_tests
build thread thread
echo "== threads"
TSAN_OPTIONS=halt_on_error=1 build/sanitize-thread/engine_tests
TSAN_OPTIONS=halt_on_error=1 build/sanitize-thread/slot_map_tests
TSAN_OPTIONS=halt_on_error=1 build/sanitize-thread/store_tests
