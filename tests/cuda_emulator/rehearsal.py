"""Stands in for the Python of benchmarks/gpu.sh on a machine without a GPU: `python -m tests.cuda_emulator.rehearsal`.

The GPU is emulated, problems are tiny, and packages that a bare GPU machine lacks cannot be imported. Times mean
nothing.
"""

import importlib
import os
import runpy
import sys
import time

ABSENT = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "gguf", "datasets", "trl")
ROUNDS = 2  # of times that mean nothing
# A few of the tests that are marked gpu; `make emulate` runs the others.
TESTS = "test_norm_and_scaling or outside_the_vocabulary"


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.seconds = float("nan")

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.seconds - self.seconds)


def install_device() -> None:
    from benchmarks.support import fake_gpu  # before torch, which asks once whether there is a GPU

    import torch  # isort: skip

    fake_gpu.install()
    fake_gpu.interpret_triton()
    torch.cuda.Event = Event
    torch.cuda._sleep = lambda cycles: None
    torch.cuda.reset_peak_memory_stats = lambda: None
    torch.cuda.memory_allocated = lambda: 0
    torch.cuda.max_memory_allocated = lambda: 1 << 30
    torch.cuda.get_device_name = lambda index=None: "emulated"
    fake_gpu.CudaDevice().__enter__()


def make_problems_tiny() -> None:
    from benchmarks.ops import bench_adamw, bench_grad_norm, bench_linear_logprob, bench_packing, kernels_gpu, report
    from benchmarks.ops.ways import EAGER, OURS
    from benchmarks.support import harness

    bench_linear_logprob.FULL_SHAPE = (16, 24, 64)
    for _, loaders in bench_linear_logprob.TASKS.values():
        for way in [way for way in loaders if not way.startswith((OURS, EAGER))]:
            del loaders[way]
    bench_linear_logprob.VARIATIONS = {
        name: (change, tasks, tuple(way for way in ways if way.startswith(OURS)))
        for name, (change, tasks, ways) in bench_linear_logprob.VARIATIONS.items()
    }
    harness._CACHE_BYTES = 1024
    bench_packing.B, bench_packing.L, bench_packing.D = 4, 16, 8
    bench_grad_norm.NUM_TENSORS, bench_grad_norm.NUM_ELEMENTS = 20, 2000
    for task in bench_adamw.MODELS:
        bench_adamw.MODELS[task] = (1, 8, 16)
    kernels_gpu.NUM_ELEMENTS, kernels_gpu.TILE_ROWS = 16_000, (2, 3, 4)
    kernels_gpu.CHUNK_ROWS, kernels_gpu.TILE_COLUMNS = (256,), (8192,)
    kernels_gpu.WORKSPACE_MIB = (256,)
    report.SMALL_ROUNDS = ROUNDS


def main() -> None:
    """`-m MODULE ARGUMENTS`, `-c CODE` or `SCRIPT ARGUMENTS`, as Python takes them."""
    sys.modules.update(dict.fromkeys(ABSENT))
    option, *arguments = sys.argv[1:]
    if option == "-c":
        sys.modules["xdist"] = None  # workers would not be emulated
        exec(arguments[0])
        return
    if option == "setup.py":  # beside the build of this tree
        arguments = ["-q", "build", "--build-base", os.environ["REHEARSED_BUILD"]]
        os.environ.pop("LD_PRELOAD", None)  # compilers do not survive the sanitizers
    if option != "-m":
        sys.argv = [option, *arguments]
        runpy.run_path(os.path.abspath(option), run_name="__main__")
        return
    module, *rest = arguments
    sys.argv = [module, *rest]
    # FSDP and autograd's hooks, which train_step needs, know no emulated device.
    if module.startswith("benchmarks.") and module != "benchmarks.engine.utilisation_gpu":
        install_device()
        make_problems_tiny()
        sys.argv += ["--rounds", str(ROUNDS)]
        importlib.import_module(module).main()  # not a second copy of the module, whose problems are large
        return
    if module == "pytest":
        sys.argv += ["--capture=sys", "-p", "tests.cuda_emulator.plugin", "-k", TESTS]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
