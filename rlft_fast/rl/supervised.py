"""Losses of learning from given texts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlft_fast.rl.aggregation import Aggregation


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelihoodLoss:
    """-log π of each taught token, times its weight: with weights 1 / N the mean over the N taught tokens of a batch.

    Attributes:
        aggregation: Mode for `loss_weights`, read where `loss_weight_T` is filled in.
        max_response_tokens: the constant of aggregation "constant".
    """

    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that `per_token` and `metrics` read."""
        return ("loss_weight_T",)

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss looks at whole sequences."""
        return False

    def per_token(self, fields: Mapping[str, Tensor]) -> Tensor:
        """(T,) weighted loss of each token.

        Args:
            fields: (T,) tensors by name: logprob_T with gradient, and loss_weight_T.
        """
        return -fields["loss_weight_T"] * fields["logprob_T"]

    @torch.no_grad()
    def metrics(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weighted sum of entropy_T: over micro-batches and ranks, the mean entropy of the taught tokens."""
        return {"entropy": (fields["loss_weight_T"] * fields["entropy_T"]).sum()}
