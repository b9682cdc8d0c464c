"""Attention within chunks against a mask over each sequence alone, in float64, and the positions that layers count."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Llama4TextConfig

from rlft_fast.models import packed_attention, prepare_chunks
from rlft_fast.models.attention import CountedPositions
from rlft_fast.ops.packing import row_index
from tests.models.attention.test_functions import random_qkv


def layer_of(size: int, number: int) -> nn.Module:
    """Layer 0 attends to all tokens before, layer 1 within chunks."""
    layer: nn.Module = nn.Identity()
    layer.config = Llama4TextConfig(
        num_hidden_layers=2, attention_chunk_size=size, layer_types=["full_attention", "chunked_attention"]
    )
    layer.layer_idx = number
    return layer


def plain(query: Tensor, key: Tensor, value: Tensor, size: int) -> Tensor:
    """One sequence."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    position = torch.arange(query.shape[2])
    seen = (position[:, None] >= position) & (position[:, None] // size == position // size)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ value).transpose(1, 2)


@settings(max_examples=60)
@given(
    prefix=st.integers(0, 7),
    completions=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    size=st.integers(1, 8),
    number=st.sampled_from([0, 1]),
)
def test_tokens_attend_within_their_chunk(prefix, completions, size, number):
    """Completions behind a prefix that runs once: outputs and gradients are those of each sequence alone."""
    lengths = [*[prefix] * (prefix > 0), *completions]
    qkv = tuple(x.requires_grad_() for x in random_qkv(lengths, 4, 2, 4))
    parts = torch.arange(sum(lengths)).split(lengths)
    sequences = [torch.cat([*parts[:1] * (prefix > 0), part]) for part in parts[prefix > 0 :]]
    keys = [*parts[:1] * (prefix > 0), *sequences]
    of_queries, of_keys = (torch.tensor([0, *map(len, x)]).cumsum(0).int() for x in (parts, keys))
    key_index = row_index(torch.cat(keys), sum(lengths)) if prefix else None
    layer = layer_of(size, number)
    found, _ = packed_attention(
        layer, *qkv, None, cu_seq_lens_q=of_queries, cu_seq_lens_k=of_keys, max_length_q=max(lengths),
        max_length_k=max(map(len, keys)), key_index=key_index,
        chunks=prepare_chunks(layer, of_queries, of_keys, key_index),
    )  # fmt: skip
    alone = [plain(*(x[:, :, rows] for x in qkv), size if number else 99) for rows in sequences]
    for rows, own in zip(sequences, alone, strict=True):
        torch.testing.assert_close(found[:, rows], own, rtol=0, atol=1e-12)
    actual = torch.autograd.grad(sum(found[:, rows].square().sum() for rows in sequences), qkv)
    wanted = torch.autograd.grad(sum(own.square().sum() for own in alone), qkv)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_segments_that_fit_into_a_chunk_are_not_cut():
    boundaries = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert prepare_chunks(layer_of(5, 1), boundaries, boundaries, None) is None
    assert prepare_chunks(nn.Identity(), boundaries, boundaries, None) is None
    cut = prepare_chunks(layer_of(3, 1), boundaries, boundaries, None)
    assert cut.cu_seqlens_q.tolist() == cut.cu_seqlens_k.tolist() == [0, 3, 4, 7, 9]
    assert (cut.key_index, cut.max_seqlen_q, cut.max_seqlen_k) == (None, 3, 3)


def test_a_layer_counts_the_positions_of_packed_rows():
    position_ids = torch.tensor([0, 1, 2, 0, 1, 7, 8])
    assert torch.equal(torch.arange(7) + CountedPositions(position_ids).get_seq_length(), position_ids)
