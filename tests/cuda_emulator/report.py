"""The report of benchmarks/gpu.sh on the emulated device: all of it runs, every bar is in it; its times say nothing."""

import json
import math
import sys
import time

import pytest
import torch

from benchmarks import bench_adamw, bench_grad_norm, bench_linear_logprob, bench_packing, harness, report
from rlft_fast.ops.backends import KINDS, read_measurements

WAYS = {"rlft_fast", "rlft_fast, native", "rlft_fast, triton", "eager PyTorch"}
BARS = {
    "no grad: time / floor", "forward + backward: time / floor", "frozen head: time / floor", "PPO loss: time / floor",
    "cross-entropy loss: time / floor", "PPO loss", "PPO loss: memory in all",
    "PPO loss: fastest peer (eager PyTorch) / rlft_fast", "PPO loss: memory in all of rlft_fast / that peer's",
    "forward + backward: half ignored / all", "PPO loss: half ignored / all",
    *(f"backward of {way}: half of the gradient zero / all" for way in WAYS if way.startswith("rlft_fast")),
    "unpad: share of memcpy's bandwidth", "pad: share of memcpy's bandwidth",
    "norm of 2,000 gradients: share of memcpy's bandwidth", "clip + AdamW, 0.5 B parameters: torch's fused / ours",
}  # fmt: skip


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.seconds = math.nan

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.seconds - self.seconds)


@pytest.mark.gpu
def test_report_holds_every_bar(monkeypatch, tmp_path):
    make_generator = torch.Generator
    for name, value in {
        "cuda.Event": Event,
        "cuda._sleep": lambda cycles: None,
        "cuda.reset_peak_memory_stats": lambda: None,
        "cuda.memory_allocated": lambda: 0,
        "cuda.max_memory_allocated": lambda: 1 << 30,
        "cuda.get_device_name": lambda: "emulated",
        "Generator": lambda device="cpu": make_generator(),
    }.items():
        monkeypatch.setattr(f"torch.{name}", value)

    shape = (16, 24, 64)
    monkeypatch.setattr(bench_linear_logprob, "FULL_SHAPE", shape)
    for _, loaders in bench_linear_logprob.TASKS.values():
        for way in set(loaders) - WAYS:
            monkeypatch.delitem(loaders, way)
    for name, (change, tasks, ways) in bench_linear_logprob.VARIATIONS.items():
        monkeypatch.setitem(bench_linear_logprob.VARIATIONS, name, (change, tasks, tuple(WAYS.intersection(ways))))
    monkeypatch.setattr(harness, "_CACHE_BYTES", 1024)
    for name, size in {"B": 4, "L": 16, "D": 8}.items():
        monkeypatch.setattr(bench_packing, name, size)
    monkeypatch.setattr(bench_grad_norm, "NUM_TENSORS", 20)
    monkeypatch.setattr(bench_grad_norm, "NUM_ELEMENTS", 2000)
    for task in bench_adamw.MODELS:
        monkeypatch.setitem(bench_adamw.MODELS, task, (1, 8, 16))

    arguments = [*map(str, ("--shape", *shape, "--output", tmp_path, "--fastest", tmp_path / "fastest.json"))]
    monkeypatch.setattr(sys, "argv", ["report", *arguments, "--name", "gpu", "--rounds", "1", "--peer-rounds", "1"])
    report.main()

    bars = {bar["name"]: bar for bar in json.loads((tmp_path / "gpu.json").read_text())["bars"]}
    assert set(bars) >= BARS
    assert all(math.isfinite(bar["value"]) for bar in bars.values())
    assert (tmp_path / "gpu.png").stat().st_size > 0
    assert bars["PPO loss: memory in all"]["value"] == pytest.approx(
        1, rel=1e-3
    )  # GiB: the peak, and next to no inputs
    assert {entry["kind"] for entry in read_measurements(tmp_path / "fastest.json")} == set(KINDS)
