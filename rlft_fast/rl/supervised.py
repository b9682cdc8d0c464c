"""Losses of learning from given texts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlft_fast.rl.aggregation import Aggregation
from rlft_fast.rl.distillation import top_k_divergence


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelihoodLoss:
    """-log π of each taught token, times its weight: with weights 1 / N the mean over the N taught tokens of a batch.

    With a teacher the loss of a token is

        l = -coef·log π + teacher_coef·KL(π_teacher ‖ π)

    Attributes:
        coef: Weight of -log π.
        teacher_coef: Weight of `top_k_divergence` from a teacher.
        teacher_tail: Whether the divergence has the term of the ids that the teacher does not name.
        aggregation: Mode for `loss_weights`, read where `loss_weight_T` is filled in.
        max_response_tokens: the constant of aggregation "constant".
    """

    coef: float = 1.0
    teacher_coef: float = 0.0
    teacher_tail: bool = True
    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that `per_token` and `metrics` read."""
        return ("loss_weight_T", *(("teacher_logprob_TK",) if self.teacher_coef else ()))

    @property
    def ids_field(self) -> str | None:
        """The field with the ids whose log-probabilities `per_token` and `metrics` read as ids_logprob_TK."""
        return "teacher_ids_TK" if self.teacher_coef else None

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss looks at whole sequences."""
        return False

    def per_token(self, fields: Mapping[str, Tensor]) -> Tensor:
        """(T,) weighted loss of each token.

        Args:
            fields: (T,) tensors by name: logprob_T with gradient, and loss_weight_T. With a teacher also, (T, K),
                ids_logprob_TK with gradient and teacher_logprob_TK.
        """
        loss_T = -fields["logprob_T"]
        if self.teacher_coef:
            loss_T = self.coef * loss_T + self.teacher_coef * self._divergence(fields)
        return fields["loss_weight_T"] * loss_T

    @torch.no_grad()
    def metrics(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums: over micro-batches and ranks, means of the taught tokens.

        Keys: entropy; with a teacher cross_entropy and teacher_divergence, the two terms of the loss without weights.
        """
        per_token = {"entropy": fields["entropy_T"]}
        if self.teacher_coef:
            per_token |= {"cross_entropy": -fields["logprob_T"], "teacher_divergence": self._divergence(fields)}
        return {name: (fields["loss_weight_T"] * x_T).sum() for name, x_T in per_token.items()}

    def _divergence(self, fields: Mapping[str, Tensor]) -> Tensor:
        return top_k_divergence(fields["ids_logprob_TK"], fields["teacher_logprob_TK"], add_tail=self.teacher_tail)
