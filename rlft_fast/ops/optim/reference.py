"""Plain PyTorch definitions of every op of this room, which its tests compare with. They take unsharded
tensors and compute in float64.
"""

import torch
from torch import Tensor


def grad_norm(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """(sum_i |g_i|^p)^(1/p) over every element of every gradient, for p = inf the largest |g_i|; 0-d float64."""
    flat = [gradient.detach().cpu().double().flatten() for gradient in gradients]
    return torch.linalg.vector_norm(torch.cat([torch.zeros(1, dtype=torch.float64), *flat]), norm_type)


def clip_coefficient(norm: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor]:
    """min(1, max_norm / (norm + 1e-6)), and whether the norm is not finite (Pascanu et al. 2013, arXiv:1211.5063).

    The coefficient is 1 where the norm is not finite, and for a max_norm of None, 0 or inf, which only measures.
    """
    found_inf = (~norm.isfinite()).float()
    if not max_norm or found_inf:
        return torch.ones_like(norm), found_inf
    return (max_norm / (norm + 1e-6)).clamp(max=1.0), found_inf


def clip_grad_norm_(gradients: list[Tensor], max_norm: float | None, norm_type: float = 2.0) -> Tensor:
    """g = coefficient * g in place; the norm before clipping."""
    norm = grad_norm(gradients, norm_type)
    coefficient, _ = clip_coefficient(norm, max_norm)
    for gradient in gradients:
        gradient.copy_(gradient.double() * coefficient.to(gradient.device))
    return norm


def adamw_state(weight: Tensor) -> dict[str, Tensor]:
    """The state before the first step. Its `master` is the weight in float64, which the steps update."""
    master = weight.detach().double().clone()
    step = torch.zeros((), dtype=torch.float64)
    return {"step": step, "exp_avg": 0 * master, "exp_avg_sq": 0 * master, "master": master}


def adamw_step(
    state: dict[str, Tensor],
    gradient: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    coefficient: float = 1.0,
    found_inf: float = 0.0,
) -> None:
    """One step of AdamW on the state, in place. Where found_inf is not 0 nothing changes, nor does the step count t.

    g = coefficient * gradient
    m = beta1 * m + (1 - beta1) * g                                         Kingma and Ba 2015, arXiv:1412.6980
    v = beta2 * v + (1 - beta2) * g^2
    w = (1 - lr * weight_decay) * w - lr * m_hat / (sqrt(v_hat) + eps)      Loshchilov and Hutter 2019, arXiv:1711.05101

    with m_hat = m / (1 - beta1^t) and v_hat = v / (1 - beta2^t). w is the master: a bfloat16 or float16 parameter is
    the master, rounded.
    """
    if found_inf:
        return
    (beta1, beta2), g = betas, coefficient * gradient.double()
    state["step"] += 1
    state["exp_avg"].mul_(beta1).add_((1 - beta1) * g)
    state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * g**2)
    m_hat = state["exp_avg"] / (1 - beta1 ** state["step"])
    v_hat = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
    state["master"].mul_(1 - lr * weight_decay).sub_(lr * m_hat / (v_hat.sqrt() + eps))
