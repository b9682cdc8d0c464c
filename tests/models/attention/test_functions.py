"""Packed attention against softmax(q k^T) v per sequence in float64, and attention in generation."""

import math
from collections.abc import Sequence
from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from rlft_fast.models import packed_attention
from rlft_fast.models.attention import LookAhead
from rlft_fast.models.attention import functions as attention
from rlft_fast.models.attention.functions import grouped_attention, grouped_heads
from rlft_fast.ops.packing import RowIndex, row_index
from tests.support.machine.devices import DEVICES


def random_qkv(lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(1, count, sum(lengths), head_dim) for count in (heads, kv_heads, kv_heads)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def run(qkv: tuple[Tensor, ...], lengths: list[int], **options) -> Tensor:
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=qkv[0].device)
    output, attention_weights = packed_attention(
        nn.Identity(), *qkv, None, cu_seq_lens_q=boundaries, max_length_q=max(lengths), **options
    )
    assert attention_weights is None
    return output


def random_sinks(heads: int) -> Tensor:
    """Around the log-sum-exps of a few scores."""
    return 2 * torch.randn(heads, generator=torch.Generator().manual_seed(heads), dtype=torch.float64)


def expected(
    qkv: tuple[Tensor, ...], lengths: list[int], scale: float, window: int, softcap: float | None = None,
    sinks: Tensor | None = None, runs: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    query, key, value = qkv
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    seen = (sequence[:, None] == sequence) & (distance >= 0)
    for rows in runs:
        seen[rows[:, None], rows] = True
    seen &= distance < window
    scores = scale * query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand_as(scores[..., :1])], -1)
    return (scores.softmax(-1)[..., : len(sequence)] @ value).transpose(1, 2)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    kv_heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 4, 9]),  # itself only, shorter and longer than sequences, as long as the longest
    scaling=st.sampled_from([None, 0.3]),
    softcap=st.sampled_from([None, 0.7]),  # scores are around 1
    has_sinks=st.booleans(),
)
def test_attends_causally_within_each_sequence(lengths, kv_heads, groups, window, scaling, softcap, has_sinks):
    qkv = random_qkv(lengths, kv_heads * groups, kv_heads, 4)
    sinks = random_sinks(kv_heads * groups) if has_sinks else None
    actual = run(qkv, lengths, scaling=scaling, sliding_window=window, softcap=softcap, s_aux=sinks)
    wanted = expected(qkv, lengths, scaling or 0.5, window or 100, softcap, sinks)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [2, None])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_gradient(softcap, has_sinks, window):
    lengths = [3, 1, 4, 3]
    qkv = tuple(x.requires_grad_() for x in random_qkv(lengths, 4, 2, 4))
    sinks = random_sinks(4).requires_grad_() if has_sinks else None
    inputs = qkv if sinks is None else (*qkv, sinks)
    found = run(qkv, lengths, sliding_window=window, softcap=softcap, s_aux=sinks)
    exact = expected(qkv, lengths, 0.5, window or 100, softcap, sinks)
    actual, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (found, exact))
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3]),
    softcap=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_rows_of_a_run_see_all_of_it(lengths, window, softcap, seed):
    """The first run of each sequence, against a mask: outputs and gradients. A window ends behind a row alone."""
    qkv = tuple(x.requires_grad_() for x in random_qkv(lengths, 4, 2, 4))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    bounds = [sorted(torch.randint(n + 1, (2,), generator=generator).tolist()) for n in lengths]
    runs = [(s, s + begin, s + end) for s, (begin, end) in zip(starts[:-1], bounds, strict=True) if begin < end]
    ahead = None
    if runs:
        rows, keys = ([torch.arange(run[first], run[2]) for run in runs] for first in (1, 0))
        of_rows, of_keys = (torch.tensor([0, *map(len, x)]).cumsum(0).int() for x in (rows, keys))
        key_index = row_index(torch.cat(keys), sum(lengths))
        ahead = LookAhead(torch.cat(rows), key_index, of_rows, of_keys, max(map(len, rows)), max(map(len, keys)))
    actual = run(qkv, lengths, sliding_window=window, softcap=softcap, look_ahead=ahead)
    wanted = expected(qkv, lengths, 0.5, window or 100, softcap, runs=[torch.arange(*run[1:]) for run in runs])
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
    found, exact = (torch.autograd.grad(x.square().sum(), qkv) for x in (actual, wanted))
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_sequence_is_the_same_alone_and_packed(window, has_sinks):
    """Also beside others of its length, with which it runs in one call; and its gradients."""
    lengths = [5, 7, 2, 7, 7]
    qkv = tuple(x.float().requires_grad_() for x in random_qkv(lengths, 4, 2, 8))
    options = {"sliding_window": window, "s_aux": random_sinks(4).float() if has_sinks else None}
    packed = run(qkv, lengths, **options)
    grads = torch.autograd.grad(packed.square().sum(), qkv)
    for begin, end in ((5, 12), (14, 21)):
        own = tuple(x[:, :, begin:end].detach().requires_grad_() for x in qkv)
        alone = run(own, [7], **options)
        assert torch.equal(packed[:, begin:end], alone)
        for grad, own_grad in zip(grads, torch.autograd.grad(alone.square().sum(), own), strict=True):
            assert torch.equal(grad[:, :, begin:end], own_grad)


@settings(max_examples=40)
@given(
    prefix=st.integers(1, 6),
    completions=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
)
def test_completions_attend_to_a_shared_prefix(prefix, completions, window, softcap, has_sinks):
    """One copy of the prefix, as against one in front of every completion: same outputs, same gradients."""
    lengths = [prefix, *completions]
    qkv = tuple(x.requires_grad_() for x in random_qkv(lengths, 4, 2, 4))
    tokens = torch.arange(sum(lengths)).split(lengths)
    repeated = torch.cat([torch.cat([tokens[0], completion]) for completion in tokens[1:]])
    key_index = row_index(torch.cat([tokens[0], repeated]), sum(lengths))
    key_lengths = torch.tensor([prefix, *(prefix + length for length in completions)])
    scores = {"sliding_window": window, "softcap": softcap, "s_aux": random_sinks(4) if has_sinks else None}
    shared = run(
        qkv, lengths, key_index=key_index, max_length_k=int(key_lengths.max()), **scores,
        cu_seq_lens_k=torch.cat([torch.zeros(1, dtype=torch.int64), key_lengths.cumsum(0)]).int(),
    )  # fmt: skip
    plain = run(tuple(x[:, :, repeated] for x in qkv), key_lengths[1:].tolist(), **scores)
    behind = torch.cat([torch.arange(n) >= prefix for n in key_lengths[1:].tolist()])
    torch.testing.assert_close(shared[:, prefix:], plain[:, behind], rtol=0, atol=1e-12)
    actual, wanted = (torch.autograd.grad(x.square().sum(), qkv) for x in (shared[:, prefix:], plain[:, behind]))
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (6, 2, 20)])
@pytest.mark.parametrize("shared", [False, True])
def test_bfloat16_on_a_device(shared, heads, kv_heads, head_dim, window, device):
    """Values and gradients of the device's own kernel: fewer key heads, padded widths, more keys than queries."""
    lengths = [17, 1, 40, 23]
    qkv = tuple(x.bfloat16().requires_grad_() for x in random_qkv(lengths, heads, kv_heads, head_dim))
    there = tuple(x.detach().to(device).requires_grad_() for x in qkv)
    tokens = torch.arange(sum(lengths)).split(lengths)
    sequences = [torch.cat([tokens[0], each]) for each in tokens[1:]] if shared else list(tokens)
    key_lengths = [17, *map(len, sequences)] if shared else lengths
    options = {}
    if shared:  # three completions of the first segment
        boundaries = torch.tensor([0, *torch.tensor(key_lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        key_index = RowIndex(*(x.to(device) for x in row_index(torch.cat([tokens[0], *sequences]), sum(lengths))))
        options = {"key_index": key_index, "cu_seq_lens_k": boundaries, "max_length_k": max(key_lengths)}
    actual = run(there, lengths, sliding_window=window, **options)[0].cpu().float()
    wide = tuple(x.detach().double().requires_grad_() for x in qkv)
    repeated = torch.cat(sequences)
    wanted = expected(
        tuple(x[:, :, repeated] for x in wide), list(map(len, sequences)), head_dim**-0.5, window or 100
    )[0]  # fmt: skip
    first = wanted.new_zeros(actual.shape).index_copy(0, repeated, wanted)
    torch.testing.assert_close(actual.double(), first, rtol=0.02, atol=0.02)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(0))
    if shared:
        upstream[:17] = 0  # the prefix, which is there once in ours and three times in what is expected
    gradients = [torch.autograd.grad(y, x, upstream.to(y)) for y, x in ((actual, there), (first, wide))]
    for ours, exact in zip(*gradients, strict=True):
        assert (ours.cpu().double() - exact).norm() < 0.01 * exact.norm()


def test_a_cpu_attends_in_float32():
    """torch's backward of attention in bfloat16 takes four times as long on a CPU as in float32."""
    lengths, upstream = [17, 1, 40], torch.randn(58, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    narrow = tuple(x.bfloat16().requires_grad_() for x in random_qkv(lengths, 4, 2, 64))
    wide = tuple(x.detach().float().requires_grad_() for x in narrow)
    found, exact = run(narrow, lengths)[0], run(wide, lengths)[0]
    assert found.equal(exact.bfloat16())
    gradients = [torch.autograd.grad(y, x, upstream.to(y)) for y, x in ((found, narrow), (exact, wide))]
    for ours, in_float32 in zip(*gradients, strict=True):
        assert ours.equal(in_float32.bfloat16())


def flash_attention(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **fewer_key_heads) -> Tensor:
    """In place of torch's `varlen_attn`, which only GPUs have: takes what its kernel takes, and computes in float64."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert fewer_key_heads == (grouped_heads(signature(varlen_attn).parameters) if q.shape[1] != k.shape[1] else {})
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    left, right = window_size
    assert right == 0
    outputs = []
    for b in range(len(cu_q) - 1):
        q_b, k_b, v_b = q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]]
        k_b, v_b = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_b, v_b))
        distance = torch.arange(len(k_b) - len(q_b), len(k_b))[:, None] - torch.arange(len(k_b))
        seen = (distance >= 0) & (distance <= (left if left >= 0 else len(k_b)))
        scores = scale * torch.einsum("qhd,khd->hqk", q_b, k_b)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v_b))
    return torch.cat(outputs)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (12, 6), (6, 12), (20, 20)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_widths_that_flash_attention_does_not_have_are_padded(head_dim, value_dim, window, scaling, monkeypatch):
    lengths = [3, 1, 5]
    query, key, _ = random_qkv(lengths, 4, 2, head_dim)
    value = random_qkv(lengths, 4, 2, value_dim)[2]
    wanted = run((query, key, value), lengths, scaling=scaling, sliding_window=window)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash_attention)
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda query: True)
    actual = run((query, key, value), lengths, scaling=scaling, sliding_window=window)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, **window) -> tuple:
    """In place of aten's operator, which only GPUs have."""
    assert (dropout, debug, is_causal) == (0.0, False, window["window_size_left"] == -1)
    size = (window["window_size_left"], window["window_size_right"])
    fewer = grouped_heads(signature(varlen_attn).parameters) if q.shape[1] != k.shape[1] else {}
    out = flash_attention(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=size, **fewer)
    lse = torch.cat([scores.logsumexp(-1) for *_, scores in flash_scores(q, k, cu_q, cu_k, scale, size[0])], 1)
    return out, lse, None, None, None


def flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng_state, unused, *, scale, **window
) -> tuple:
    """In place of aten's operator: its equations, from the given output and log-sum-exp."""
    assert (dropout, is_causal) == (0.0, window["window_size_left"] == -1)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    for rows, keys, scores in flash_scores(q, k, cu_q, cu_k, scale, window["window_size_left"]):
        weights = (scores - lse[:, rows, None]).exp()
        k_b, v_b = (x[keys].repeat_interleave(groups, 1) for x in (k, v))
        delta = (dout[rows] * out[rows]).sum(-1).T.unsqueeze(-1)
        dscores = scale * weights * (torch.einsum("qhd,khd->hqk", dout[rows], v_b) - delta)
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, k_b)
        dk[keys] += torch.einsum("hqk,qhd->khd", dscores, q[rows]).unflatten(1, (-1, groups)).sum(2)
        dv[keys] += torch.einsum("hqk,qhd->khd", weights, dout[rows]).unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


def flash_scores(q, k, cu_q, cu_k, scale: float, left: int) -> list[tuple[slice, slice, Tensor]]:
    found = []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        m, n = rows.stop - rows.start, keys.stop - keys.start
        distance = torch.arange(n - m, n)[:, None] - torch.arange(n)
        seen = (distance >= 0) & (distance <= (left if left >= 0 else n))
        scores = scale * torch.einsum("qhd,khd->hqk", q[rows], k[keys].repeat_interleave(q.shape[1] // k.shape[1], 1))
        found.append((rows, keys, scores.masked_fill(~seen, -math.inf)))
    return found


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (12, 6)])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_around_flash_attention(head_dim, value_dim, window, monkeypatch):
    """The scaled output and the log-sum-exp with the sink make flash attention's backward that of the sinks."""
    lengths = [3, 1, 5]
    query, key, _ = random_qkv(lengths, 4, 2, head_dim)
    value, sinks = random_qkv(lengths, 4, 2, value_dim)[2], random_sinks(4)
    inputs = [x.requires_grad_() for x in (query, key, value, sinks)]
    wanted = expected(inputs[:3], lengths, head_dim**-0.5, window or 100, sinks=sinks)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda query: True)
    actual = run(inputs[:3], lengths, sliding_window=window, s_aux=sinks)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (actual, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_flash_attention_runs_where_it_can(monkeypatch):
    """Not in float32; not for wide heads, on older GPUs, or on CPUs."""
    capability = {0: (8, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])

    def has_kernel(device: str, dtype: torch.dtype, head_dim: int) -> bool:
        with FakeTensorMode():
            return attention._has_varlen_kernel(torch.empty(1, 2, 3, head_dim, dtype=dtype, device=device))

    assert has_kernel("cuda:0", torch.bfloat16, 256)
    assert has_kernel("cuda:0", torch.float16, 20)
    assert not has_kernel("cuda:0", torch.float32, 64)
    assert not has_kernel("cuda:0", torch.bfloat16, 512)
    assert not has_kernel("cuda:1", torch.bfloat16, 64)
    assert not has_kernel("cpu", torch.bfloat16, 64)


def test_refuses_what_it_cannot_do():
    qkv = random_qkv([3], 2, 2, 4)
    boundaries = torch.tensor([0, 3])
    for missing in ({}, {"cu_seq_lens_q": boundaries}, {"max_length_q": 3}):
        with pytest.raises(ValueError, match="set_attn_implementation"):
            packed_attention(nn.Identity(), *qkv, None, **missing)
    with pytest.raises(ValueError, match=r"no dropout, got 0.1: train in model.eval\(\) mode"):
        packed_attention(nn.Identity(), *qkv, None, cu_seq_lens_q=boundaries, max_length_q=3, dropout=0.1)
    with pytest.raises(
        ValueError, match="rlft_packed does not support the attention_mask, indices that Identity passes"
    ):
        packed_attention(nn.Identity(), *qkv, torch.ones(1, 1, 3, 3), indices=torch.zeros(2))
    assert torch.equal(run(qkv, [3], indices=None), run(qkv, [3]))  # not asked for
    with pytest.raises(ValueError, match="rlft_grouped does not support the s_aux that Identity passes"):
        grouped_attention(nn.Identity(), *qkv, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_queries", "masked"),
    [(6, 2, 1, True), (6, 2, 1, False), (6, 1, 1, True), (4, 4, 1, True), (6, 2, 3, True)],  # the last two are SDPA's
)
def test_generation_attends_with_all_heads_of_a_key_at_once(heads, kv_heads, num_queries, masked):
    """Three sequences with five keys each, padded on the left; the truth is each head with a copy of its key."""
    generator = torch.Generator().manual_seed(heads + num_queries)
    shapes = [(3, heads, num_queries, 4), (3, kv_heads, 5, 4), (3, kv_heads, 5, 4)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    mask = (
        torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
        .bool()[:, None, None]
        .expand(-1, 1, num_queries, -1)
    )
    layer = nn.Identity()
    layer.num_key_value_groups = heads // kv_heads
    actual, _ = grouped_attention(layer, query, key, value, mask if masked else None, scaling=0.3)
    scores = 0.3 * query @ key.repeat_interleave(heads // kv_heads, 1).transpose(-1, -2)
    scores = scores.masked_fill(~mask, -math.inf) if masked else scores
    wanted = scores.softmax(-1) @ value.repeat_interleave(heads // kv_heads, 1)
    torch.testing.assert_close(actual, wanted.transpose(1, 2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dropout", [0.0, 0.9])
def test_generation_leaves_to_sdpa_what_heads_do_not_share(dropout):
    """A mask of each head's own, and dropout, with which attention to one key is nothing or ten times it."""
    query, key, value = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    layer = nn.Identity()
    layer.num_key_value_groups = 2
    only = torch.eye(3)[torch.tensor([0, 1, 2, 0])].bool()[None, :, None]  # one key for each head
    value[0, :, 1] = 2.0
    actual, _ = grouped_attention(layer, query, key, value, only, dropout=dropout)
    wanted = torch.tensor([1.0, 2.0, 1.0, 1.0])[:, None].expand(4, 8)
    if dropout:
        assert ((actual[0, 0] == 0) | ((actual[0, 0] - 10 * wanted).abs() < 1e-4)).all()
    else:
        torch.testing.assert_close(actual[0, 0], wanted)
