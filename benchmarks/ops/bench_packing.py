"""unpad and pad beside a copy of as many bytes, and a micro-batch of many tensors beside one call per tensor.

The copy is the floor: no memory-bound op is faster.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.ops.ways import DTYPE, OURS
from benchmarks.support.harness import COPY, DEVICE, Variant, copy_of, measured
from rlft_fast.ops import packing

# On a CPU, the hidden size of SmolLM2-135M; on a GPU, sizes at which launches do not decide.
B, L, D = (64, 2048, 576) if DEVICE.type == "cpu" else (64, 4096, 4096)
OPERATORS = ("unpad", "pad")
MICRO_BATCHES = 10  # one micro-batch takes no longer than the overhead of the first call in cold caches
STEP = (f"unpad {MICRO_BATCHES} micro-batches", f"pad {MICRO_BATCHES} micro-batches")
ONE_BY_ONE = "one call per tensor"
NONZERO = "nonzero + gather"


def log_normal_lengths(seed: int = 0) -> Tensor:
    """(B,) lengths distributed like those of responses: many are short, a few are at the limit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(B).log_normal_(mean=6.2, std=0.8, generator=generator).clamp(1, L).long()


def suite() -> list[Variant]:
    """Every variant, see `operator_suite` and `micro_batch_suite`."""
    return operator_suite() + micro_batch_suite()


def operator_suite() -> list[Variant]:
    """Both operators beside copies that move as many bytes.

    unpad reads and writes the packed tensor. pad reads the packed tensor and writes the padded tensor, so its copy
    moves the mean of both. The copies write into memory allocated before, although the ops allocate their outputs.
    """
    lengths = log_normal_lengths()
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(DEVICE, torch.int32)
    num_tokens = int(lengths.sum())
    packed = torch.randn(num_tokens, D, dtype=DTYPE, device=DEVICE)
    padded = packing.pad(packed, cu_seqlens, L)
    mean = torch.randn((num_tokens + B * L) // 2, D, dtype=DTYPE, device=DEVICE)
    operators = {
        "unpad": (lambda: packing.unpad(padded, cu_seqlens, num_tokens=num_tokens), packed),
        "pad": (lambda: packing.pad(packed, cu_seqlens, L), mean),
    }
    variants = []
    for task, (operator, moved) in operators.items():
        ways = {OURS: operator, COPY: copy_of(moved)}
        variants += [Variant(task, way, run) for way, run in ways.items()]
    return variants


def micro_batch_suite() -> list[Variant]:
    """All tensors that a trainer holds per token, moved between (B, L) with an attention mask and (T,).

    All ways find the tokens of the mask; only nonzero waits for their number. nonzero + gather is flash-attn's
    bert_padding in plain PyTorch. Its padding starts from the indices that unpadding found, and ours from the columns.
    """
    lengths = log_normal_lengths()
    mask_BL = (torch.arange(L) < lengths[:, None]).to(DEVICE)
    padded = micro_batch()
    num_tokens = int(lengths.sum())
    tokens = packing.masked_tokens(mask_BL)
    packed = packing.unpad(padded, *tokens)
    indices_T = mask_BL.flatten().nonzero().flatten()

    def unpad() -> tuple[Tensor, ...]:
        return tuple(packing.unpad(padded, *packing.masked_tokens(mask_BL, num_tokens)).values())

    def unpad_one_by_one() -> tuple[Tensor, ...]:
        found = packing.masked_tokens(mask_BL, num_tokens)
        return tuple(packing.unpad(tensor, *found) for tensor in padded.values())

    def unpad_by_nonzero() -> tuple[Tensor, ...]:
        cu_seqlens = torch.nn.functional.pad(mask_BL.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        found_T = mask_BL.flatten().nonzero().flatten()
        return (cu_seqlens, *(tensor.flatten(0, 1).gather(0, found_T) for tensor in padded.values()))

    def pad() -> tuple[Tensor, ...]:
        return tuple(packing.pad(packed, tokens.cu_seqlens, L, tokens.column_T).values())

    def pad_one_by_one() -> tuple[Tensor, ...]:
        return tuple(packing.pad(tensor, tokens.cu_seqlens, L, tokens.column_T) for tensor in packed.values())

    def pad_by_index() -> tuple[Tensor, ...]:
        zeros = {name: tensor.new_zeros(B * L) for name, tensor in packed.items()}
        return tuple(zeros[name].index_copy_(0, indices_T, tensor).view(B, L) for name, tensor in packed.items())

    unpad_task, pad_task = STEP
    ways = {
        unpad_task: {OURS: unpad, ONE_BY_ONE: unpad_one_by_one, NONZERO: unpad_by_nonzero},
        pad_task: {OURS: pad, ONE_BY_ONE: pad_one_by_one, NONZERO: pad_by_index},
    }
    return [Variant(task, way, _repeated(run)) for task in ways for way, run in ways[task].items()]


def micro_batch() -> dict[str, Tensor]:
    """Six (B, L) tensors."""
    generator = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(50_000, (B, L), generator=generator) for name in ("input_ids", "position_ids")}
    values = {name: torch.randn(B, L, generator=generator) for name in ("old_logprob", "ref_logprob", "advantage")}
    loss_mask = torch.rand(B, L, generator=generator) < 0.8
    return {name: tensor.to(DEVICE) for name, tensor in (ids | values | {"loss_mask": loss_mask}).items()}


def _repeated(run: Callable[[], object]) -> Callable[[], object]:
    return lambda: [run() for _ in range(MICRO_BATCHES)]


@pytest.fixture(scope="module")
def variants() -> dict[str, Variant]:
    return {variant.name: variant for variant in suite()}


CASES = [(task, way) for task in OPERATORS for way in (OURS, COPY)]
CASES += [(task, way) for task in STEP for way in (OURS, ONE_BY_ONE, NONZERO)]


@pytest.mark.parametrize(("task", "way"), CASES)
def test_packing(benchmark, variants: dict[str, Variant], task: str, way: str) -> None:
    benchmark.group = task
    measured(benchmark, variants[f"{task} | {way}"].run, rounds=10)
