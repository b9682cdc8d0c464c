"""What the engine asks of a loss, and the outputs of a head by name."""

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from rlft_fast.engine.sharding import HeadKind
from rlft_fast.rl import Aggregation

Output = Literal["logprob", "entropy", "sum_prob_squared", "value", "score"]

# By head: what `infer` can return, what `train_step` computes, and how a loss calls the latter.
OUTPUTS: dict[HeadKind, tuple[Output, ...]] = {
    "logprob": ("logprob", "entropy", "sum_prob_squared"), "value": ("value",), "score": ("score",),
}  # fmt: skip
TRAINED: dict[HeadKind, tuple[Output, ...]] = {
    "logprob": ("logprob", "entropy"), "value": ("value",), "score": ("score",),
}  # fmt: skip
LOSS_READS: dict[HeadKind, tuple[str, ...]] = {
    "logprob": ("logprob_T", "entropy_T"), "value": ("new_value_T",), "score": ("score_T",),
}  # fmt: skip


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
