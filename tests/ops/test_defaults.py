"""Ops make their tensors where the arguments are, in dtypes of their own, whatever torch's defaults are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import (
    FusedAdamW,
    clip_grad_norm_,
    grad_norm,
    linear_logprob,
    linear_logprob_loss,
    masked_tokens,
    next_token_targets,
    pad,
    segment_mean,
    support_logprob,
    top_logprob,
    unpad,
)

IDS = torch.arange(5).expand(12, 5)
MASK = torch.tensor([[1, 0, 1], [0, 1, 1]])


def every_statistic(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    asked = ("return_entropy", "return_sum_prob_squared", "return_top1", "return_mean_logits")
    return [*linear_logprob(hidden, weight, target, temperature=0.7, softcap=5.0, **dict.fromkeys(asked, True))]


def loss_of_ids(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    return [linear_logprob_loss(hidden, weight, target, lambda x, _, ids: x + ids.sum(-1), ids_TK=IDS).loss]


def packed(hidden: Tensor, *_: Tensor) -> list[Tensor]:
    tokens = masked_tokens(MASK)
    values, cu_seqlens = unpad(hidden[:6].view(2, 3, -1), *tokens), tokens.cu_seqlens
    targets = next_token_targets(torch.ones_like(tokens.column_T, dtype=torch.int64), cu_seqlens)
    return [pad(values, cu_seqlens, 3, tokens.column_T), segment_mean(values[:, 0], cu_seqlens), targets]


def stepped(hidden: Tensor, weight: Tensor, _: Tensor, moment_dtype: torch.dtype) -> list[Tensor]:
    weight.grad = weight.detach().clone()
    norm = clip_grad_norm_([weight], 0.5)
    optimizer = FusedAdamW([weight], lr=0.1, moment_dtype=moment_dtype)
    for _ in range(2):
        optimizer.step()
    return [norm, grad_norm([]), weight, *optimizer.state[weight].values()]


CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "statistics": every_statistic,
    "threshold": lambda h, w, t: [linear_logprob(h, w, t, threshold_T=torch.zeros_like(h[:, 0])).logprob],
    "frozen": lambda h, w, t: [linear_logprob(h, w.detach(), t).logprob],
    "loss": lambda h, w, t: [linear_logprob_loss(h, w, t, lambda x, _: x.square()).loss],
    "loss of ids": loss_of_ids,
    "support": lambda h, w, t: [*support_logprob(h, w, IDS[:, 0], IDS, return_entropy=True)][:2],
    "most likely ids": lambda h, w, t: [*top_logprob(h, w, t, 3)],
    "packing": packed,
    "AdamW": lambda *x: stepped(*x, torch.float32),
    "AdamW, int8": lambda *x: stepped(*x, torch.int8),
}


def inputs() -> tuple[Tensor, ...]:
    hidden, weight, target, _ = make_inputs(12, 16, 300)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def computed(call: Callable[..., list[Tensor]], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    found = call(*inputs)
    sums = [x.sum() for x in found if x.grad_fn is not None]
    gradients = torch.autograd.grad(sums, inputs[:2], allow_unused=True) if sums else ()
    return [x.detach().clone() for x in (*found, *gradients) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_numbers_do_not_depend_on_torchs_defaults(name, dtype):
    expected = computed(CALLS[name], inputs())
    others, before = inputs(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            found = computed(CALLS[name], others)
    finally:
        torch.set_default_dtype(before)
    assert len(found) == len(expected)
    for actual, same in zip(found, expected, strict=True):
        assert actual.dtype == same.dtype
        assert actual.is_meta or actual.equal(same)  # the norm of nothing is where torch wants it
