#!/usr/bin/env bash
# Builds and runs the C++ tests plainly (the engine's once per instruction set), under the address
# and undefined behaviour sanitizers, and under the thread sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."

engine=(kernel_tests batch_tests memory_tests admission_tests optimizer_tests thread_tests)
others=(slot_map_tests store_tests text_tests)

build() {  # name, sanitizers
  cmake -S . -B "build/sanitize-$1" -DDYNAMICEMB_PYTHON=OFF -DDYNAMICEMB_TESTS=ON \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDYNAMICEMB_SANITIZE="$2" >/dev/null
  cmake --build "build/sanitize-$1" --target "${engine[@]}" "${others[@]}" -j "$(nproc)" >/dev/null
}

run() {  # name, tests
  local tests
  for tests in "${@:2}"; do "build/sanitize-$1/$tests"; done
}

build plain ""
for isa in baseline avx2 avx512; do
  echo "== plain, $isa"
  DYNAMICEMB_ISA=$isa run plain "${engine[@]}"
done
run plain "${others[@]}"
build address address,undefined
echo "== address and undefined behaviour"
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
run address "${engine[@]}" "${others[@]}"
build thread thread
echo "== threads"
run thread "${engine[@]}" "${others[@]}"
