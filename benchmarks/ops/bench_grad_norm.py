"""Our norm of many gradients, beside torch's norm and beside a copy that moves as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.ops.ways import OURS
from benchmarks.support.harness import COPY, DEVICE, Variant, copy_of, measured
from rlft_fast.ops import grad_norm

NUM_TENSORS = 2000
NUM_ELEMENTS = 30_000_000 if DEVICE.type == "cpu" else 1_500_000_000
TASK = f"norm of {NUM_TENSORS:,} gradients"
TORCH = "torch, foreach"


def sizes() -> np.ndarray:
    """Elements of each gradient: log-normal, from a few to a tenth of everything."""
    draws = np.random.default_rng(0).lognormal(0, 2, NUM_TENSORS)
    return np.ceil(draws * (NUM_ELEMENTS / draws.sum())).astype(np.int64)


def make_parameters() -> list[nn.Parameter]:
    """Parameters with random gradients: every second gradient is bfloat16, the others are float32."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    parameters = []
    for index, size in enumerate(sizes().tolist()):
        dtype = torch.bfloat16 if index % 2 else torch.float32
        parameter = nn.Parameter(torch.empty(size, dtype=dtype, device=DEVICE))
        parameter.grad = torch.randn(size, generator=generator, dtype=dtype, device=DEVICE)
        parameters.append(parameter)
    return parameters


def suite() -> list[Variant]:
    """Ours, torch's, and the copy. The copy reads and writes half of the gradients' bytes."""
    parameters = make_parameters()
    gradients = [parameter.grad for parameter in parameters]
    moved = torch.ones(sum(g.nbytes for g in gradients) // 2, dtype=torch.uint8, device=DEVICE)
    ways: dict[str, Callable[[], object]] = {
        OURS: partial(grad_norm, parameters),
        TORCH: partial(nn.utils.get_total_norm, gradients, foreach=True),
        COPY: copy_of(moved),
    }
    return [Variant(TASK, way, run) for way, run in ways.items()]


@cache
def _variants() -> dict[str, Variant]:
    return {variant.way: variant for variant in suite()}


@pytest.mark.parametrize("way", [OURS, TORCH, COPY])
def test_grad_norm(benchmark, way: str) -> None:
    benchmark.group = TASK
    measured(benchmark, _variants()[way].run, rounds=10)


def test_ours_is_the_norm() -> None:
    exact = sum(p.grad.double().square().sum() for p in make_parameters()) ** 0.5
    assert abs(_variants()[OURS].run().item() / exact.item() - 1) < 1e-6
