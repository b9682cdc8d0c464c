"""Problems for the tests of linear_logprob, and how far results may be from the truth."""

import math
from functools import partial

import torch
from torch import Tensor

from rlft_fast.ops import linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import reference
from tests.support.numerics import assert_no_further_from_truth

F32, BF16 = torch.float32, torch.bfloat16


def make_problem(
    T: int, D: int, V: int, *, logits: str = "normal", dtype: torch.dtype = F32, seed: int = 0, device: str = "cpu"
):
    """(hidden, weight, target, options) whose logits have a certain character."""
    g = torch.Generator(device).manual_seed(seed)
    here = {"generator": g, "device": device}
    hidden = torch.randn(T, D, **here)
    weight = torch.randn(V, D, **here) / D**0.5
    target = torch.randint(0, V, (T,), **here)
    options: dict[str, Tensor] = {}
    if logits == "peaked":  # the target has 0.9 of the mass, nearly all, or in every eighth row all of it
        margin_T = torch.empty(T, device=device).uniform_(1.5, 2.5, generator=g) * math.log(V)
        margin_T[::8] *= 10
        hidden += (margin_T / weight[target].square().sum(-1))[:, None] * weight[target]
    elif logits == "flat":
        weight *= 1e-3
    elif logits == "low":  # everything far below 0: a maximum that starts at 0 underflows
        options["bias_V"] = torch.full((V,), -150.0, device=device)
    elif logits == "extreme":
        weight *= 10
    return hidden.to(dtype), weight.to(dtype), target, options


def run(function, hidden: Tensor, weight: Tensor, target: Tensor, options, dtype, *, train_weight=True, entropy=True):
    """[logprob, entropy, dhidden, dweight] for random upstream gradients, in ``dtype``."""
    h = hidden.to(dtype).detach().clone().requires_grad_()
    w = weight.to(dtype).detach().clone().requires_grad_(train_weight)
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    result = function(h, w, target, return_entropy=entropy, **cast)
    randn = partial(torch.randn, generator=torch.Generator(target.device).manual_seed(1), device=target.device)
    loss = (result.logprob * randn(target.shape)).sum()
    if entropy:
        loss = loss + (result.entropy * randn(target.shape)).sum()
    loss.backward()
    outputs = [result.logprob.detach(), h.grad]
    return outputs + ([result.entropy.detach()] if entropy else []) + ([w.grad] if train_weight else [])


def gradients_without_row_7(way: str, hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> list[Tensor]:
    """[dhidden] and, unless the weight is frozen, [dweight] of a loss that does not see row 7."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(way != "frozen")
    upstream = torch.ones(target.shape, device=target.device)
    upstream[7] = 0
    if way == "loss":
        masked = lambda logprob, _, seen: torch.where(seen > 0, logprob, 0.0)  # noqa: E731
        linear_logprob_loss(h, w, target, masked, upstream, backend=backend).loss.backward()
    else:
        linear_logprob(h, w, target, backend=backend).logprob.backward(upstream)
    return [h.grad] if way == "frozen" else [h.grad, w.grad]


def check(
    T: int, D: int, V: int, *, logits: str = "normal", dtype: torch.dtype = F32, device: str = "cpu",
    backend: str = "auto", rows: int = 64, **how,
) -> None:  # fmt: skip
    """Errors are compared over so many ``rows`` at least, of several problems: those of few are good or bad by luck."""
    make = partial(make_problem, T, D, V, logits=logits, dtype=dtype, device=device)
    problems = [make(seed=seed) for seed in range(-(-rows // T))]

    def results(function, dtype):
        runs = [run(function, *problem, dtype, **how) for problem in problems]
        return [torch.cat(values) for values in zip(*runs, strict=True)]

    ours, eager = results(partial(linear_logprob, backend=backend), dtype), results(reference.linear_logprob, dtype)
    for o, e, t in zip(ours, eager, results(reference.linear_logprob, torch.float64), strict=True):
        assert o.isfinite().all()
        assert_no_further_from_truth(o, e, t)


def ppo_clip(logprob: Tensor, entropy: Tensor | None, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprob - old_logprob).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return loss if entropy is None else loss - 0.1 * entropy


def weighted_by(logprob: Tensor, _, weight: Tensor) -> Tensor:
    return -logprob * weight


def loss_problem(T=300, D=64, V=5003, dtype=F32, device="cpu"):
    hidden, weight, target, _ = make_problem(T, D, V, dtype=dtype, device=device)
    target[::7] = -100
    randn = partial(torch.randn, generator=torch.Generator(device).manual_seed(2), device=device)
    old = reference.linear_logprob(hidden, weight, target).logprob + 0.3 * randn(T)
    return hidden, weight, target, old, randn(T)


# What each way of computing calls what comes out of it: the loss as a value of one call.
WAYS = {
    "recomputed": lambda h, w, y: linear_logprob(h, w.requires_grad_(), y).logprob,
    "frozen": lambda h, w, y: linear_logprob(h, w, y).logprob,
    "loss": lambda h, w, y: linear_logprob_loss(h, w.requires_grad_(), y, lambda logprob, _: logprob).loss,
}
