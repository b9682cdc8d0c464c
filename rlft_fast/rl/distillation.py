"""Losses of a policy that learns the distributions of a teacher."""

import torch
from torch import Tensor

_MOST_MASS = -1e-6  # log of the most mass that ids may have: the rest is a difference of two float32 numbers near 1


def top_k_divergence(logprob_TK: Tensor, teacher_logprob_TK: Tensor, *, add_tail: bool = True) -> Tensor:
    """KL(π_teacher ‖ π) of each token over the ids that the teacher finds most likely, from all of their probabilities.

        l = Σ_k q_k·(log q_k - log π_k) + (1 - Σ q)·(log(1 - Σ q) - log(1 - Σ π))

    q are the teacher's probabilities. The last term is of all other ids together. Without it, l may be negative, and
    mass that the policy has at other ids counts only as far as it is missing at these. Knowledge distillation
    (arXiv 1503.02531) on the policy's own samples is on-policy distillation (GKD, arXiv 2306.13649, its forward KL).

    Args:
        logprob_TK: (T, K) log π of the ids, with gradient.
        teacher_logprob_TK: (T, K) log q of the ids; -inf: there is no such id.
        add_tail: whether the last term is added.

    Returns:
        (T,), exact in its gradient.
    """
    is_there = teacher_logprob_TK > -torch.inf
    log_q, log_p = (x.where(is_there, 0.0) for x in (teacher_logprob_TK, logprob_TK))
    q = log_q.exp().where(is_there, 0.0)
    loss_T = (q * (log_q - log_p)).sum(-1)
    if not add_tail:
        return loss_T
    rest_q, rest_p = (_log_rest(x, is_there) for x in (teacher_logprob_TK, logprob_TK))
    return loss_T + rest_q.exp() * (rest_q - rest_p)


def _log_rest(logprob_TK: Tensor, is_there: Tensor) -> Tensor:
    """(T,) log(1 - Σ p) of the ids that are there."""
    mass = logprob_TK.masked_fill(~is_there, -torch.inf).logsumexp(-1).clamp(max=_MOST_MASS)
    return torch.log(-torch.expm1(mass))
