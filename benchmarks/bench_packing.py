"""unpad and pad against a copy of the same bytes, which is the fastest that a memory-bound operator can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.harness import Variant
from benchmarks.ways import OURS
from rlft_fast.ops import packing

B, L, D = 64, 2048, 576
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATORS = ("unpad", "pad")
COPY = "copy"


def log_normal_lengths(seed: int = 0) -> Tensor:
    """(B,) lengths spread as responses are: many short, a few at the limit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(B).log_normal_(mean=6.2, std=0.8, generator=generator).clamp(1, L).long()


def suite() -> list[Variant]:
    """Both operators beside copies that move as many bytes.

    unpad reads and writes the packed tensor; pad reads it and writes the padded one, so its copy moves their mean. The
    copies write into memory that is there, although the operators allocate their outputs.
    """
    lengths = log_normal_lengths()
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(DEVICE, torch.int32)
    num_tokens = int(lengths.sum())
    packed = torch.randn(num_tokens, D, device=DEVICE)
    padded = packing.pad(packed, cu_seqlens, L)
    mean = torch.randn((num_tokens + B * L) // 2, D, device=DEVICE)
    operators = {
        "unpad": (lambda: packing.unpad(padded, cu_seqlens, num_tokens=num_tokens), packed),
        "pad": (lambda: packing.pad(packed, cu_seqlens, L), mean),
    }
    variants = []
    for task, (operator, moved) in operators.items():
        existing = torch.zeros_like(moved)
        ways = {OURS: operator, COPY: partial(_copy, existing, moved)}
        variants += [Variant(task, way, _synchronised(run)) for way, run in ways.items()]
    return variants


def _copy(destination: Tensor, source: Tensor) -> None:
    """Returns nothing: the destination is no output, it is there before."""
    destination.copy_(source)


def _synchronised(run: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    def wait() -> Tensor | None:
        output = run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return output

    return wait


@pytest.fixture(scope="module")
def variants() -> dict[str, Variant]:
    return {variant.name: variant for variant in suite()}


@pytest.mark.parametrize("way", [OURS, COPY])
@pytest.mark.parametrize("task", OPERATORS)
def test_packing(benchmark, variants: dict[str, Variant], task: str, way: str) -> None:
    benchmark.group = task
    benchmark.pedantic(variants[f"{task} | {way}"].run, rounds=10, warmup_rounds=1)
