"""What the tests of linear_logprob share: backends, ways, problems, and the comparison with float64."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import LinearLogprob, LinearLogprobLoss, linear_logprob, linear_logprob_loss
from rlft_fast.ops.logprob import reference
from tests.support.numerics import assert_no_further_from_truth

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# A new backend is one more name in these lists. Triton needs its interpreter for tensors on the CPU, and there is none
# on a machine with a GPU: test_gpu.py has it there. The interpreter takes a second for what others do in a millisecond,
# so Triton gets smaller problems, and most of them are slow tests.
INTERPRETED = ["triton"] if find_spec("triton") and not torch.cuda.is_available() else []
if INTERPRETED:
    from tests.support.machine.interpreter import patch_language_once

    patch_language_once()
thin = pytest.mark.thin(8)
_INTERPRETED = [pytest.param(name, marks=pytest.mark.thin(64)) for name in INTERPRETED]
interpreted = pytest.mark.parametrize("backend", _INTERPRETED)
each_backend = pytest.mark.parametrize("backend", ["native", "reference", *_INTERPRETED])
each_fast_backend = pytest.mark.parametrize("backend", ["native", "reference"])
each_kernel = pytest.mark.parametrize("backend", ["native", *_INTERPRETED])  # without the reference
# Both trace one graph, and run the op as an opaque node. Inductor also compiles C++ around it, which takes seconds.
each_compiler = pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


def logprob_of(backend: str, **options: Any) -> Callable[..., LinearLogprob]:
    return partial(linear_logprob, backend=backend, **options)


def loss_of(backend: str, **options: Any) -> Callable[..., LinearLogprobLoss]:
    return partial(linear_logprob_loss, backend=backend, **options)


def several_tiles(backend: str) -> tuple[int, int, int]:
    """(T, D, V) of a problem that is cut into several tiles."""
    return (67, 24, 100) if backend == "triton" else (333, 64, 5003)


def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 columns: the interpreter takes as long for a wide tile as for a narrow tile."""
    from rlft_fast.ops.logprob import triton

    monkeypatch.setattr(triton, "_TILES", {size: tile | {"COLUMNS": 512} for size, tile in triton._TILES.items()})


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def plain_logprob(hidden: Tensor, weight: Tensor, target: Tensor, *, bias_V=None, return_entropy=False):
    """Plain PyTorch without a fused op: logits in the inputs' dtype, statistics in float32."""
    logits = linear(hidden, weight, bias_V)
    log_p = logits.to(torch.promote_types(logits.dtype, F32)).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if return_entropy else None
    return LinearLogprob(log_p.gather(-1, target[:, None])[:, 0], entropy)


def run(
    function: Callable[..., LinearLogprob],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: dict[str, Any],
    dtype: torch.dtype,
    *,
    train_weight: bool = True,
    entropy: bool = True,
) -> list[Tensor]:
    """[logprob, dhidden, entropy, dweight, dbias] for random upstream gradients, computed in ``dtype``.

    Entropy is left out if it is not asked for, and dweight and dbias if the head is frozen.
    """
    h = hidden.to(dtype).detach().clone().requires_grad_()
    w = weight.to(dtype).detach().clone().requires_grad_(train_weight)
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    trained = [w]
    if "bias_V" in cast:
        cast["bias_V"] = cast["bias_V"].detach().clone().requires_grad_(train_weight)
        trained.append(cast["bias_V"])
    result = function(h, w, target, return_entropy=entropy, **cast)
    upstream = torch.randn(2, *target.shape, generator=torch.Generator().manual_seed(1)).to(target.device)
    loss = (result.logprob * upstream[0]).sum()
    if entropy:
        loss = loss + (result.entropy * upstream[1]).sum()
    loss.backward()
    outputs = [result.logprob.detach(), h.grad, *([result.entropy.detach()] if entropy else [])]
    return outputs + [x.grad for x in trained if train_weight]


def check(
    T: int, D: int, V: int, *, logits: str = "normal", dtype: torch.dtype = F32, device: str = "cpu",
    backend: str = "auto", rows: int = 64, **how: bool,
) -> None:  # fmt: skip
    """Holds a backend to the error of the reference, and the reference to the error of plain PyTorch.

    Several problems together have ``rows`` rows or more, because errors of few rows are good or bad by luck.
    """
    make = partial(make_inputs, T, D, V, logits=logits, dtype=dtype, device=device)
    problems = [make(seed=seed) for seed in range(-(-rows // max(T, 1)) if T else 1)]

    def results(function, dtype: torch.dtype) -> list[Tensor]:
        runs = [run(function, *problem, dtype, **how) for problem in problems]
        return [torch.cat(values) for values in zip(*runs, strict=True)]

    # Triton's interpreter cuts float32 off where a GPU rounds it to bfloat16, as plain PyTorch rounds its logits.
    is_coarse = backend == "reference" or (backend in INTERPRETED and dtype == BF16)
    # Gradients of certain logits are below float16's smallest normal number, where plain PyTorch rounds them, too, and
    # the reference on a GPU keeps them in float32.
    is_coarse |= dtype == F16 and device == "cuda" and logits == "certain"
    ours = results(partial(linear_logprob, backend=backend), dtype)
    eager = results(plain_logprob if is_coarse else reference.linear_logprob, dtype)
    assert (ours[0] <= 0).all()
    for actual, plain, truth in zip(ours, eager, results(plain_logprob, F64), strict=True):
        assert actual.isfinite().all()
        assert_no_further_from_truth(actual, plain, truth)


def gradients_of_seen_rows(way: str, hidden: Tensor, weight: Tensor, target: Tensor, seen: Tensor, backend: str):
    """[dhidden] and, unless the weight is frozen, [dweight] of a loss that does not see the rows with ``seen`` = 0."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(way != "frozen")
    if way == "loss":
        masked = lambda logprob, _, seen: torch.where(seen > 0, logprob, 0.0)  # noqa: E731
        linear_logprob_loss(h, w, target, masked, seen, backend=backend).loss.backward()
    else:
        linear_logprob(h, w, target, backend=backend).logprob.backward(seen)
    return [h.grad] if way == "frozen" else [h.grad, w.grad]


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Gradients of a scalar function with respect to each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves))


# ---- losses ---------------------------------------------------------------------------------------------------------


def ppo_clip(logprob: Tensor, entropy: Tensor | None, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprob - old_logprob).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return loss if entropy is None else loss - 0.1 * entropy


def weighted_by(logprob: Tensor, _, weight: Tensor) -> Tensor:
    return -logprob * weight


def loss_problem(T=300, D=64, V=5003, dtype=F32, device="cpu") -> tuple[Tensor, ...]:
    """(hidden, weight, target, old log-probability, advantage), where every seventh row is ignored."""
    hidden, weight, target, _ = make_inputs(T, D, V, dtype=dtype, device=device)
    target[::7] = -100
    randn = partial(torch.randn, generator=torch.Generator(device).manual_seed(2), device=device)
    old = reference.linear_logprob(hidden, weight, target).logprob + 0.3 * randn(T)
    return hidden, weight, target, old, randn(T)


def run_loss(function, problem: tuple[Tensor, ...], dtype: torch.dtype, bias_V: Tensor | None = None, **options):
    """[loss, logprob, dhidden, dweight, dbias, entropy] of twice PPO's loss; absent ones are left out."""
    hidden, weight, target, *per_token = problem
    leaves = [x.to(dtype, copy=True).detach().requires_grad_() for x in (hidden, weight, bias_V) if x is not None]
    bias = {} if bias_V is None else {"bias_V": leaves[2]}
    out = function(*leaves[:2], target, ppo_clip, *per_token, **bias, **options)
    (2 * out.loss).backward()
    assert not out.logprob.requires_grad
    entropy = [] if out.entropy is None else [out.entropy]
    return [out.loss.detach(), out.logprob, *(x.grad for x in leaves), *entropy]


def check_loss(problem: tuple[Tensor, ...], dtype: torch.dtype = F32, how: dict[str, Any] | None = None, **options):
    """Holds `linear_logprob_loss(…, **how)` to the error of the reference."""
    ours, eager, truth = (
        run_loss(function, problem, to, **options)
        for function, to in (
            (partial(linear_logprob_loss, **(how or {})), dtype),
            (reference.linear_logprob_loss, dtype),
            (reference.linear_logprob_loss, F64),
        )
    )
    # The loss is one number, whose error has no statistics: a millionth of the terms it sums.
    assert abs(ours[0].double() - truth[0]) < 1e-6 * (0.1 + problem[-1].abs()).sum()
    for actual, plain, exact in zip(ours[1:], eager[1:], truth[1:], strict=True):
        assert_no_further_from_truth(actual, plain, exact)


# What each way of computing calls its result: the loss as a value of one call.
WAYS = {
    "recomputed": lambda h, w, y: linear_logprob(h, w.requires_grad_(), y).logprob,
    "frozen": lambda h, w, y: linear_logprob(h, w, y).logprob,
    "loss": lambda h, w, y: linear_logprob_loss(h, w.requires_grad_(), y, lambda logprob, _: logprob).loss,
}
