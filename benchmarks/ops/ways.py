"""Every way to a token's log-probability, or to a loss of it, that the benchmarks compare.

A way is `way(hidden_TD, weight_VD, problem)` and returns (T,) log-probabilities or a 0-d loss. Loaders import their
peer, so that the report has the reason if a peer is not installed. Peers run with their own defaults, and TRL with the
tile of its trainers. A comment marks the one exception.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.ops.problems import make_inputs
from benchmarks.support.harness import DEVICE
from rlft_fast.ops import TopLogprob, linear_logprob, linear_logprob_loss, top_logprob

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
IGNORE_INDEX = -100
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Problem(NamedTuple):
    """One micro-batch at the head. ``hidden_TD`` and ``weight_VD`` require gradients."""

    hidden_TD: Tensor
    weight_VD: Tensor
    target_T: Tensor
    upstream_T: Tensor  # d loss / d logprob
    old_logprob_T: Tensor
    advantage_B: Tensor

    @property
    def advantage_T(self) -> Tensor:
        return self.advantage_B.repeat_interleave(self.target_T.shape[0] // self.advantage_B.shape[0])


Way = Callable[[Tensor, Tensor, Problem], Tensor]
LogprobFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_problem(num_tokens: int, hidden_size: int, vocab: int, *, peaked: bool, num_sequences: int = 8) -> Problem:
    """Random data with logits as in a trained model (``peaked``: the target has most of the mass) or nearly uniform."""
    logits = "peaked" if peaked else "flat"
    inputs = make_inputs(num_tokens, hidden_size, vocab, logits=logits, dtype=DTYPE, device=DEVICE)
    logprob = linear_logprob(*inputs[:3]).logprob
    randn = partial(torch.randn, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    return Problem(
        inputs.hidden_TD.requires_grad_(),
        inputs.weight_VD.requires_grad_(),
        inputs.target_T,
        randn(num_tokens),
        logprob + 0.1 * randn(num_tokens),
        randn(num_sequences),
    )


def ignore_half(problem: Problem) -> Problem:
    """The same problem with a random half of its targets left out."""
    return problem._replace(target_T=problem.target_T.where(_half(problem), IGNORE_INDEX))


def silence_half(problem: Problem) -> Problem:
    """The same problem with a random half of its upstream gradients zero, like the gradients of clipped tokens."""
    return problem._replace(upstream_T=problem.upstream_T * _half(problem))


def narrow_hidden(problem: Problem) -> Problem:
    """The same problem with hidden states in bfloat16 and the weight in float32."""
    hidden, weight = problem.hidden_TD.detach().bfloat16(), problem.weight_VD.detach().float()
    return problem._replace(hidden_TD=hidden.requires_grad_(), weight_VD=weight.requires_grad_())


def _half(problem: Problem) -> Tensor:
    return torch.randperm(len(problem.target_T), generator=torch.Generator().manual_seed(0)).to(DEVICE) % 2 == 0


def ppo_clip(logprob: Tensor, entropy: Tensor | None, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    """PPO's clipped surrogate per token (Schulman et al. 2017), with DAPO's two bounds."""
    ratio = (logprob - old_logprob).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)


# ---- log-probabilities ------------------------------------------------------------------------------------------


@cache
def _active_index(target: Tensor) -> Tensor:
    """Cached per batch, as in a trainer that packs on the host: finding the index on a device waits for it."""
    return (target != IGNORE_INDEX).nonzero().squeeze(-1)


def _ours(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return linear_logprob(hidden, weight, target, active_index=_active_index(target), **options).logprob


def _ours_keeping(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The workspace holds all logits, and backward's tile, which is less than a quarter of the logits."""
    return _ours(hidden, weight, target, workspace_mib=5 * target.shape[0] * weight.shape[0] // 2**20 + 1)


def _eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _cut_cross_entropy_options(filtering: bool) -> dict[str, Any]:
    """The kernels need a GPU. With `filtering` they leave out tiles of small gradients, which random data flatters."""
    if DEVICE.type == "cpu":
        return {"impl": "torch_compile"}
    return {"impl": "cce"} if filtering else {"impl": "cce", "filter_eps": None}


def _load_cut_cross_entropy(filtering: bool = False) -> LogprobFunction:
    from cut_cross_entropy import linear_cross_entropy

    options = {"reduction": "none"} | _cut_cross_entropy_options(filtering)
    return lambda hidden, weight, target: -linear_cross_entropy(hidden, weight, target, **options)


def _load_trl() -> LogprobFunction:
    import trl.trainer.utils as utils  # its backward imports this module

    def logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
        return utils._ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, chunk, None, 1.0, ())[0]

    return logprob


def _load_liger_scaled() -> LogprobFunction:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return lambda hidden, weight, target: -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, target)


OURS = "rlft_fast"
EAGER = "eager PyTorch"
KEEPING = f"{OURS}, logits kept"
ROOMY = f"{OURS}, half of the logits"  # in memory at once; the loss's default is far less on a CPU, more on a GPU
# On a GPU, `auto` takes the faster of these backends: see benchmarks/ops/fastest.py.
COMPARED_BACKENDS = ("native", "triton") if DEVICE.type == "cuda" else ()


def backend_way(backend: str) -> str:
    """The name of our way with an explicit backend."""
    return f"{OURS}, {backend}"


_LOGPROB_FUNCTIONS: dict[str, Callable[[], LogprobFunction]] = {
    OURS: lambda: _ours,
    **{backend_way(backend): partial(partial, _ours, backend=backend) for backend in COMPARED_BACKENDS},
    EAGER: lambda: _eager,
    "torch.compile": lambda: torch.compile(_eager, dynamic=False),
    "cut-cross-entropy": _load_cut_cross_entropy,
    **({"cut-cross-entropy, filtering": lambda: _load_cut_cross_entropy(True)} if DEVICE.type == "cuda" else {}),
    "TRL chunked": _load_trl,
    "Liger scaled CE": _load_liger_scaled,
}


def _logprob_loader(load: Callable[[], LogprobFunction]) -> Callable[[], Way]:
    def loader() -> Way:
        function = load()
        return lambda hidden, weight, problem: function(hidden, weight, problem.target_T)

    return loader


# ---- entropy under a soft cap ---------------------------------------------------------------------------------------

SOFTCAP = 30.0  # Gemma's


def _our_entropy(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    how = {"active_index": _active_index(problem.target_T), "return_entropy": True, "softcap": SOFTCAP}
    return torch.stack(linear_logprob(hidden, weight, problem.target_T, **how)[:2])


def _eager_entropy(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    log_p = torch.log_softmax(SOFTCAP * (hidden @ weight.T / SOFTCAP).tanh(), dim=-1)
    logprob = log_p.gather(-1, problem.target_T.unsqueeze(-1)).squeeze(-1)
    return torch.stack([logprob, -(log_p.exp() * log_p).sum(-1)])


def _load_trl_entropy() -> Way:
    import trl.trainer.utils as utils

    def way(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        how = (1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, SOFTCAP, 1.0, ("entropy",))
        return torch.stack(utils._ChunkedLogProbFunction.apply(hidden, weight, None, problem.target_T, *how)[:2])

    return way


ENTROPY_WAYS: dict[str, Callable[[], Way]] = {
    OURS: lambda: _our_entropy,
    EAGER: lambda: _eager_entropy,
    "torch.compile": lambda: torch.compile(_eager_entropy, dynamic=False),
    "TRL chunked": _load_trl_entropy,
}


# ---- the PPO loss -------------------------------------------------------------------------------------------------


def _our_ppo(hidden: Tensor, weight: Tensor, problem: Problem, **options: Any) -> Tensor:
    per_token = (problem.old_logprob_T, problem.advantage_T)
    how = {"active_index": _active_index(problem.target_T)} | options
    return linear_logprob_loss(hidden, weight, problem.target_T, ppo_clip, *per_token, **how).loss


def _ppo_of(function: LogprobFunction) -> Way:
    def way(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        logprob_T = function(hidden, weight, problem.target_T)
        loss_T = ppo_clip(logprob_T, None, problem.old_logprob_T, problem.advantage_T)
        return loss_T.where(problem.target_T != IGNORE_INDEX, 0).sum()

    return way


def _load_liger_grpo() -> Way:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def way(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        rows = (len(problem.advantage_B), -1)
        # One chunk has all sequences. Liger's default, one sequence per chunk, adds up a (V, D) gradient per sequence.
        loss = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, compiled=False, chunk_size=rows[0], epsilon_low=CLIP_LOW,
            epsilon_high=CLIP_HIGH, loss_type="dapo",
        )  # fmt: skip
        target_BL = problem.target_T.view(rows)
        return loss(
            hidden.view(*rows, hidden.shape[-1]), weight, target_BL, torch.ones_like(target_BL), problem.advantage_B,
            old_per_token_logps=problem.old_logprob_T.view(rows), num_items_in_batch=1,
        )[0]  # fmt: skip

    return way


# ---- the loss of a distillation -----------------------------------------------------------------------------------

TOP_K = 64


@cache
def _likely(hidden: Tensor, weight: Tensor, target: Tensor) -> TopLogprob:
    """The most likely ids of a teacher whose head differs from the student's."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).to(weight)
    return top_logprob(hidden.detach(), weight.detach() + 0.1 * weight.std() * noise, target, TOP_K)


def _our_distillation(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    likely = _likely(problem.hidden_TD, problem.weight_VD, problem.target_T)
    how = {"active_index": _active_index(problem.target_T), "ids_TK": likely.ids}
    loss = lambda _, entropy, ids_logprob, q_logprob: -(q_logprob.exp() * ids_logprob).sum(-1)  # noqa: E731
    return linear_logprob_loss(hidden, weight, problem.target_T, loss, likely.ids_logprob, **how).loss


def _eager_distillation(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    likely = _likely(problem.hidden_TD, problem.weight_VD, problem.target_T)
    ids_logprob = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, likely.ids)
    return -(likely.ids_logprob.exp() * ids_logprob).sum()


DISTILLATION_WAYS: dict[str, Callable[[], Way]] = {OURS: lambda: _our_distillation, EAGER: lambda: _eager_distillation}


# ---- the cross-entropy loss ---------------------------------------------------------------------------------------


def _our_cross_entropy(hidden: Tensor, weight: Tensor, problem: Problem, **options: Any) -> Tensor:
    how = {"active_index": _active_index(problem.target_T)} | options
    return linear_logprob_loss(hidden, weight, problem.target_T, lambda logprob, _: -logprob, **how).loss


def _eager_cross_entropy(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, problem.target_T, reduction="sum")


def _linear_cross_entropy(options: torch.nn.LinearCrossEntropyOptions | None) -> Way:
    return lambda hidden, weight, problem: functional.linear_cross_entropy(
        hidden, weight, problem.target_T, reduction="sum", options=options
    )


def _load_cut_cross_entropy_sum() -> Way:
    from cut_cross_entropy import linear_cross_entropy

    options = {"reduction": "sum"} | _cut_cross_entropy_options(filtering=False)
    return lambda hidden, weight, problem: linear_cross_entropy(hidden, weight, problem.target_T, **options)


def _with_room(way: Callable[..., Tensor]) -> dict[str, Callable[[], Way]]:
    def roomy(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        return way(hidden, weight, problem, workspace_mib=2 * hidden.shape[0] * weight.shape[0] // 2**20 + 1)

    return {ROOMY: lambda: roomy} if DEVICE.type == "cpu" else {}


LOGPROB_WAYS: dict[str, Callable[[], Way]] = {n: _logprob_loader(load) for n, load in _LOGPROB_FUNCTIONS.items()}
TRAINING_WAYS = LOGPROB_WAYS | {KEEPING: _logprob_loader(lambda: _ours_keeping)}
PPO_WAYS: dict[str, Callable[[], Way]] = {
    OURS: lambda: _our_ppo,
    **{backend_way(backend): partial(partial, _our_ppo, backend=backend) for backend in COMPARED_BACKENDS},
    **_with_room(_our_ppo),
    EAGER: lambda: _ppo_of(_eager),
    "torch.compile": lambda: torch.compile(_ppo_of(_eager), dynamic=False),
    "cut-cross-entropy": lambda: _ppo_of(_load_cut_cross_entropy()),
    "TRL chunked": lambda: _ppo_of(_load_trl()),
    "Liger GRPO": _load_liger_grpo,
}
CROSS_ENTROPY_WAYS: dict[str, Callable[[], Way]] = {
    OURS: lambda: _our_cross_entropy,
    **_with_room(_our_cross_entropy),
    EAGER: lambda: _eager_cross_entropy,
    "F.linear_cross_entropy": lambda: _linear_cross_entropy(None),
    "F.linear_cross_entropy, chunked": lambda: _linear_cross_entropy(torch.nn.LinearCrossEntropyOptions()),
    "cut-cross-entropy": _load_cut_cross_entropy_sum,
}
