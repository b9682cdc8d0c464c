"""The fused head inside TRL's trainers.

TRL 1.16 gives every model that it trains or refers to a fused head of its own (`add_fused_lm_head`). All these heads
call one function of TRL for their numbers, `_ChunkedLogProbFunction`, and look it up at each call. `enable` puts
`linear_logprob` in its place. Everything around it stays TRL's: labels, masks, losses, a router's auxiliary loss,
adapters, and the gathering of sharded weights.

Shapes: N positions, D hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from rlft_fast.integrations.seams import require_function
from rlft_fast.ops import linear_logprob

__all__ = ["disable", "enable"]

_TESTED = "1.16.0"
_PARAMETERS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip


def enable(*, workspace_mib: int | None = None) -> None:
    """Makes all trainers of TRL compute log-probabilities by :func:`rlft_fast.ops.linear_logprob`.

    It holds for the whole process, for trainers that exist already and for later ones: GRPO, RLOO, DPO, KTO, SFT and
    the experimental asynchronous GRPO. A second call replaces the first.

    TRL's own function still computes two kinds of calls: weights that DeepSpeed's ZeRO-3 shards, and devices other than
    CPUs and CUDA GPUs. TRL's `is_top1` takes the first of equally likely tokens; here, each of them is the most likely
    one.

    Args:
        workspace_mib: the most memory that logits take at any time [MiB], see :func:`rlft_fast.ops.linear_logprob`.

    Raises:
        ImportError: TRL is not installed, or its version has another head.
    """
    disable()
    utils = _trl_utils()
    utils._ChunkedLogProbFunction = _FusedFunction(utils._ChunkedLogProbFunction, utils._use_triton, workspace_mib)
    utils._use_triton = utils._ChunkedLogProbFunction.scores_labels_only


def disable() -> None:
    """Gives TRL's trainers their own function back. Without a call of :func:`enable` before, it does nothing.

    Raises:
        ImportError: TRL is not installed, or its version has another head.
    """
    utils = _trl_utils()
    if isinstance(utils._ChunkedLogProbFunction, _FusedFunction):
        utils._use_triton = utils._ChunkedLogProbFunction.own_use_triton
        utils._ChunkedLogProbFunction = utils._ChunkedLogProbFunction.own


def _trl_utils() -> Any:
    require_function("trl.trainer.utils:_use_triton", (), _TESTED)
    from trl.trainer import utils

    if not isinstance(getattr(utils, "_ChunkedLogProbFunction", None), _FusedFunction):
        require_function("trl.trainer.utils:_ChunkedLogProbFunction.forward", _PARAMETERS, _TESTED, and_no_others=True)
    return utils


class _FusedFunction:
    """Takes the place of TRL's autograd function, whose arguments and results it has.

    Args:
        own: TRL's function.
        own_use_triton: TRL's rule for the devices on which only positions with a label are scored.
        workspace_mib: as in `linear_logprob`.
    """

    def __init__(self, own: Any, own_use_triton: Any, workspace_mib: int | None) -> None:
        self.own, self.own_use_triton, self.workspace_mib = own, own_use_triton, workspace_mib

    def scores_labels_only(self, device: torch.device) -> bool:
        """TRL scores every position on a CPU, where it has no Triton. The op takes any number of rows there, too."""
        return device.type == "cpu" or self.own_use_triton(device)

    def apply(
        self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float,
        chunk_size: int, softcap: float | None, logit_scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(N,) log-probabilities, entropies, logs of summed squared probabilities, mean logits, and whether top 1."""
        is_sharded = hasattr(weight_VD, "ds_id")  # empty again before the backward pass
        if is_sharded or hidden_ND.device.type not in ("cpu", "cuda"):
            return self.own.apply(
                hidden_ND, weight_VD, bias_V, targets_N, temperature, chunk_size, softcap, logit_scale, outputs
            )
        result = linear_logprob(
            hidden_ND, weight_VD, targets_N, bias_V=bias_V, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, return_entropy="entropy" in outputs, return_top1="is_top1" in outputs,
            return_sum_prob_squared="log_sum_sq_probs" in outputs, return_mean_logits="mean_logits" in outputs,
            workspace_mib=self.workspace_mib,
        )  # fmt: skip
        log_sum = None if result.sum_prob_squared is None else result.sum_prob_squared.log()
        return result.logprob, result.entropy, log_sum, result.mean_logits, result.top1
