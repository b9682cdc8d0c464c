"""Advantage estimators by name, and what calls one of them, or one of the user's, for a batch.

An estimator is a plain function whose parameters name what it reads: fields of the `Batch`, and the settings `gamma`
and `lam`. Rewards are float64, because the difference of two large rewards would be lost in float32. An estimator
returns one advantage per sequence (B,), one per token (T,), or an `AdvantageReturn`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlft_fast.data import Batch
from rlft_fast.errors import StepError
from rlft_fast.ops.packing import segment_expand
from rlft_fast.plugins import function_name
from rlft_fast.rl.advantages.groups import (
    dr_grpo_advantage,
    gpg_advantage,
    grpo_advantage,
    opo_advantage,
    reinforce_plus_plus_baseline,
    rloo_advantage,
)
from rlft_fast.rl.advantages.tokens import (
    AdvantageReturn,
    no_advantage,
    optimal_token_advantage,
    reinforce_plus_plus,
    remax_advantage,
    whitened_gae,
)
from rlft_fast.rl.methods import arguments_of, call_method

AdvantageFunction = Callable[..., Tensor | AdvantageReturn]


class AdvantageError(StepError, ValueError):
    """An advantage estimator, or what it is multiplied with, failed or returned something that is not an advantage."""

    part = "advantage"


ADVANTAGES: dict[str, AdvantageFunction] = {
    "gae": whitened_gae,
    "grpo": grpo_advantage,
    "dr-grpo": dr_grpo_advantage,
    "rloo": rloo_advantage,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "remax": remax_advantage,
    "opo": opo_advantage,
    "gpg": gpg_advantage,
    "optimal-token": optimal_token_advantage,
    "none": no_advantage,
}


def compute_advantages(batch: Batch, function: AdvantageFunction, *, gamma: float = 1.0, lam: float = 1.0) -> Batch:
    """The batch with ``advantage_T``, zero outside the loss mask, and ``return_T`` where the estimator gives returns.

    A batch without sequences gets both, empty, and no estimator has to think of it.

    Args:
        batch: the whole rollout, on the CPU, with the fields that the estimator reads.
        function: see the module.
        gamma: discount per token, for an estimator with a parameter of this name.
        lam: the λ of GAE, for an estimator with a parameter of this name.

    Raises:
        ValueError: a field that the estimator reads is missing.
        AdvantageError: the estimator raised, or returned another shape, or numbers that are not finite.
    """
    if not batch.num_sequences:
        return batch.replace(advantage_T=torch.zeros(0), return_T=torch.zeros(0))
    name, settings = function_name(function), {"gamma": gamma, "lam": lam}
    arguments = arguments_of("advantage", function, batch, settings)
    result = call_method("advantage", function, arguments, AdvantageError)
    advantage, return_T = result if isinstance(result, AdvantageReturn) else (result, None)
    sizes = ((batch.num_tokens,), (batch.num_sequences,))
    if not isinstance(advantage, Tensor) or tuple(advantage.shape) not in sizes:
        got = tuple(advantage.shape) if isinstance(advantage, Tensor) else type(advantage).__name__
        raise AdvantageError(
            f"advantage {name} returned {got}, expected one per token {sizes[0]} or sequence {sizes[1]}"
        )
    if tuple(advantage.shape) == sizes[1]:
        advantage_T = segment_expand(advantage.float(), batch.cu_seqlens, num_tokens=batch.num_tokens)
        advantage_T.masked_fill_(~batch.loss_mask_T, 0.0)
    else:
        advantage_T = advantage.float().where(batch.loss_mask_T, 0.0)
    if not torch.stack(advantage_T.aminmax()).isfinite().all():  # the extremes of a tensor with a NaN are NaN
        raise AdvantageError(f"advantage {name} returned numbers that are not finite at response tokens")
    return batch.replace(advantage_T=advantage_T, return_T=batch.return_T if return_T is None else return_T.float())
