#!/usr/bin/env bash
# Everything that only a GPU can show, on a bare machine with CUDA, nvcc and torch; the most telling parts first.
#
#   benchmarks/gpu.sh [all | build | test | bench | engine | small | peers | sanitize] [OUTPUT_FOLDER]
#
# Needs no network where torch, pytest, hypothesis, pybind11 and ninja are installed; the engine's tests need transformers,
# pydantic and rich, too. Peers that are not installed are named in the report, and a test file that cannot be imported
# does not keep the others back. With pytest-xdist the tests share the GPU.
# What was fastest lands in OUTPUT_FOLDER/fastest_backend.json: `backend="auto"` takes it from
# rlft_fast/ops/fastest_backend.json, once it is copied there. Each part has a time limit, so that a part that hangs
# does not take the others' results with it; `engine` is not in `all`, which ends within ten minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:-all}
output=${2:-benchmarks/results}
mkdir -p "$output"
export PYTHONUNBUFFERED=1 PATH="$PATH:/usr/local/cuda/bin"
status=0

run() {  # run NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  if [[ $part != all && $part != "$name" ]]; then return; fi
  echo "== $name"
  local start=$SECONDS
  timeout "$limit" "$@" 2>&1 | tee "$output/$name.log" | tail -n 40
  local code=${PIPESTATUS[0]}
  echo "== $name: exit status $code after $((SECONDS - start)) s"
  ((code == 0)) || status=1
}

report() {  # report NAME T D V SECONDS
  python3 -m benchmarks.report --shape "$2" "$3" "$4" --name "$1" --output "$output" \
    --fastest "$output/fastest_backend.json" --seconds "$5"
}
export -f report
export output

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
python3 -c 'import xdist' 2>/dev/null && workers="-n 4" || workers=""
run build 120 python3 setup.py build_ext --inplace
# shellcheck disable=SC2086
run test 120 python3 -m pytest -m gpu -p no:cacheprovider --continue-on-collection-errors --tb=short $workers tests
run bench 130 bash -c 'report gpu-8192x4096x151936 8192 4096 151936 80'
run small 80 bash -c 'report gpu-16384x896x151936 16384 896 151936 40'
run peers 60 bash -c 'report gpu-8192x2304x256000 8192 2304 256000 30'
# Small shapes only: compute-sanitizer slows kernels down a hundredfold.
small_tests="outside_the_vocabulary or add_nothing or many_tensors or segment_mean or nothing_outside or test_grad_clip"
sanitize() {
  compute-sanitizer --tool "$1" --error-exitcode 1 python3 -m pytest -m gpu -p no:cacheprovider tests/ops -k "$small_tests"
}
export -f sanitize
export small_tests
run sanitize 90 bash -c 'sanitize memcheck && sanitize racecheck'
[[ $part == engine ]] && run engine 300 python3 -m benchmarks.bench_engine_gpu --output "$output"
exit $status
