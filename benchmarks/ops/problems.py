"""Inputs of `linear_logprob` whose logits are shaped like a real model's, for the tests and the benchmarks.

The factory lives here because tests import from `benchmarks`, and nothing in `benchmarks` imports from `tests`: peers
of the benchmarks install a package named `tests` of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Positional arguments of `linear_logprob`, and the keyword arguments that shape the logits."""

    hidden_TD: Tensor
    weight_VD: Tensor
    target_T: Tensor
    options: dict[str, Tensor]


# The shape of the softmax over V tokens, per row, and the weakness that it would show.
LOGITS = {
    "normal": "standard deviation 1, as in a model without training",
    "peaked": "targets have from a little to nearly all of the mass, and every eighth target has all of it",
    "certain": "every target has all of the mass but 1e-5 or less: 1 - p has few digits",
    "flat": "all tokens are about equally probable",
    "normalised": "flat, with a log-normaliser of 0, as a z-loss trains it: maximum and log-sum cancel",
    "low": "about -150: a running maximum that starts at 0 underflows",
    "extreme": "standard deviation 10, so up to about 30 and -30 in each row",
}


def make_inputs(
    num_tokens: int,
    hidden_size: int,
    vocab: int,
    *,
    logits: str = "normal",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Inputs:
    """Random inputs; the first and the last token of the vocabulary are among the targets.

    Args:
        num_tokens: T.
        hidden_size: D.
        vocab: V.
        logits: key of :data:`LOGITS`.
        dtype: of hidden states, weight and bias.
        seed: of all random numbers.
        device: of all tensors.
    """
    assert logits in LOGITS, f"logits must be one of {list(LOGITS)}, got {logits!r}"
    generator = torch.Generator(device).manual_seed(seed)
    here = {"generator": generator, "device": device}
    hidden = torch.randn(num_tokens, hidden_size, **here)
    weight = torch.randn(vocab, hidden_size, **here) / hidden_size**0.5
    target = torch.randint(0, vocab, (num_tokens,), **here)
    target[:1], target[1:2] = vocab - 1, 0
    margin = torch.empty(num_tokens, device=device)
    bias = None
    if logits == "peaked":
        margin.uniform_(0.5, 2.5, generator=generator)
        margin[::8] += 15
        margin *= math.log(vocab)
        hidden += _towards(target, weight, margin)
    elif logits == "certain":
        hidden += _towards(target, weight, margin.uniform_(13, 17, generator=generator) + math.log(vocab))
    elif logits == "flat":
        weight *= 1e-3
    elif logits == "normalised":
        weight *= 1e-2
        bias = -math.log(vocab)
    elif logits == "low":
        bias = -150.0
    elif logits == "extreme":
        weight *= 10
    options = {} if bias is None else {"bias_V": torch.full((vocab,), bias, dtype=dtype, device=device)}
    return Inputs(hidden.to(dtype), weight.to(dtype), target, options)


def _towards(target: Tensor, weight: Tensor, margin_T: Tensor) -> Tensor:
    """What to add to hidden states so that the targets' logits grow by ``margin_T``."""
    rows = weight[target]
    return (margin_T / rows.square().sum(-1).clamp(min=1e-6)).unsqueeze(-1) * rows
