"""What the engine asks of a loss, and the outputs of a head by name."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from rlft_fast.config import HeadKind
from rlft_fast.data import Batch
from rlft_fast.ops.packing import segment_expand, segment_sum
from rlft_fast.rl import Aggregation, loss_scale, loss_weights

Output = Literal["logprob", "entropy", "sum_prob_squared", "top_ids", "top_logprob", "routed_experts", "value", "score"]

# By head: what `infer` can return, what `train_step` computes, and how a loss calls the latter.
OUTPUTS: dict[HeadKind, tuple[Output, ...]] = {
    "logprob": ("logprob", "entropy", "sum_prob_squared", "top_ids", "top_logprob", "routed_experts"),
    "value": ("value",), "score": ("score",),
}  # fmt: skip
TRAINED: dict[HeadKind, tuple[Output, ...]] = {
    "logprob": ("logprob", "entropy"), "value": ("value",), "score": ("score",),
}  # fmt: skip
LOSS_READS: dict[HeadKind, tuple[str, ...]] = {
    "logprob": ("logprob_T", "entropy_T"), "value": ("new_value_T",), "score": ("score_T",),
}  # fmt: skip

# Outputs (T, K), which a pass gives with the log-probabilities alone.
OF_TOP: tuple[Output, ...] = ("top_ids", "top_logprob")
IDS_LOGPROB = "ids_logprob_TK"  # how a loss calls the log-probabilities of the ids of its `ids_field`


def weighted(batch: Batch, loss: "Loss") -> tuple[Batch, float]:
    """The batch with the weights of its tokens, and the factor on the weighted sum.

    A batch that has weights is returned unchanged. The branches of an episode count as one sequence.

    A loss may say that it `needs_advantage`. Tokens without an advantage then have weight 0, and the weights of the
    others sum to 1: sums of weighted metrics are means over the tokens that run. The factor makes up for it, so that
    loss and gradient are those of all tokens. A loss that also `needs_sequences` reads all tokens of a sequence if one
    of them has an advantage. In a batch with images every token runs.

    Args:
        batch: the whole batch of an optimizer step, on the CPU.
        loss: its aggregation decides the weights.
    """
    if batch.loss_weight_T is not None:
        return batch, 1.0
    mask_T, cu_seqlens, whole = batch.loss_mask_T, batch.cu_seqlens, batch.episodes().cu_seqlens
    weight_T = loss_weights(mask_T, whole, loss.aggregation)
    scale = loss_scale(mask_T, whole, loss.aggregation, loss.max_response_tokens)
    has_images = bool(batch.images)  # which the vision tower would run for, all the same
    if getattr(loss, "needs_advantage", False) and batch.advantage_T is not None and not has_images:
        has_one_T = (batch.advantage_T != 0) & mask_T
        if loss.needs_sequences:
            has_one_T = segment_expand(segment_sum(has_one_T, cu_seqlens) > 0, cu_seqlens, num_tokens=len(mask_T))
        weight_T *= has_one_T
        share = weight_T.sum(dtype=torch.float64).item()
        if share > 0:
            weight_T, scale = weight_T / share, scale * share
    return batch.replace(loss_weight_T=weight_T), scale


def ids_field(loss: "Loss") -> str | None:
    """The field of the batch with further ids whose log-probabilities the loss reads, (T, K); None: it reads none."""
    return getattr(loss, "ids_field", None)


def couples(loss: "Loss") -> bool:
    """Whether the loss looks at several sequences at once."""
    return any(name == "sequence_T" or name.endswith("_B") for name in loss.fields)


class Loss(Protocol):
    """A per-token loss: `rlft_fast.rl.PolicyLoss`, `rlft_fast.rl.ValueLoss`, or your own.

    `per_token` and `metrics` are called with one mapping of (T,) tensors by name: the outputs of the head (logprob_T
    and entropy_T of a policy, new_value_T of a critic, score_T of a reward model) and the fields of the batch that
    `fields` names. `per_token` returns the weighted loss of each token, `metrics` 0-d tensors that are added over
    micro-batches and ranks; names that end in "_max" are reduced by max. Where `needs_sequences`, both are also given
    `sequence_mean`, from (T,) values to the detached mean over each token's sequence.

    A loss may have a property `ids_field`: the name of a field of the batch with ids, (T, K). `per_token` and `metrics`
    then also get ids_logprob_TK, the policy's log-probabilities of these ids.

    A loss may have a property `needs_advantage`. If it is True, tokens whose `Batch.advantage_T` is 0 add nothing to
    the loss and to its gradient, and do not run.

    A loss that couples sequences also names fields of sequences, (B,), and "sequence_T", the number of each token's
    sequence: both count in the micro-batch. `Batch.unit_B` says which sequences stay together.
    """

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def max_response_tokens(self) -> int | None: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def needs_sequences(self) -> bool: ...

    per_token: Callable[..., Tensor]
    metrics: Callable[..., dict[str, Tensor]]
