"""What `auto` chooses: compiled kernels on the CPU, and on a GPU what was measured to be fastest."""

import json

import pytest
import torch

from benchmarks.ops.fastest import entries, write
from benchmarks.ops.ways import backend_way
from benchmarks.support.harness import Measurement, Results
from rlft_fast.ops import linear_logprob
from rlft_fast.ops.backends import KINDS, MEASUREMENTS, dtype_name, fastest, read_measurements, resolve_backend

SHAPE = (8192, 4096, 151936)


def entry(shape: tuple[int, int, int], native: float, triton: float, kind: str = "no grad", **other: str) -> dict:
    times = {"native": native, "triton": triton}
    return {"device": "cuda 9.0", "dtype": "bfloat16", "kind": kind, "shape": shape, "milliseconds": times} | other


def chosen(entries, shape, kind: str = "no grad", dtype: str = "bfloat16", device: str = "cuda 9.0") -> str:
    return fastest(entries, device, dtype, kind, shape)


def test_nearest_measurement_decides(tmp_path):
    path = tmp_path / "fastest.json"
    path.write_text(json.dumps({"measurements": [entry(SHAPE, 10, 12), entry((16384, 896, 151936), 9, 7)]}))
    entries = read_measurements(path)
    assert chosen(entries, SHAPE) == "native"
    assert chosen(entries, (16384, 896, 151936)) == "triton"
    # Ratios count: at T = 8192 the border is where D / 896 = 4096 / D * 1 / 2, at D = 1355.
    assert chosen(entries, (8192, 1340, 151936)) == "triton"
    assert chosen(entries, (8192, 1370, 151936)) == "native"
    assert chosen(entries, (1, 4096, 1)) == "native"
    assert chosen(entries, (10**6, 64, 10**6)) == "triton"


def test_measurements_decide_in_a_compiled_graph():
    measured = [entry(SHAPE, 10, 12), entry((16384, 896, 151936), 9, 7)]

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def columns(x):
        kind = "no grad"
        return x * (
            1 if fastest(measured, "cuda 9.0", dtype_name(torch.bfloat16), kind, (4000, 151936)) == "native" else 2
        )

    assert columns(torch.ones(2)).tolist() == [1, 1]
    assert chosen(measured, (4000, 151936)) == "native"  # without the number of tokens
    assert chosen(measured, (900, 151936)) == "triton"


def test_measurements_of_other_things_do_not_count():
    entries = [entry(SHAPE, 2, 1), entry(SHAPE, 1, 2, kind="loss"), entry(SHAPE, 1, 2, dtype="float32")]
    assert chosen(entries, SHAPE) == "triton"
    assert chosen(entries, SHAPE, kind="loss") == "native"
    assert chosen(entries, SHAPE, kind="frozen head") == "native"  # nobody measured it
    assert chosen(entries, SHAPE, dtype="float32") == "native"
    assert chosen(entries, SHAPE, device="cuda 8.0") == "native"
    assert chosen([], SHAPE) == "native"


def test_the_benchmark_writes_what_auto_reads(tmp_path):
    path = tmp_path / "fastest.json"
    path.write_text('{"measurements": []}')  # instead of the shipped ones

    def measured(native_s: float, triton_s: float, *tasks: str) -> Results:
        times = {"native": native_s, "triton": triton_s}
        return Results(
            {
                f"{task} | {backend_way(b)}": Measurement(seconds=[t, t, 9 * t])
                for task in tasks
                for b, t in times.items()
            }
        )

    write(path, entries(measured(0.002, 0.001, "no grad", "PPO loss"), "cuda 9.0", "bfloat16", SHAPE))
    small = measured(0.001, 0.002, "no grad", "forward + backward")
    small.measured.pop(f"forward + backward | {backend_way('triton')}")  # it failed
    write(path, entries(small, "cuda 9.0", "bfloat16", (2048, 576, 49152)))
    found = read_measurements(path)
    assert [len(found), chosen(found, SHAPE), chosen(found, SHAPE, kind="loss")] == [3, "triton", "triton"]
    assert chosen(found, (2048, 576, 49152)) == "native"
    assert found[-1]["milliseconds"] == {"native": 2.0, "triton": 1.0}
    write(path, entries(measured(0.001, 0.003, "no grad"), "cuda 9.0", "bfloat16", SHAPE))  # measured again
    assert len(read_measurements(path)) == 3
    assert chosen(read_measurements(path), SHAPE) == "native"


def test_shipped_measurements_can_be_read():
    for measured in read_measurements(MEASUREMENTS):
        assert measured["kind"] in KINDS
        assert len(measured["shape"]) == 3
        assert set(measured["milliseconds"]) == {"native", "triton"}


def test_auto_on_the_cpu_is_native():
    assert resolve_backend("auto", torch.device("cpu"), torch.float32, "no grad", (1, 1, 1), False) == "native"
    hidden, weight, target = torch.randn(5, 8), torch.randn(30, 8), torch.arange(5)
    automatic, native = (linear_logprob(hidden, weight, target, backend=b).logprob for b in ("auto", "native"))
    assert automatic.equal(native)


def test_unknown_backends_are_named():
    with pytest.raises(ValueError, match=r"'auto', 'native', 'triton' or 'reference', got 'cuda'"):
        resolve_backend("cuda", torch.device("cpu"), torch.float32, "loss", (1, 1, 1), False)
