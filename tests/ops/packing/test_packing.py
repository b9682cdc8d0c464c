"""Packing ops against the room's reference."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlft_fast.ops import packing
from rlft_fast.ops.packing import reference
from tests.support.machine.devices import DEVICES
from tests.support.machine.launches import count_launches

# One dtype per element size (1, 2, 4, 8 bytes), and both 2-byte floats because their fill values differ.
DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64]
# Empty batch; one token; only empty sequences; empty ones at both ends and between; a long one beside short ones, with
# more tokens than one thread's or one thread block's share.
LENGTHS = [[], [1], [0, 0], [0, 3, 0, 5, 0], [2, 4099, 1, 700]]
# Rows of one element, of a size that no vector width divides, and of 16-byte vectors; two trailing dimensions.
TRAILING = [(), (3,), (16,), (2, 5)]


def cumulative(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-9, 9, shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trailing", TRAILING)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_pad_and_unpad(lengths, trailing, dtype, side, device):
    cu_seqlens = cumulative(lengths, device)
    max_seqlen = max(lengths, default=0) + 2
    packed = random((sum(lengths), *trailing), dtype, device)
    padded = packing.pad(packed, cu_seqlens, max_seqlen, padding_side=side, value=-100)
    assert torch.equal(padded, reference.pad(packed, cu_seqlens, max_seqlen, padding_side=side, value=-100))
    unpadded = packing.unpad(padded, cu_seqlens, padding_side=side)
    assert torch.equal(unpadded, packed)
    assert torch.equal(unpadded, reference.unpad(padded, cu_seqlens, padding_side=side))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), max_size=8), st.integers(0, 3), st.integers(1, 7), st.sampled_from(["left", "right"])
)
def test_pad_and_unpad_any_shape(lengths, slack, width, side):
    max_seqlen = max(lengths, default=0) + slack
    packed = random((sum(lengths), width), torch.float32, "cpu")
    padded = packing.pad(packed, cumulative(lengths), max_seqlen, padding_side=side, value=0.5)
    assert torch.equal(padded, reference.pad(packed, cumulative(lengths), max_seqlen, padding_side=side, value=0.5))
    assert torch.equal(packing.unpad(padded, cumulative(lengths), num_tokens=len(packed), padding_side=side), packed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers_are_filled_with_whole_numbers_of_their_range(dtype, device):
    packed, limits = random((3,), dtype, device), torch.iinfo(dtype)
    largest = min(limits.max, 2**63 - 1024)  # the largest int64 that is a double
    for value in (limits.min, largest, 7.0):
        padded = packing.pad(packed, cumulative([3], device), 4, value=value)
        assert padded.tolist() == [[*packed.tolist(), value]]
    for bad in (limits.min - 1, limits.max + 1, 0.5, torch.inf, torch.nan):
        with pytest.raises(ValueError, match=f"packed is {dtype}, which cannot hold the value {bad}"):
            packing.pad(packed, cumulative([3], device), 4, value=bad)
    with pytest.raises(ValueError, match=r"b is torch\.uint8, which cannot hold the value -1"):
        packing.pad({"a": packed, "b": packed.byte()}, cumulative([3], device), 4, value={"b": -1})


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(torch.float16, 1e6), (torch.float16, -65505), (torch.float32, 1e39), (torch.bool, torch.nan)],
)
def test_what_a_dtype_does_not_hold_is_refused(dtype, bad):
    packed = torch.ones(3, dtype=dtype)
    with pytest.raises(ValueError, match=re.escape(f"packed is {dtype}, which cannot hold the value {bad}")):
        packing.pad(packed, cumulative([3]), 4, value=bad)
    good = 1 if dtype == torch.bool else torch.inf
    assert packing.pad(packed, cumulative([3]), 4, value=good)[0, 3] == good


@pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1])
def test_what_no_double_holds_is_refused(value):
    with pytest.raises(ValueError, match=f"packed cannot be filled with {value}"):
        packing.pad(torch.arange(3), cumulative([3]), 4, value=value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "trailing"), [*((dtype, (1037,)) for dtype in DTYPES), (torch.int64, (2, 1037))])
def test_rows_of_many_words(dtype, trailing, device):
    # 1037 words of every size: a warp has 128 of them under way, and 13 are left over.
    packed = random((5, *trailing), dtype, device)
    padded = packing.pad(packed, cumulative([2, 3], device), 4, value=1)
    assert torch.equal(padded, reference.pad(packed, cumulative([2, 3], device), 4, value=1))
    assert torch.equal(packing.unpad(padded, cumulative([2, 3], device)), packed)


@pytest.mark.parametrize("device", DEVICES)
def test_payload_need_not_be_contiguous_or_aligned(device):
    cu_seqlens = cumulative([3, 5], device)
    transposed = random((4, 8), torch.float32, device).T
    assert torch.equal(packing.pad(transposed, cu_seqlens, 5), reference.pad(transposed, cu_seqlens, 5))
    # 8 floats per row, but the first lies 4 bytes behind a 16-byte boundary.
    shifted = random((65,), torch.float32, device)[1:].view(8, 8)
    assert torch.equal(packing.pad(shifted, cu_seqlens, 5), reference.pad(shifted, cu_seqlens, 5))
    sums = packing.segment_sum(transposed, cu_seqlens)
    assert torch.equal(sums.double(), reference.segment_sum(transposed, cu_seqlens))
    expanded = packing.segment_expand(sums.T.contiguous().T, cu_seqlens)
    assert torch.equal(expanded, reference.segment_expand(sums, cu_seqlens))
    every_other = torch.arange(16, device=device)[::2]
    targets = packing.next_token_targets(every_other, cu_seqlens)
    assert torch.equal(targets, reference.next_token_targets(every_other, cu_seqlens))


def micro_batch(shape: tuple[int, ...], device: str) -> dict[str, Tensor]:
    """What a trainer holds per token; with the words of 1 to 16 bytes that rows travel in."""
    return {
        "input_ids": random(shape, torch.int64, device),
        "positions": random(shape, torch.int32, device),
        "loss_mask": random(shape, torch.bool, device),
        "logprob": random(shape, torch.float32, device),
        "value": random(shape, torch.bfloat16, device),
        "top_k": random((*shape, 3), torch.float64, device),
        "hidden": random((*shape, 2, 80), torch.bfloat16, device),
        "nothing": random((*shape, 0), torch.float32, device),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_many_tensors_move_as_one_tensor_does(lengths, side, device):
    cu_seqlens, max_seqlen = cumulative(lengths, device), max(lengths, default=0) + 1
    packed = micro_batch((sum(lengths),), device)
    values = {"input_ids": 7, "logprob": -0.5, "loss_mask": 1}
    padded = packing.pad(packed, cu_seqlens, max_seqlen, padding_side=side, value=values)
    assert list(padded) == list(packed)
    for name, tensor in packed.items():
        expected = reference.pad(tensor, cu_seqlens, max_seqlen, padding_side=side, value=values.get(name, 0))
        assert torch.equal(padded[name], expected)
    unpadded = packing.unpad(padded, cu_seqlens, padding_side=side)
    assert all(torch.equal(unpadded[name], packed[name]) for name in packed)


@pytest.mark.parametrize("device", DEVICES)
# None; one; more than a CUDA launch has room for.
@pytest.mark.parametrize("count", [0, 1, 70])
def test_any_number_of_tensors(count, device):
    packed = {str(i): random((5, i % 4 + 1), torch.int64, device) + i for i in range(count)}
    padded = packing.pad(packed, cumulative([2, 3], device), 4, value=-1)
    cu_seqlens = cumulative([2, 3], device)
    expected = {name: reference.pad(tensor, cu_seqlens, 4, value=-1) for name, tensor in packed.items()}
    assert all(torch.equal(padded[name], expected[name]) for name in packed)
    unpadded = packing.unpad(padded, cumulative([2, 3], device))
    assert unpadded.keys() == packed.keys()
    assert all(torch.equal(unpadded[name], packed[name]) for name in packed)


def masks(L: int) -> dict[str, Tensor]:
    column = torch.arange(L)
    lengths = torch.tensor([[L], [0], [min(L, 3)], [L // 2]])
    holes = torch.rand(4, L, generator=torch.Generator().manual_seed(L)) < 0.5
    return {
        "right": column < lengths,
        "left": column >= L - lengths,
        "holes": holes,
        "blocks": (column // 5 % 2 == 0).expand(4, L),  # turns of a conversation
        "none": torch.zeros(4, L, dtype=torch.bool),
        "no rows": torch.ones(0, L, dtype=torch.bool),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", masks(1))
# No column; one; aligned 16-byte reads of the mask; unaligned ones and several tiles of a thread block.
@pytest.mark.parametrize("L", [0, 1, 64, 9001])
def test_masked_tokens_are_those_that_indexing_selects(L, kind, device):
    mask_BL = masks(L)[kind].to(device)
    padded = {name: micro_batch(tuple(mask_BL.shape), device)[name] for name in ("input_ids", "loss_mask", "top_k")}
    cu_seqlens, column_T = packing.masked_tokens(mask_BL)
    for got, expected in zip((cu_seqlens, column_T), reference.masked_tokens(mask_BL), strict=True):
        assert torch.equal(got, expected)
        assert got.dtype == torch.int32
    packed = packing.unpad(padded, cu_seqlens, column_T)
    again = packing.pad(packed, cu_seqlens, L, column_T, value=-3)
    for name, tensor in padded.items():
        assert torch.equal(packed[name], tensor[mask_BL])
        assert torch.equal(packed[name], reference.unpad(tensor, cu_seqlens, column_T))
        assert torch.equal(again[name], reference.pad(packed[name], cu_seqlens, L, column_T, value=-3))


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), max_size=5), st.integers(0, 3), st.integers(1, 5))
def test_masked_tokens_with_an_upper_bound(rows, slack, width):
    mask_BL = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 6)
    count = int(mask_BL.sum())
    padded = random((len(rows), 6, width), torch.float32, "cpu")
    tokens = packing.masked_tokens(mask_BL, count + slack)
    assert torch.equal(tokens.column_T, reference.masked_tokens(mask_BL, count + slack)[1])
    packed = packing.unpad(padded, *tokens)
    assert torch.equal(packed, torch.cat([padded[mask_BL.bool()], torch.zeros(slack, width)]))
    again = packing.pad(packed, tokens.cu_seqlens, 8, tokens.column_T)
    assert torch.equal(again[:, :6], padded * mask_BL[..., None])
    assert not again[:, 6:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_sequence_belong_to_none(device):
    cu_seqlens = cumulative([2, 0, 3], device)
    padded = random((3, 4, 2), torch.float32, device)
    packed = packing.unpad(padded, cu_seqlens)
    zeros = packed.new_zeros(4, 2)
    assert torch.equal(packing.unpad(padded, cu_seqlens, num_tokens=9), torch.cat([packed, zeros]))
    longer = torch.cat([packed, zeros.fill_(torch.nan)])
    assert torch.equal(packing.pad(longer, cu_seqlens, 4), packing.pad(packed, cu_seqlens, 4))
    assert torch.equal(packing.segment_sum(longer, cu_seqlens), packing.segment_sum(packed, cu_seqlens))
    ids, values_B = torch.arange(7, device=device), torch.tensor([5, 6, 7], device=device)
    for room in (packing, reference):
        assert room.position_ids(cu_seqlens, 7).tolist() == [0, 1, 0, 1, 2, 0, 0]
        assert room.next_token_targets(ids, cu_seqlens, -1).tolist() == [1, -1, 3, 4, -1, -1, -1]
        assert room.segment_expand(values_B, cu_seqlens, 6).tolist() == [5, 5, 7, 7, 7, 0]


@pytest.mark.gpu
def test_tokens_beyond_the_bound_are_cut_off():
    mask_BL = masks(64)["holes"].cuda()
    padded = random((4, 64, 3), torch.float32, "cuda")
    tokens = packing.masked_tokens(mask_BL, 20)
    packed = packing.unpad(padded, *tokens)
    assert torch.equal(packed, padded[mask_BL][:20])
    again = packing.pad(packed, tokens.cu_seqlens, 64, tokens.column_T)
    assert torch.equal(again.flatten(0, 1)[mask_BL.flatten().nonzero()[:20, 0]], packed)
    assert again.count_nonzero() == packed.count_nonzero()


@pytest.mark.gpu
def test_with_a_bound_nothing_waits_for_the_device():
    mask_BL = masks(64)["holes"].cuda()
    padded = micro_batch((4, 64), "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = packing.masked_tokens(mask_BL, 256)
        packed = packing.unpad(padded, *tokens)
        packing.pad(packed, tokens.cu_seqlens, 64, tokens.column_T)
        packing.unpad(padded, tokens.cu_seqlens, num_tokens=256)
        packing.position_ids(tokens.cu_seqlens, 256)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_one_launch_moves_all_tensors():
    mask_BL = masks(64)["holes"].cuda()
    tokens = packing.masked_tokens(mask_BL, 256)
    padded = micro_batch((4, 64), "cuda") | {"scalars": random((4, 64), torch.float32, "cuda")}
    packed = packing.unpad(padded, *tokens)
    assert len(padded) > 3
    lengths, ids = tokens.cu_seqlens, torch.arange(256, device="cuda")
    rows = rows_on("cuda", [0] * 256, 256)
    for function, kernel in {
        lambda: packing.unpad(padded, *tokens): "copy_rows",
        lambda: packing.pad(packed, lengths, 64, tokens.column_T): "copy_rows",
        lambda: packing.masked_tokens(mask_BL, 256): "mask_columns_kernel",
        lambda: packing.position_ids(lengths, 256): "position_ids_kernel",
        lambda: packing.next_token_targets(ids, lengths): "next_token_targets_kernel",
        lambda: packing.segment_sum(packed["scalars"], lengths): "segment_sum_kernel",
        lambda: packing.segment_expand(lengths[1:], lengths, 256): "copy_rows",
        lambda: packing.take_rows(packed["scalars"], rows): "copy_rows",
        lambda: torch.ops.rlft_fast.sum_rows(packed["scalars"], *rows): "sum_rows_kernel",
    }.items():
        assert count_launches(function, [kernel]) == {kernel: 1}


@pytest.mark.gpu
def test_nothing_outside_the_tensors_is_touched():
    nonsense = torch.tensor([0, 50, -7, 2**31 - 1], dtype=torch.int32, device="cuda")
    columns = torch.tensor([-5, 99, 2, 2**31 - 1, 1, 0], dtype=torch.int32, device="cuda")
    x = torch.ones(3, 4, 2, device="cuda")
    for column_T in (None, columns):
        packing.unpad(x, nonsense, column_T, num_tokens=6)
        packing.pad(x.flatten(0, 1)[:6], nonsense, 4, column_T)
    packing.segment_sum(x.flatten(0, 1), nonsense)
    bad = torch.tensor([-1, 2**40, 0, 5], device="cuda")
    for width in (2, 4):  # rows of 8 bytes, and of a vector
        values = torch.ones(4, width, device="cuda")
        taken = torch.ops.rlft_fast.take_rows(values[:3], bad, bad, nonsense)
        assert taken[:, 0].tolist() == [0, 0, 1, 0]
        sums = torch.ops.rlft_fast.sum_rows(values, bad, bad, nonsense)
        assert sums[:, 0].tolist() == [1, 0, 1]  # of order's places from 0 to 49, none, and all again: one is a place
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_positions_and_targets(lengths, device):
    cu_seqlens = cumulative(lengths, device)
    input_ids_T = random((sum(lengths),), torch.int64, device)
    assert torch.equal(packing.position_ids(cu_seqlens), reference.position_ids(cu_seqlens))
    targets = packing.next_token_targets(input_ids_T, cu_seqlens, -7)
    assert torch.equal(targets, reference.next_token_targets(input_ids_T, cu_seqlens, -7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
# Scalars; fewer and more columns than one block of accumulators.
@pytest.mark.parametrize("trailing", [(), (5,), (2, 150)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_segment_sum_is_as_exact_as_its_output(lengths, trailing, dtype, device):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((sum(lengths), *trailing), generator=generator).to(device, dtype)
    exact = reference.segment_sum(values, cumulative(lengths, device))
    total = packing.segment_sum(values, cumulative(lengths, device))
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-4 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_segment_sum_counts_bools_and_integers_and_repeats_bitwise(device):
    assert packing.segment_sum(torch.tensor([2**23 + 1, 1], device=device), cumulative([2], device)).item() == 2**23 + 2
    mask_T = torch.tensor([True, False, True, True], device=device)
    assert packing.segment_sum(mask_T, cumulative([2, 0, 2], device)).tolist() == [1.0, 0.0, 2.0]
    values_T = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(device)
    cu_seqlens = cumulative([60_000, 40_000], device)
    assert torch.equal(packing.segment_sum(values_T, cu_seqlens), packing.segment_sum(values_T, cu_seqlens))


def rows_on(device: str, index: list[int], num_rows: int) -> packing.RowIndex:
    return packing.RowIndex(*(x.to(device) for x in packing.row_index(torch.tensor(index).long(), num_rows)))


# Nothing taken; nothing to take; some rows never; a row more often than a loop is unrolled; every row once.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("trailing", [(), (3,), (16,), (2, 520)])
@pytest.mark.parametrize(
    ("index", "num_rows"), [([], 3), ([], 0), ([2, 0, 2, 3, 2], 5), ([1] * 21 + [0], 2), ([*range(700)], 700)]
)
def test_rows_are_taken_and_their_gradients_added(index, num_rows, trailing, dtype, device):
    """The sum in float32, rounded once: rounded after every addition, 21 places in bfloat16 would be too far off."""
    values = torch.randn(num_rows, *trailing).to(device, dtype).requires_grad_()
    upstream = torch.randn(len(index), *trailing).to(device, dtype)
    taken = packing.take_rows(values, rows_on(device, index, num_rows))
    at = torch.tensor(index).long()
    assert torch.equal(taken.cpu(), reference.take_rows(values.detach().cpu(), at))
    taken.backward(upstream)
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (max(torch.finfo(dtype).eps, 1e-6), 1e-6)
    exact = reference.sum_rows(upstream.cpu(), at, num_rows)
    torch.testing.assert_close(values.grad.cpu(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_vectors_behind_an_address_of_none(device):
    """Rows of 16 bytes, the first of which begins 4 bytes behind a vector."""
    upstream = torch.arange(13.0, device=device)[1:].view(3, 4)
    values = torch.zeros(2, 4, device=device, requires_grad=True)
    packing.take_rows(values, rows_on(device, [1, 0, 1], 2)).backward(upstream)
    assert values.grad.tolist() == [[5, 6, 7, 8], [10, 12, 14, 16]]


@pytest.mark.parametrize("device", DEVICES)
def test_segment_expand(device):
    values_B = random((4, 3), torch.int64, device)
    cu_seqlens = cumulative([2, 0, 5, 1], device)
    assert torch.equal(packing.segment_expand(values_B, cu_seqlens), reference.segment_expand(values_B, cu_seqlens))


@pytest.mark.parametrize("device", DEVICES)
def test_segment_mean(device):
    values_T = torch.tensor([1.0, 2.0, 6.0, torch.nan, 5.0, torch.inf], device=device, requires_grad=True)
    weight_T = torch.tensor([1.0, 0.5, 0.5, 0.0, 1.0, 0.0], device=device)
    mean_B = packing.segment_mean(values_T, cumulative([3, 0, 2, 1], device), weight_T)
    assert mean_B.tolist() == [2.5, 0.0, 5.0, 0.0]
    assert torch.equal(mean_B.double(), reference.segment_mean(values_T, cumulative([3, 0, 2, 1], device), weight_T))
    cancelling_T = torch.tensor([1.0, -1.0], device=device)
    assert packing.segment_mean(values_T.detach()[:2], cumulative([2], device), cancelling_T).tolist() == [0.0]
    mean_B.sum().backward()
    assert values_T.grad.tolist() == [0.5, 0.25, 0.25, 0.0, 1.0, 0.0]
    plain = torch.tensor([1.0, 2.0, 6.0], device=device, dtype=torch.bfloat16)
    assert packing.segment_mean(plain, cumulative([1, 2], device)).tolist() == [1.0, 4.0]
    narrow = torch.full((1,), 1 + 2**-7, device=device, dtype=torch.bfloat16)  # its square takes twice the digits
    assert packing.segment_mean(narrow, cumulative([1], device), narrow).tolist() == [1 + 2**-7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_match_finite_differences(side):
    cu_seqlens = cumulative([2, 0, 3])
    packed = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    padded = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    values_B = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight_T = torch.rand(5, dtype=torch.float64, requires_grad=True)
    mask_BL = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]])
    tokens = packing.masked_tokens(mask_BL, 6)
    gradgradcheck, gradcheck = torch.autograd.gradgradcheck, torch.autograd.gradcheck
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x: packing.pad(x, cu_seqlens, 4, padding_side=side, value=3.0), packed)
        assert check(lambda x: packing.unpad(x, cu_seqlens, padding_side=side), padded)
        assert check(lambda x: packing.unpad(x, *tokens), padded)
        assert check(lambda x: packing.pad(x, tokens.cu_seqlens, 4, tokens.column_T), torch.cat([packed, packed[:1]]))
        assert check(lambda x: packing.segment_sum(x, cu_seqlens), packed)
        assert check(lambda x: packing.segment_expand(x, cu_seqlens), values_B)
        assert check(lambda x: packing.take_rows(x, rows_on("cpu", [2, 0, 2, 2], 5)), packed)
        assert check(lambda v, w: packing.segment_mean(v[:, 0], cu_seqlens, w), (packed, weight_T))
    some_T = (weight_T * torch.tensor([1, 0, 0, 1, 1])).detach().requires_grad_()
    assert gradcheck(lambda v, w: packing.segment_mean(v[:, 0], cu_seqlens, w), (packed, some_T))


def test_gradient_keeps_the_dtype_of_the_input():
    values_T = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    packing.segment_sum(values_T, cumulative([1, 2])).mul(torch.tensor([2.0, 3.0])).sum().backward()
    assert values_T.grad.dtype == torch.bfloat16
    assert values_T.grad.tolist() == [2.0, 3.0, 3.0]


@pytest.mark.parametrize("device", DEVICES)
def test_of_many_tensors_those_that_need_gradients_get_them(device):
    cu_seqlens = cumulative([2, 3], device)
    padded = micro_batch((2, 4), device)
    floats = {name: x.requires_grad_() for name, x in padded.items() if name in ("logprob", "hidden")}
    packed = packing.unpad(padded, cu_seqlens)
    assert [name for name, x in packed.items() if x.requires_grad] == list(floats)
    again = packing.pad(packed, cu_seqlens, 4)
    (3 * again["hidden"]).sum().backward(retain_graph=True)  # of two outputs one is used
    kept = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], device=device)
    assert torch.equal(floats["hidden"].grad, 3.0 * kept[..., None, None].expand_as(floats["hidden"]))
    assert floats["logprob"].grad is None or not floats["logprob"].grad.any()
    (packed["logprob"].sum() + packed["hidden"].sum()).backward()
    assert torch.equal(floats["logprob"].grad, kept.float())
    assert torch.equal(floats["hidden"].grad, 4.0 * kept[..., None, None].expand_as(floats["hidden"]))


def op_samples(device: str) -> dict[str, tuple]:
    cu_seqlens = cumulative([2, 0, 3], device)
    packed = torch.randn(5, 4, device=device, requires_grad=True)
    padded = torch.randn(3, 4, 2, device=device, requires_grad=True)
    values_B = torch.randn(3, device=device, requires_grad=True)
    values_BL = torch.randn(3, 4, device=device, requires_grad=True)
    ids = torch.arange(12, device=device).view(3, 4) % 5
    return {
        "unpad": ([padded, ids, values_BL], cu_seqlens, None, 5, True),
        "pad": ([packed, torch.arange(5, device=device)], cu_seqlens, None, 6, False, [1.5, 7.0]),
        "mask_columns": (ids > 0, packing.masked_tokens(ids > 0).cu_seqlens, 12),
        "position_ids": (cu_seqlens, 5),
        "next_token_targets": (torch.arange(5, device=device), cu_seqlens, -100),
        "segment_sum": (packed, cu_seqlens),
        "segment_expand": (values_B, cu_seqlens, 5),
        "take_rows": (packed, *rows_on(device, [2, 0, 2, 3, 2, 4], 5)),
        "sum_rows": (packed, *rows_on(device, [2, 0, 2, 3, 2], 7)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", op_samples("cpu"))
def test_opcheck(name, device):
    torch.library.opcheck(getattr(torch.ops.rlft_fast, name).default, op_samples(device)[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["unpad", "pad"])
def test_opcheck_with_columns(name, device):
    cu_seqlens, column_T = packing.masked_tokens(torch.arange(12, device=device).view(3, 4) % 5 > 0, 10)
    samples = op_samples(device)
    inputs = {
        "unpad": (samples["unpad"][0], cu_seqlens, column_T, 10, False),
        "pad": ([torch.randn(10, 2, device=device, requires_grad=True)], cu_seqlens, column_T, 6, False, [1.5]),
    }
    torch.library.opcheck(getattr(torch.ops.rlft_fast, name).default, inputs[name])


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_once_for_all_lengths(device):
    def loss(x: Tensor, cu_seqlens: Tensor, num_tokens: int, rows: packing.RowIndex) -> Tensor:
        packed = packing.unpad(x, cu_seqlens, num_tokens=num_tokens, padding_side="left")
        mean = packing.segment_mean(packed[:, 0], cu_seqlens)
        taken = packing.take_rows(packed, rows).square()
        return packing.pad(packed * 2, cu_seqlens, x.shape[1]).sum() + mean.sum() + taken.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([2, 3, 4], [1, 2, 6]):
        x = random((3, sum(lengths), 5), torch.float32, device).requires_grad_()
        cu_seqlens, num_tokens = cumulative(lengths, device), sum(lengths)
        rows = rows_on(device, [0, 0, *range(lengths[2])], num_tokens)
        with torch.compiler.set_stance("default" if lengths[0] == 2 else "fail_on_recompile"):
            got = compiled(x, cu_seqlens, num_tokens, rows)
        expected = loss(x, cu_seqlens, num_tokens, rows)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (got, expected)))


@pytest.mark.parametrize("device", DEVICES)
def test_masks_and_many_tensors_compile(device):
    def loss(data: dict[str, Tensor], mask_BL: Tensor) -> Tensor:
        tokens = packing.masked_tokens(mask_BL, 20)
        packed = packing.unpad(data, *tokens)
        scaled = packed["logprob"] * packing.position_ids(tokens.cu_seqlens, 20) * packed["loss_mask"]
        padded = packing.pad({"x": scaled, "ids": packed["input_ids"]}, tokens.cu_seqlens, 8, tokens.column_T, value=1)
        return (padded["x"] * padded["ids"]).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for mask_BL in (torch.ones(2, 8), torch.eye(8)[:2]):
        data = micro_batch((2, 8), device)
        data["logprob"].requires_grad_()
        values = [function(data, mask_BL.bool().to(device)) for function in (compiled, loss)]
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*(torch.autograd.grad(value, data["logprob"])[0] for value in values))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, cu: packing.pad(x, cu.long(), 4), TypeError, "expected torch.int32"),
        (lambda x, cu: packing.pad(x, cu[::2], 4), ValueError, "cu_seqlens has .* contiguous"),
        (lambda x, cu: packing.pad(x, cu[:0], 4), ValueError, "cu_seqlens is empty"),
        (lambda x, cu: packing.pad(x, cu, 1), ValueError, "more than the padded length 1"),
        (lambda x, cu: packing.pad(x, cu, -1), ValueError, "max_seqlen is -1"),
        (lambda x, cu: packing.pad(x[:4], cu, 4), ValueError, "ends at 5, but the packed side has 4 rows"),
        (lambda x, cu: packing.pad(x, cu + 1, 4), ValueError, "does not start with 0"),
        (lambda x, cu: packing.pad(x, cumulative([3, -1, 3]), 4), ValueError, "must not decrease"),
        (lambda x, cu: packing.pad(x, cu, 4, padding_side="up"), ValueError, "expected 'right' or 'left'"),
        (lambda x, cu: packing.pad(x.long(), cu, 4, value=float("inf")), ValueError, "hold the value inf"),
        (lambda x, cu: packing.pad(x.to("meta"), cu, 4), ValueError, "move both to one device"),
        (lambda x, cu: packing.unpad(x.view(1, 5, 2), cu), ValueError, "expected .B, L"),
        (lambda x, cu: packing.unpad(x.new_ones(2, 4), cu, num_tokens=4), ValueError, "ends at 5"),
        (lambda x, cu: packing.unpad(x.new_ones(2), cu), ValueError, "expected .B, L"),
        (lambda x, cu: packing.unpad({"a": x.new_ones(2, 4), "b": x.new_ones(2, 5)}, cu), ValueError, "b has padded"),
        (lambda x, cu: packing.unpad({"a": x.new_ones(2, 4), "b": x}, cu), ValueError, "b has shape .5, 2."),
        (lambda x, cu: packing.unpad({"a": x.new_ones(2, 4), "b": None}, cu), TypeError, "b is a NoneType"),
        (lambda x, cu: packing.pad({"a": x.to(torch.complex64)}, cu, 4), TypeError, "a is torch.complex64"),
        (lambda x, cu: packing.pad({"a": x, "b": x[:4]}, cu, 4), ValueError, "b has 4 rows, but a has 5"),
        (lambda x, cu: packing.pad({"a": x}, cu, 4, value={"b": 1}), ValueError, "value names .'b'."),
        (lambda x, cu: packing.pad({"a": x, "b": x.to("meta")}, cu, 4), ValueError, "b on meta"),
        (lambda x, cu: packing.pad(x, cu, 4, cu), ValueError, "column_T has 3 rows"),
        (lambda x, cu: packing.pad(x, cu, 4, torch.arange(5)), TypeError, "column_T is torch.int64"),
        (
            lambda x, cu: packing.pad(x, cu, 4, torch.arange(5).int()),
            ValueError,
            "sequence 1 must ascend .* padded length 4",
        ),
        (lambda x, cu: packing.pad(x, cu, 9, torch.ones(5).int()), ValueError, "sequence 0 must ascend"),
        (lambda x, cu: packing.pad(x, cu, 9, torch.arange(5).int() - 1), ValueError, "sequence 0 must ascend"),
        (lambda x, cu: packing.pad(x, cu, 9, cu, padding_side="left"), ValueError, "leave one out"),
        (lambda x, cu: packing.unpad(x.new_ones(2, 9), cu, cu), ValueError, "ends at 5"),
        (lambda x, cu: packing.unpad(x.new_ones(2, 9), cu, cu, num_tokens=5), ValueError, "column_T has 3 entries"),
        (lambda x, cu: packing.unpad(x.new_ones(2, 9), cu, cu.to("meta")), ValueError, "column_T on meta"),
        (lambda x, cu: packing.masked_tokens(x), TypeError, "mask_BL is torch.float32"),
        (lambda x, cu: packing.masked_tokens(cu), ValueError, "expected .B, L"),
        (lambda x, cu: packing.masked_tokens(x > 0, 9), ValueError, "has 10 tokens, more than max_tokens = 9"),
        (lambda x, cu: packing.masked_tokens(x > 0, -1), ValueError, "the number of tokens is -1"),
        (lambda x, cu: packing.position_ids(cu, 4), ValueError, "ends at 5"),
        (lambda x, cu: packing.next_token_targets(x[:, 0], cu), TypeError, "expected torch.int64"),
        (lambda x, cu: packing.next_token_targets(x.long(), cu), ValueError, "expected .T,."),
        (lambda x, cu: packing.segment_expand(x, cu), ValueError, "values_B has 5 rows"),
        (lambda x, cu: packing.row_index(cu, 6), TypeError, "index_M is torch.int32"),
        (lambda x, cu: packing.row_index(x.long(), 6), ValueError, "expected .M,. on the CPU"),
        (lambda x, cu: packing.row_index(cu.long(), 5), ValueError, "names rows 0 to 5, expected 0 to 4"),
        (lambda x, cu: packing.row_index(cu.long() - 1, 5), ValueError, "names rows -1 to 4, expected 0 to 4"),
        (lambda x, cu: packing.take_rows(x.long(), rows_on("cpu", [0], 5)), TypeError, "take integers by"),
        (lambda x, cu: packing.take_rows(x[:4], rows_on("cpu", [0], 5)), ValueError, "expected .5, ...."),
        (lambda x, cu: packing.take_rows(x, rows_on("cpu", [0], 5)._replace(order_M=cu)), TypeError, "order_M is"),
        (lambda x, cu: packing.take_rows(x, rows_on("meta", [0], 5)), ValueError, "index_M is on meta"),
        (
            lambda x, cu: packing.take_rows(x, packing.RowIndex(*rows_on("cpu", [0, 1], 5)[:2], cu)),
            ValueError,
            "expected .2, ....",
        ),
        (lambda x, cu: packing.row_index(torch.tensor([2**62]), 5), ValueError, "names rows 4.* expected 0 to 4"),
        (lambda x, cu: packing.row_index(cu[:0].long(), -1), ValueError, "got 0 places and -1 rows"),
        (
            lambda x, cu: packing.take_rows(x[:2], rows_on("cpu", [0, 0], 2)._replace(cu_uses=cumulative([3, -1]))),
            ValueError,
            "cu_uses does not ascend to 2 at row 0",
        ),
        (
            lambda x, cu: packing.take_rows(x[:2], rows_on("cpu", [0, 0], 2)._replace(cu_uses=cumulative([2, 1]))),
            ValueError,
            "index has 2 entries, order has 2, and cu_uses ends at 3",
        ),
        (
            lambda x, cu: packing.take_rows(x, rows_on("cpu", [0, 0], 5)._replace(order_M=torch.tensor([1, 0]))),
            ValueError,
            "does not list the places of row 0 in ascending order",
        ),
        (
            lambda x, cu: packing.take_rows(x, rows_on("cpu", [0, 0], 5)._replace(index_M=torch.tensor([0, 9]))),
            ValueError,
            "does not list the places of row 0",
        ),
        (lambda x, cu: packing.segment_mean(x[:, 0], cu, x[:4, 0]), ValueError, "expected .T,. for both"),
        (lambda x, cu: packing.segment_mean(x[:, 0], cu, x[:, 0] + 1j), TypeError, "weight_T is torch.complex64"),
        (lambda x, cu: packing.segment_sum(x + 1j, cu), TypeError, "values_T is torch.complex64.*view_as_real"),
        (lambda x, cu: packing.segment_sum(x, cu.tolist()), TypeError, "cu_seqlens must be a torch.Tensor, got list"),
        (lambda x, cu: packing.position_ids(cu.to_sparse()), TypeError, "cu_seqlens is a sparse_coo tensor"),
        (lambda x, cu: packing.pad({"cu_seqlens": x.to_sparse()}, cu, 5), TypeError, "cu_seqlens is a sparse_coo"),
        (lambda x, cu: packing.pad(x, cu, 5.0), TypeError, "max_seqlen is 5.0, expected an int"),
        (lambda x, cu: packing.pad(x, cu, 5, value="0"), TypeError, "value of packed is a str, expected a number"),
        (lambda x, cu: packing.masked_tokens([[1, 0]]), TypeError, "mask_BL must be a torch.Tensor, got list"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(5, 2), cumulative([2, 3]))
