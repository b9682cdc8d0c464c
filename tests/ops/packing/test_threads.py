"""Threads share one long sequence: where they cut it must not show."""

import torch
from torch import Tensor

from rlft_fast.ops import packing
from tests.support.machine.threads import num_threads

LENGTHS = [50_000, 0, 3, 30_001]  # of more bytes than one thread takes
L, T = 50_002, sum(LENGTHS) + 20_000  # rows behind the last sequence are shared, too


def results() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = {"ids": torch.arange(T), "kept": torch.rand(T, 2, generator=generator) < 0.5}
    mask_BL = torch.rand(len(LENGTHS), L, generator=generator) < torch.tensor([[1.0], [0.0], [0.999], [0.5]])
    masked = packing.masked_tokens(mask_BL, T + 100_000)
    outputs = [*masked, packing.position_ids(cu_seqlens, T), packing.next_token_targets(packed["ids"], cu_seqlens)]
    outputs.append(packing.segment_expand(torch.arange(4.0), cu_seqlens, T))
    outputs.append(packing.segment_sum(torch.rand(T, 5, generator=generator), cu_seqlens))
    rows = packing.row_index(torch.randint(T // 2, (T,), generator=generator), T // 2)
    outputs.append(packing.take_rows(torch.rand(T // 2, 5, generator=generator), rows))
    outputs.append(torch.ops.rlft_fast.sum_rows(torch.rand(T, 5, generator=generator), *rows))
    for side in ("left", "right"):
        padded = packing.pad(packed, cu_seqlens, L, padding_side=side, value=-1)
        outputs += [*padded.values(), *packing.unpad(padded, cu_seqlens, num_tokens=T, padding_side=side).values()]
    chosen = packing.unpad(padded, *masked)
    return [*outputs, *chosen.values(), *packing.pad(chosen, masked.cu_seqlens, L, masked.column_T, value=-1).values()]


def test_any_number_of_threads_gives_the_same():
    with num_threads(1):
        expected = results()
    for count in (2, 3):
        with num_threads(count):
            for actual, alone in zip(results(), expected, strict=True):
                assert torch.equal(actual, alone)
