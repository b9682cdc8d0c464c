"""What `auto` chooses: compiled kernels on the CPU, and on a GPU what was measured to be fastest."""

import json

import pytest
import torch

from rlft_fast.ops import linear_logprob
from rlft_fast.ops.backends import KINDS, MEASUREMENTS, fastest, read_measurements, resolve_backend

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


def test_measurements_of_other_things_do_not_count():
    entries = [entry(SHAPE, 2, 1), entry(SHAPE, 1, 2, kind="loss"), entry(SHAPE, 1, 2, dtype="float32")]
    assert chosen(entries, SHAPE) == "triton"
    assert chosen(entries, SHAPE, kind="loss") == "native"
    assert chosen(entries, SHAPE, kind="frozen head") == "native"  # nobody measured it
    assert chosen(entries, SHAPE, dtype="float32") == "native"
    assert chosen(entries, SHAPE, device="cuda 8.0") == "native"
    assert chosen([], SHAPE) == "native"


def test_shipped_measurements_can_be_read():
    for measured in read_measurements(MEASUREMENTS):
        assert measured["kind"] in KINDS
        assert len(measured["shape"]) == 3
        assert set(measured["milliseconds"]) == {"native", "triton"}


def test_auto_on_the_cpu_is_native():
    assert resolve_backend("auto", torch.device("cpu"), torch.float32, "no grad", (1, 1, 1), None) == "native"
    hidden, weight, target = torch.randn(5, 8), torch.randn(30, 8), torch.arange(5)
    automatic, native = (linear_logprob(hidden, weight, target, backend=b).logprob for b in ("auto", "native"))
    assert automatic.equal(native)


def test_unknown_backends_are_named():
    with pytest.raises(ValueError, match=r"'auto', 'native', 'triton' or 'reference', got 'cuda'"):
        resolve_backend("cuda", torch.device("cpu"), torch.float32, "loss", (1, 1, 1), None)
