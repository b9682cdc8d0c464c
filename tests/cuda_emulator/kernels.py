"""The CUDA kernels alone, with arguments as the ops pass them. `make emulate` runs this beside tests/ops."""

import os
import re
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft_fast.ops import packing
from rlft_fast.ops.logprob import reference

pytestmark = pytest.mark.gpu
ORDERS = range(4)  # of threads and blocks: ascending, descending, two random ones


class Kernels:
    """The operators' CUDA kernels by name; here they take CPU tensors."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.rlft_fast, name).default
        return lambda *args: operator._op_dk(torch.DispatchKey.CUDA, *args)


KERNELS = Kernels()


def make_tile(rows: int, columns: int, stride: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits with a row stride, targets, bias, inverse temperatures); the first target lies outside the tile."""
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, stride, generator=g)[:, :columns]
    target = torch.randint(0, columns, (rows,), generator=g)
    target[0] = columns + 3
    return logits, target, torch.randn(columns, generator=g), torch.rand(rows, generator=g) + 0.5


# One block, several with a ragged end in 16-byte words, and rows that do not begin at one.
shapes = pytest.mark.parametrize(("columns", "stride"), [(2048, 2048), (4100, 4100), (5003, 5008), (37, 37)])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


softcaps = pytest.mark.parametrize("softcap", [None, 5.0])
SCALE = 0.7


def softmax_logits(logits: Tensor, bias: Tensor, inv_temperature: Tensor, softcap: float | None) -> Tensor:
    return reference.transform_logits(logits.double() + bias, inv_temperature.double().reciprocal(), softcap, SCALE)


@shapes
@dtypes
@softcaps
@pytest.mark.parametrize("entropy", [False, True])
def test_logit_gradients_in_the_dtype_of_the_next_gemm(columns, stride, dtype, softcap, entropy):
    logits, target, bias, inv_temperature = make_tile(6, columns, stride)
    upstream, upstream_entropy = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    upstream[4] = upstream_entropy[4] = 0
    z = logits.double().requires_grad_()
    x = softmax_logits(z, bias, inv_temperature, softcap)
    hit = torch.arange(columns) == target[:, None]
    log_p = x.log_softmax(-1)
    row_entropy = -(log_p.exp() * log_p).sum(-1)
    loss = upstream * (x.masked_fill(~hit, 0).sum(-1) - x.logsumexp(-1))
    (loss + upstream_entropy * row_entropy if entropy else loss).sum().backward()
    maximum = x.detach().amax(-1)
    log_sum = x.detach().logsumexp(-1) - maximum
    out = torch.full((6, stride), 7.0, dtype=dtype)
    KERNELS.logprob_grad_(
        logits, target, 0, bias, inv_temperature, softcap or 0.0, SCALE, maximum.float(), log_sum.float(),
        row_entropy.detach().float() if entropy else None, upstream, upstream_entropy if entropy else None,
        out[:, :columns],
    )  # fmt: skip
    # Beside the rounding of the result, that of float32; float16 has no digits at all below 6e-8.
    torch.testing.assert_close(out[:, :columns].double(), z.grad, rtol=torch.finfo(dtype).eps, atol=2e-6)
    assert (out[:, columns:] == 7).all()


@shapes
@dtypes
@softcaps
def test_frozen_tile_in_the_dtype_of_the_next_gemm(columns, stride, dtype, softcap):
    logits, target, bias, inv_temperature = make_tile(6, columns, stride)
    x = softmax_logits(logits, bias, inv_temperature, softcap)
    before = x.amax(-1).float() + torch.tensor([-torch.inf, 2, -3, 0, 1, -40])  # what the tiles so far have seen
    seen = (before != -torch.inf).float()
    maximum, excess, sum_others = before.clone(), 6 * seen - 1, 2 * seen
    accumulator = seen[:, None].expand(6, 300).clone()
    target_logit, target_slope = torch.full((2, 6), torch.nan)
    out = torch.full((6, stride), 7.0, dtype=dtype)
    KERNELS.logprob_frozen_(
        logits, target, 0, bias, inv_temperature, softcap or 0.0, SCALE, maximum, excess, target_logit, sum_others,
        target_slope, accumulator, out[:, :columns],
    )  # fmt: skip
    top = torch.maximum(before.double(), x.amax(-1))
    down = seen * (before.double() - top).exp()
    e = (x - top[:, None]).exp()
    slope = SCALE * inv_temperature.double()[:, None].expand_as(x)
    if softcap is not None:
        slope = slope * (1 - (x / inv_temperature[:, None] / softcap) ** 2)
    hit = torch.arange(columns) == target[:, None]
    close = {"rtol": 2e-5, "atol": 1e-6}
    torch.testing.assert_close(maximum.double(), top, **close)
    torch.testing.assert_close(excess.double(), 6 * down + e.sum(-1) - 1, **close)
    torch.testing.assert_close(sum_others.double(), 2 * down + e.masked_fill(hit, 0).sum(-1), **close)
    torch.testing.assert_close(accumulator.double(), down[:, None].expand(6, 300), **close)
    expected = (e * slope).masked_fill(hit, 0)
    torch.testing.assert_close(out[:, :columns].double(), expected, rtol=torch.finfo(dtype).eps + 2e-5, atol=1e-6)
    assert (out[:, columns:] == 7).all()
    assert target_logit.isnan().tolist() == target_slope.isnan().tolist() == [True] + 5 * [False]
    torch.testing.assert_close(target_logit[1:].double(), x[hit], **close)
    torch.testing.assert_close(target_slope[1:].double(), slope[hit], **close)


def logprob_results() -> list[Tensor]:
    logits, target, bias, inv_temperature = make_tile(6, 5003, 5008)
    problem = (logits, target, 0, bias, inv_temperature, 5.0, 0.7)
    sums = [torch.full((6,), -torch.inf), *torch.zeros(3, 6), torch.full((6,), torch.nan), torch.zeros(6).double()]
    KERNELS.logprob_stats_(*problem, *sums)
    upstream = [sums[0], sums[1].log1p(), sums[2], torch.ones(6), torch.ones(6)]
    grad, exp_logits = torch.zeros(2, 6, 5003, dtype=torch.bfloat16)
    KERNELS.logprob_grad_(*problem, *upstream, grad)
    frozen = [torch.full((6,), -torch.inf), *torch.zeros(4, 6), torch.ones(6, 300)]
    KERNELS.logprob_frozen_(*problem, *frozen, exp_logits)
    return [*sums, *frozen, grad, exp_logits]


def packing_results() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 9001, generator=g) < 0.7
    mask, values = mask.cuda(), torch.randn(5, 9001, 3, generator=g).cuda()
    tokens = packing.masked_tokens(mask, 40_000)
    packed = packing.unpad({"values": values, "mask": mask}, *tokens)
    padded = packing.pad(packed, tokens.cu_seqlens, 9001, tokens.column_T)
    segments = packing.segment_sum(packed["values"], tokens.cu_seqlens)
    positions = packing.position_ids(tokens.cu_seqlens, 40_000)
    rows = packing.RowIndex(*(x.cuda() for x in packing.row_index(torch.randint(99, (40_000,), generator=g), 99)))
    sums = torch.ops.rlft_fast.sum_rows(packed["values"], *rows)
    taken = packing.take_rows(sums, rows)
    return [*tokens, *packed.values(), *padded.values(), segments, positions, sums, taken]


def list_results() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = [1, 0, 7, 40_000, 513, 33_000]
    lists = [[torch.rand(size, generator=g) for size in sizes] for _ in range(4)]
    steps = [torch.zeros(()) for _ in sizes]
    norms = [KERNELS.multi_tensor_norm_pow(lists[0], [2, 3, 1], p) for p in (2.0, 3.0, torch.inf)]
    KERNELS.multi_tensor_scale_(lists[1], torch.tensor(0.3))
    for x in lists[2]:
        KERNELS.scale_(x, torch.tensor(0.3))
    KERNELS.multi_tensor_adamw_(*lists, [], steps, 1e-3, None, 0.9, 0.99, 0.1, 1e-8, torch.tensor(0.5), None)
    return [*norms, *(x for tensors in lists for x in tensors), *steps]


@pytest.mark.parametrize("results", [logprob_results, packing_results, list_results])
def test_no_bit_depends_on_the_order_of_threads(results, monkeypatch):
    """A missing barrier would show here, and so would a sum by atomics."""
    runs = []
    for order in ORDERS:
        monkeypatch.setenv("RLFT_EMULATOR_ORDER", str(order))
        runs.append(results())
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


def test_nothing_outside_the_tensors_is_touched():
    """Values of cu_seqlens are not checked on a GPU, so they may be anything. AddressSanitizer looks on."""
    nonsense = torch.tensor([0, 50, -7, 2**31 - 1], dtype=torch.int32)
    columns = torch.tensor([-5, 99, 2, 2**31 - 1, 1, 0], dtype=torch.int32)
    x = torch.ones(3, 4, 2)
    for column_T in (None, columns):
        for left in (False, True):
            KERNELS.unpad([x], nonsense, column_T, 6, left)
            KERNELS.pad([x.flatten(0, 1)[:6].clone()], nonsense, column_T, 4, left, [0.0])
    KERNELS.segment_sum(x.flatten(0, 1), nonsense)
    KERNELS.segment_expand(x[:, 0].clone(), nonsense, 6)
    bad = torch.tensor([-1, 2**40, 0, 5])
    for width in (2, 4):  # rows of 8 bytes, and of a vector
        assert KERNELS.take_rows(torch.ones(3, width), bad, bad, nonsense)[:, 0].tolist() == [0, 0, 1, 0]
        assert KERNELS.sum_rows(torch.ones(4, width), bad, bad, nonsense)[:, 0].tolist() == [1, 0, 1]
    KERNELS.position_ids(nonsense, 6)
    KERNELS.next_token_targets(torch.arange(6), nonsense, -100)
    KERNELS.mask_columns(torch.ones(3, 4, dtype=torch.bool), nonsense, 6)


WAITING = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.any()),
    "list": lambda x: x.tolist(),
    "size": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "equality": lambda x: x.equal(x),
    "copy from it": lambda x: x.cpu(),
    "copy to it": lambda x: torch.ones(3).cuda() + x,
    "counts": lambda x: x.long().bincount(),
    "repetition": lambda x: x.repeat_interleave(x.long()),
    "in a custom op": lambda x: torch.ops.rlft_fast.linear_logprob_frozen_backward(torch.ones(3, 2).cuda(), x),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_waits_for_the_device_raises(what):
    x = torch.tensor([0.0, 1.0, 2.0]).cuda()
    WAITING[what](x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="waits for the device"):
            WAITING[what](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_kernels_files_have_nothing_to_wait_by():
    """The kernels call CUDA's runtime through launch.cuh alone, and the emulator replaces launch.cuh."""
    command = ["nm", "-D", "--undefined-only", os.environ["RLFT_EMULATED_KERNELS"]]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "aoti_torch_get_data_ptr" in symbols
    assert [name for name in symbols if re.match("cuda[A-Z]|aoti_torch_(item|copy)", name)] == []
