"""Clipping and AdamW: our norm and one fused pass, beside torch's norm, scaling and step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.ops.ways import OURS
from benchmarks.support.harness import DEVICE, Variant, measured
from rlft_fast.ops import FusedAdamW, clip_coefficient, grad_norm

MAX_NORM = 1.0
FUSED, FOREACH = "torch, fused", "torch, foreach"
# (layers, hidden size, vocabulary) by task.
MODELS = {
    "clip + AdamW, 1 M parameters": (4, 128, 2048),
    "clip + AdamW, 30 M parameters": (10, 384, 24576),
}
if DEVICE.type == "cuda":
    MODELS = {"clip + AdamW, 0.5 B parameters": (24, 1024, 151936)}


def shapes(layers: int, hidden: int, vocab: int) -> list[tuple[int, ...]]:
    """The parameters of a small language model: one large matrix, many medium matrices, and many tiny norms."""
    attention = [(hidden, hidden), (hidden // 4, hidden), (hidden // 4, hidden), (hidden, hidden)]
    mlp = [(4 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    return [(vocab, hidden), *[*attention, *mlp, (hidden,), (hidden,)] * layers, (hidden,)]


def suite() -> list[Variant]:
    """Every way to clip and step the same parameters.

    torch scales the gradients in place. After its first run they need no clipping, but torch multiplies them again.
    """
    return [Variant(task, way, build(make_parameters(task))) for task in MODELS for way, build in WAYS.items()]


def make_parameters(task: str) -> list[nn.Parameter]:
    """Random parameters with gradients whose norm is far above the limit."""
    randn = partial(torch.randn, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    parameters = [nn.Parameter(randn(shape)) for shape in shapes(*MODELS[task])]
    for parameter in parameters:
        parameter.grad = randn(parameter.shape)
    return parameters


def _ours(parameters: list[nn.Parameter]) -> Callable[[], None]:
    optimizer = FusedAdamW(parameters)

    def run() -> None:
        coefficient, found_inf = clip_coefficient(grad_norm(parameters), MAX_NORM)
        optimizer.step(coefficient=coefficient, found_inf=found_inf)

    return run


def _torchs(**options: bool) -> Callable[[list[nn.Parameter]], Callable[[], None]]:
    def build(parameters: list[nn.Parameter]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(parameters, **options)

        def run() -> None:
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()

        return run

    return build


WAYS = {OURS: _ours, FUSED: _torchs(fused=True), FOREACH: _torchs(foreach=True)}


@pytest.fixture(scope="module")
def variants() -> dict[str, Variant]:
    return {variant.name: variant for variant in suite()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", MODELS)
def test_adamw(benchmark, variants: dict[str, Variant], task: str, way: str) -> None:
    benchmark.group = task
    measured(benchmark, variants[f"{task} | {way}"].run, rounds=10)


@pytest.mark.parametrize("task", MODELS)
def test_all_ways_take_the_same_steps(task: str) -> None:
    results = []
    for build in WAYS.values():
        parameters = make_parameters(task)
        run = build(parameters)
        for _ in range(3):
            run()
        results.append(parameters)
    for others in results[1:]:
        for parameter, other in zip(results[0], others, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
