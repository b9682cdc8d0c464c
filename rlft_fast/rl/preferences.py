"""Losses of pairs: one of two sequences is preferred. A batch has the chosen sequence before the rejected one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlft_fast.rl.aggregation import Aggregation

PreferenceKind = Literal["sigmoid", "ipo", "hinge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss:
    """What the losses of pairs share: the loss of a batch is the mean over its pairs.

    Sequences 2i and 2i + 1 of a batch are the chosen and the rejected one of a pair, with the same `Batch.unit_B`.

    Attributes:
        aggregation: weights of tokens from which the weight of each pair is added up; do not change it.
        max_response_tokens: unused.
    """

    aggregation: Aggregation = "sequence-mean"
    max_response_tokens: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that the loss reads."""
        raise NotImplementedError

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss is given `sequence_mean`."""
        return False

    def _loss(self, fields: Mapping[str, Tensor]) -> Tensor:
        """(pairs,) loss of each pair."""
        raise NotImplementedError

    def _rewards(self, fields: Mapping[str, Tensor]) -> Tensor:
        """(pairs, 2) rewards of the chosen and the rejected sequence."""
        raise NotImplementedError

    def per_token(self, fields: Mapping[str, Tensor]) -> Tensor:
        """(T,) the weighted loss of each pair, spread over the tokens of its two sequences.

        Args:
            fields: tensors by name, see `fields`.
        """
        loss = (_weights(fields) * self._loss(fields)).repeat_interleave(2)
        share_B = loss / (2 * _counts(fields))
        return share_B[fields["sequence_T"]]

    @torch.no_grad()
    def metrics(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means over pairs: ``pair_accuracy``, the share in which the chosen one has the larger reward, and rewards."""
        weight, rewards = _weights(fields), self._rewards(fields)
        margin = rewards[:, 0] - rewards[:, 1]
        return {
            "pair_accuracy": (weight * (margin > 0)).sum(),
            "reward_margin": (weight * margin).sum(),
            "reward_chosen": (weight * rewards[:, 0]).sum(),
            "reward_rejected": (weight * rewards[:, 1]).sum(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceLoss(PairLoss):
    """Direct preference optimization: a policy learns from pairs, without a reward model.

    With r = log π(y) - log π_ref(y), summed over the tokens of an answer y, and Δ = r(chosen) - r(rejected):

    - sigmoid: -(1 - ε)·log sigmoid(βΔ) - ε·log sigmoid(-βΔ) (Rafailov et al. 2023, arXiv:2305.18290)
    - hinge: max(0, 1 - βΔ) (Zhao et al. 2023, arXiv:2305.10425)
    - ipo: (Δ - 1 / (2β))², with means over tokens in place of sums (Azar et al. 2023, arXiv:2310.12036)

    Attributes:
        kind: of the three.
        beta: how far the policy may move from the reference: less for a larger beta.
        label_smoothing: ε, the share of pairs whose labels are expected to be wrong.
        length_normalized: r is the mean over the tokens of an answer instead of the sum.

    Raises:
        ValueError: an option is out of range, or the kind does not have it.
    """

    kind: PreferenceKind = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalized: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("sigmoid", "ipo", "hinge"):
            raise ValueError(f"kind is {self.kind!r}, expected sigmoid, ipo or hinge")
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}, expected a number > 0")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.kind != "sigmoid"):
            raise ValueError(
                f"label_smoothing is {self.label_smoothing} with kind {self.kind}, expected a number in [0, 0.5), "
                "and 0 for ipo and hinge"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that the loss reads."""
        return ("ref_logprob_T", "loss_weight_T", "sequence_T", "unit_B")

    def _ratios(self, fields: Mapping[str, Tensor]) -> Tensor:
        """(pairs, 2) r of the chosen and the rejected sequence."""
        ratio_B = _sums(fields, fields["logprob_T"] - fields["ref_logprob_T"])
        if self.length_normalized or self.kind == "ipo":
            ratio_B = ratio_B / _counts(fields)
        return ratio_B.view(-1, 2)

    def _rewards(self, fields: Mapping[str, Tensor]) -> Tensor:
        return self.beta * self._ratios(fields)

    def _loss(self, fields: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = self._ratios(fields).unbind(1)
        delta = chosen - rejected
        if self.kind == "ipo":
            return (delta - 1 / (2 * self.beta)).square()
        if self.kind == "hinge":
            return (1 - self.beta * delta).relu()
        smoothing = self.label_smoothing
        return -(1 - smoothing) * logsigmoid(self.beta * delta) - smoothing * logsigmoid(-self.beta * delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class BradleyTerryLoss(PairLoss):
    """-log sigmoid(s(chosen) - s(rejected) - margin), of the scores s of a reward model (Bradley & Terry 1952).

    `Batch.reward_B` of the chosen sequence minus that of the rejected one is the margin, 0 for none.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `Batch` fields that the loss reads."""
        return ("loss_weight_T", "sequence_T", "unit_B", "reward_B")

    def _rewards(self, fields: Mapping[str, Tensor]) -> Tensor:
        return _sums(fields, fields["score_T"]).view(-1, 2)

    def _loss(self, fields: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = self._rewards(fields).unbind(1)
        margin = fields["reward_B"].view(-1, 2).diff(dim=1).neg().squeeze(1)
        return -logsigmoid(chosen - rejected - margin.to(chosen.dtype))


def _sums(fields: Mapping[str, Tensor], x_T: Tensor) -> Tensor:
    """(B,) sum over the tokens of each sequence."""
    return x_T.new_zeros(len(fields["unit_B"])).index_add(0, fields["sequence_T"], x_T)


def _counts(fields: Mapping[str, Tensor]) -> Tensor:
    """(B,) active tokens of each sequence."""
    weight_T = fields["loss_weight_T"]
    return _sums(fields, torch.ones_like(weight_T)).clamp(min=1)


def _weights(fields: Mapping[str, Tensor]) -> Tensor:
    """(pairs,) weight of each pair in the whole batch."""
    return _sums(fields, fields["loss_weight_T"]).view(-1, 2).sum(1)
