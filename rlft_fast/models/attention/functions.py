"""Attention for training (``rlft_packed``) and for generation (``rlft_grouped``), registered with transformers by name.

``rlft_packed`` attends over packed sequences. transformers passes ``cu_seq_lens_q`` and ``max_length_q`` to the
attention function. It builds no mask for an attention without a mask function, so packed sequences cost no (T, T) mask.

- On CUDA one variable-length kernel runs (``torch.nn.attention.varlen``).
- On the CPU, one causal SDPA call runs for all segments of one size, in float32 or wider. On a GPU one call runs per
  segment for inputs that the kernel does not take: float32, GPUs before Ampere, heads wider than 256. There the host
  waits for the device in every layer.
- Attention sinks (gpt-oss) are terms of the softmax that the same kernels do not know
  (`rlft_fast.models.attention.sinks`).
- Soft-capped scores (Gemma 2) are written out segment by segment. So are attention sinks on a GPU where the kernel does
  not run. A segment of n tokens takes (heads, n, n) memory.

A segment is a sequence, or the end of one whose beginning other segments hold. It attends to these as well, as several
segments may.

Layers may attend within chunks (Llama 4). They have segments of their own (`Chunks`).

Tokens of an image may attend to all tokens of the image (Gemma 3). Their rows run once more as segments that are not
causal (`LookAhead`).

Ranks that share a micro-batch (Ulysses, ``rlft_fast.ops.ulysses``) pass their own rows and all heads. Each rank then
attends over all rows with its own heads.

``rlft_grouped`` is SDPA over padded sequences that does not copy the cache for every query head.
"""

import inspect
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlft_fast.models.attention.chunks import Chunks, is_chunked
from rlft_fast.models.attention.sinks import AllSegments, OneSegment, attention_with_sinks
from rlft_fast.ops import gather_heads_scatter_tokens, gather_tokens_scatter_heads
from rlft_fast.ops.packing import RowIndex, take_rows

PACKED_ATTENTION, GROUPED_ATTENTION = "rlft_packed", "rlft_grouped"

# Keywords by which models of transformers 5 ask for scores that are not computed here.
_OTHER_SCORES = ("s_aux", "position_bias", "block_indices", "indices")  # s_aux are attention sinks

_WIDEST_HEAD = 256  # of flash attention's kernels


class LookAhead(NamedTuple):
    """Runs of rows that attend to the later rows of their run, too: the tokens of images.

    Shapes: N rows in R runs, M keys. Each run has the keys of its sequence up to the end of the run, so that M grows
    with the square of R.
    """

    row_N: Tensor
    """(N,) int64, the rows among the rows of all ranks, each once."""
    key_index: RowIndex
    """The row of each of the M keys among the rows of all ranks."""
    cu_seqlens_q: Tensor
    """(R + 1,) int32 boundaries of the runs among the N rows."""
    cu_seqlens_k: Tensor
    """(R + 1,) int32 boundaries of the runs' keys."""
    max_seqlen_q: int
    """Length of the longest run."""
    max_seqlen_k: int
    """Most keys of a run."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_index: RowIndex | None = None,
    chunks: Chunks | None = None,
    look_ahead: LookAhead | None = None,
    sequence_group: ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention of each packed segment to its keys: query i of m sees the first n - m + i + 1 of n keys.

    transformers calls the function by its AttentionInterface, which fixes the order of tensors and names of keywords.

    Args:
        module: the attention layer; only error messages name it.
        query: (1, heads, S, head_dim); S = T without a sequence_group, else S = T / N, the rows of this rank.
        key: (1, kv_heads, S, head_dim); heads is a multiple of kv_heads.
        value: (1, kv_heads, S, value_dim).
        attention_mask: must be None, because packing needs no mask.
        cu_seq_lens_q: int32 boundaries of the segments among all T rows.
        cu_seq_lens_k: int32 boundaries of the segments' keys; None: a segment attends to itself.
        max_length_q: length of the longest segment.
        max_length_k: largest number of keys of a segment.
        key_index: the row of each of the M keys among all T rows; None: the keys are the rows in order.
        chunks: the segments and keys of a layer that attends within chunks; None: as those of other layers.
        look_ahead: rows that attend to later ones; None: attention is causal for all rows.
        sequence_group: the N ranks that share the rows; heads is a multiple of N.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        dropout: must be 0, as in eval mode, because flash attention over packed rows has no dropout.
        sliding_window: number of positions up to its own that a token sees; None: its own and all before it.
        softcap: c in c * tanh(scores / c), before the softmax (Gemma 2).
        s_aux: (heads,) attention sinks of all heads, also with a sequence_group: each is a score in the softmax that
            has no value (gpt-oss).
        **others: ignored, unless a keyword asks for scores of another form.

    Returns:
        (1, S, heads, value_dim) and None (no attention weights).

    Raises:
        ValueError: boundaries are missing, a mask or dropout is given, a keyword asks for scores of another form, or
            there are both sinks and rows that attend to later ones.
    """
    _refuse_other_scores(PACKED_ATTENTION, module, attention_mask, others)
    if dropout:
        raise ValueError(f"the {PACKED_ATTENTION} attention has no dropout, got {dropout}: train in model.eval() mode")
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f"the {PACKED_ATTENTION} attention needs cu_seq_lens_q and max_length_q; "
            "use model.set_attn_implementation('sdpa') for padded batches and generation"
        )
    if sequence_group is not None:
        query, key, value = all_rows_of_own_heads(query, key, value, sequence_group)
        s_aux = None if s_aux is None else sinks_of_own_heads(s_aux, sequence_group)
    scores = _Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if cu_seq_lens_k is None or max_length_k is None:
        cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
    boundaries = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if chunks is not None and is_chunked(module):
        key_index, boundaries = chunks.key_index, chunks[1:]
    output = _attend(query, *_taken(key, value, key_index), boundaries, scores)
    if look_ahead is not None:
        if s_aux is not None:
            raise ValueError(f"the {PACKED_ATTENTION} attention has no sinks for rows that attend to later ones")
        again = _attend(
            query.index_select(2, look_ahead.row_N), *_taken(key, value, look_ahead.key_index), look_ahead[2:],
            scores._replace(is_causal=False),
        )  # fmt: skip
        output = output.index_copy(1, look_ahead.row_N, again)
    if sequence_group is not None:
        output = gather_heads_scatter_tokens(output[0], sequence_group).unsqueeze(0)
    return output, None


class _Scores(NamedTuple):
    """How scores are made, and which of them count."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    is_causal: bool = True
    """False: all queries of a segment see its last key."""


def _taken(key: Tensor, value: Tensor, index: RowIndex | None) -> tuple[Tensor, Tensor]:
    """The keys and values of the rows of an index."""
    if index is None:
        return key, value
    key, value = (take_rows(x.squeeze(0).transpose(0, 1), index).transpose(0, 1)[None] for x in (key, value))
    return key, value


def _attend(q: Tensor, k: Tensor, v: Tensor, boundaries: tuple[Tensor, Tensor, int, int], scores: _Scores) -> Tensor:
    """(1, heads, n, head_dim) queries of segments -> (1, n, heads, value_dim)."""
    dtype = q.dtype  # torch's backward in half precision takes four times as long on a CPU as in float32
    if q.device.type == "cpu" and dtype.itemsize < 4:
        q, k, v = (x.float() for x in (q, k, v))
    if scores.softcap is None and _has_varlen_kernel(q):
        return _varlen(q, k, v, boundaries, scores)
    num_queries, num_keys = boundaries[0].diff().tolist(), boundaries[1].diff().tolist()
    queries = q.split(num_queries, dim=2)  # split's backward is one cat
    keys, values = (x.split(num_keys, dim=2) for x in (k, v))
    outputs: dict[int, Tensor] = {}
    for alike in _together([*zip(num_queries, num_keys, strict=True)], q, scores):
        one_q, one_k, one_v = (_joined([x[i] for i in alike]) for x in (queries, keys, values))
        found = _segment(one_q, one_k, one_v, scores)
        outputs |= zip(alike, found.split(1), strict=True)
    in_order = [outputs[i] for i in range(len(queries))]
    return torch.cat(in_order, dim=2).transpose(1, 2).to(dtype).contiguous()  # some models call view() on it


def _joined(segments: list[Tensor]) -> Tensor:
    """(1, heads, n, d) each -> (segments, heads, n, d), without a copy of a single one."""
    return segments[0] if len(segments) == 1 else torch.cat(segments)


def _together(sizes: list[tuple[int, int]], q: Tensor, scores: _Scores) -> list[list[int]]:
    """The numbers of segments that one call attends over: on a CPU all of one size, as many short ones often are.

    The kernel works on each row and head alone, so the bits stay. Where scores are in memory, each segment has its own
    call.
    """
    if q.is_cuda or scores.softcap is not None:
        return [[i] for i in range(len(sizes))]
    found: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(sizes):
        found.setdefault(size, []).append(i)
    return [*found.values()]


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Runs SDPA. If each sequence has one query, the heads that share a key become several queries of the key.

    transformers would repeat keys and values for every head, because its masks rule out `enable_gqa`. On a CPU core
    (64 sequences of 60 to 100 tokens, 9 heads, 3 key heads) repeating takes 2.3 to 3.7 ms; grouping takes 0.4 to 0.6.

    Args:
        module: the attention layer.
        query: (B, heads, n, head_dim).
        key: (B, kv_heads, L, head_dim); heads is a multiple of kv_heads.
        value: (B, kv_heads, L, value_dim).
        attention_mask: (B, 1, n, L), or None.
        **options: as transformers passes them.

    Returns:
        (B, n, heads, value_dim) and None (no attention weights).
    """
    _refuse_other_scores(GROUPED_ATTENTION, module, None, options)
    one_query = query.shape[2] == 1 and key.shape[1] < query.shape[1]
    same_for_all_heads = attention_mask is None or attention_mask.shape[1] == 1
    if options.get("dropout") or not (one_query and same_for_all_heads):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.squeeze(2).unflatten(1, (key.shape[1], -1))
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling"))
    return output.flatten(1, 2).unsqueeze(1), None


def _refuse_other_scores(
    own_name: str, module: nn.Module, attention_mask: Tensor | None, others: dict[str, Any]
) -> None:
    found = ["attention_mask"] if attention_mask is not None else []
    found += [name for name in _OTHER_SCORES if others.get(name) is not None]
    if found:
        raise ValueError(
            f"{own_name} does not support the {', '.join(found)} that {type(module).__name__} passes to its attention: "
            "use model.set_attn_implementation('sdpa') or 'eager', without packing"
        )


def all_rows_of_own_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """(1, heads, S, d) -> (1, heads / N, N S, d) each. Key and value heads repeat until N divides their number."""
    size = group.size()
    repeats = size // math.gcd(k.shape[1], size)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    by_rank = [x[0].transpose(0, 1).unflatten(1, (size, -1)) for x in (q, k, v)]  # (S, N, heads / N, d)
    # The three tensors for one rank are joined, so that one all-to-all replaces three.
    gathered = gather_tokens_scatter_heads(torch.cat([x.flatten(2) for x in by_rank], 2), group).squeeze(1)
    parts = gathered.split([x.shape[2] * x.shape[3] for x in by_rank], dim=1)
    heads = (part.unflatten(1, x.shape[2:]) for part, x in zip(parts, by_rank, strict=True))
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in heads)


def sinks_of_own_heads(sinks_H: Tensor, group: ProcessGroup) -> Tensor:
    """(heads,) -> (heads / N,), of the heads that `all_rows_of_own_heads` gives this rank."""
    return sinks_H.chunk(group.size())[group.rank()]


def _segment(q: Tensor, k: Tensor, v: Tensor, scores: _Scores) -> Tensor:
    scale, window, softcap, sinks, is_causal = scores
    num_queries, num_keys = q.shape[2], k.shape[2]
    is_written_out = softcap is not None or (sinks is not None and q.is_cuda)
    mask = None
    if is_written_out or (is_causal and num_queries != num_keys) or (window is not None and num_keys > window):
        rows = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        distance = rows[:, None] - torch.arange(num_keys, device=q.device)
        mask = (distance >= 0) if is_causal else torch.ones_like(distance, dtype=torch.bool)
        mask = mask if window is None else mask & (distance < window)
    if is_written_out:
        assert mask is not None
        return _written_out(q, k, v, mask, scale, softcap, sinks)
    if sinks is not None:
        width = max(q.shape[-1], v.shape[-1])
        wide_q, wide_k, wide_v = (_widened(x, width) for x in (q, k, v))
        out = attention_with_sinks(wide_q, wide_k, wide_v, sinks, OneSegment(scale, mask))
        return out[..., : v.shape[-1]]
    if q.is_cuda:  # with enable_gqa, only flash attention would run without (heads, m, n) scores in memory
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale, enable_gqa=True
    )  # fmt: skip


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1))  # (1, kv_heads, heads per kv head, m, d)
    scores = scale * grouped @ k.unsqueeze(2).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(k.shape[1], -1, 1, 1).expand_as(scores[..., :1])
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights[..., : k.shape[2]] @ v.unsqueeze(2)).flatten(1, 2)


def _has_varlen_kernel(query: Tensor) -> bool:
    """Whether torch's flash attention, the kernel behind `varlen_attn`, takes these queries."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and query.shape[-1] <= _WIDEST_HEAD and _is_ampere_or_later(query.device)


@torch.compiler.assume_constant_result
def _is_ampere_or_later(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: tuple[Tensor, Tensor, int, int], scores: _Scores) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel takes heads of one width, a multiple of 8. DeepSeek's keys and values differ in width.
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    width = -(-max(head_dim, value_dim) // 8) * 8
    scale, window, _, sinks, is_causal = scores
    if sinks is not None:
        wide_q, wide_k, wide_v = (_widened(x, width) for x in (q, k, v))
        out = attention_with_sinks(wide_q, wide_k, wide_v, sinks, AllSegments(scale, window, boundaries))
        return out[..., :value_dim].transpose(1, 2)
    packed_q, packed_k, packed_v = (_widened(x.squeeze(0).transpose(0, 1), width) for x in (q, k, v))
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = boundaries
    out = varlen_attn(
        packed_q, packed_k, packed_v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale=scale, window_size=(-1 if window is None else window - 1, 0 if is_causal else -1),
        **_GROUPED_HEADS if q.shape[1] != k.shape[1] else {},
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[..., :value_dim].unsqueeze(0)


def grouped_heads(parameters: Collection[str]) -> dict[str, Any]:
    """Keywords that tell `varlen_attn` of fewer key heads than query heads. torch 2.11 has no such keyword.

    Args:
        parameters: names of the parameters of `varlen_attn`.
    """
    return {"enable_gqa": True} if "enable_gqa" in parameters else {}


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return pad(x, (0, missing)) if missing else x  # pad would copy, even by 0 columns


_GROUPED_HEADS = grouped_heads(inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters)
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
