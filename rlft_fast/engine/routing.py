"""What the routers of a mixture of experts do in an optimizer step: their auxiliary loss, and routing replay.

The auxiliary loss is transformers' ``load_balancing_loss_func`` (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6)
of all tokens of the batch that run, over all L layers, E experts and ranks at once:

    E * sum_e f_e * P_e,  f_e = choices of e / (tokens * L),  P_e = mean of the probability of e

f_e counts the experts that run. Where a bias corrects the choice (Ernie 4.5), transformers counts the most probable
ones instead, which may not run. f_e has no gradient, and P_e is a sum over tokens. With f_e of the whole batch known
before, the loss is a sum over tokens, too: micro-batches and ranks change it no more than they change other losses. The
experts in `Batch.routed_experts_TK` give f_e. A batch without them runs once more, without gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlft_fast.models import ModelInputs, Routing

_AGREED, _CHOICES = "routing_agreed", "routing_choices"


@dataclass(frozen=True)
class PassRouting:
    """What the routers do in a pass over the rows of a micro-batch.

    Args:
        routing: is filled by the pass.
        weight_U: (U,) float32, how many tokens of the micro-batch each row stands for.
    """

    routing: Routing
    weight_U: Tensor

    @classmethod
    def of(cls, inputs: ModelInputs) -> "PassRouting":
        """For a pass over these inputs, which replays the experts that they name."""
        assert inputs.row_T is not None
        tokens_U = torch.bincount(inputs.row_T[inputs.row_T >= 0], minlength=len(inputs.input_ids_U))
        return cls(Routing(inputs.routed_experts_UK), tokens_U.float().to(inputs.input_ids_U.device))

    def counts(self, num_experts: int) -> Tensor:
        """(E,) tokens that each expert got, over all layers."""
        chosen = torch.cat([*self.routing.chosen.values()], -1)
        weight = self.weight_U[:, None].expand(chosen.shape)
        return self.weight_U.new_zeros(num_experts).index_add_(0, chosen.flatten(), weight.flatten())

    def balance(self, count_E: Tensor) -> Tensor:
        """0-d, this pass's part of the auxiliary loss.

        Args:
            count_E: (E,) `counts` of all passes of the batch, on all ranks.
        """
        layers = self.routing.logits.values()
        probability_E = torch.stack([self.weight_U @ logits.softmax(-1, dtype=torch.float32) for logits in layers]).sum(
            0
        )
        top_k = self.routing.chosen[0].shape[-1]
        num_rows = (count_E.sum() / top_k).clamp(min=1)  # tokens * L
        return len(count_E) * (count_E / num_rows) @ (probability_E / num_rows)

    def agreement(self) -> dict[str, Tensor]:
        """Sums over tokens of which `agreement_share` makes a metric."""
        own, chosen = (torch.cat([*x.values()]) for x in (self.routing.own, self.routing.chosen))
        agrees = (chosen[:, :, None] == own[:, None, :]).any(-1).sum(-1, dtype=torch.float32)
        weight = self.weight_U.repeat(len(self.routing.chosen))
        return {_AGREED: weight @ agrees, _CHOICES: weight.sum() * chosen.shape[-1]}


def agreement_share(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with ``routing_agreement`` in place of its sums: the share of replayed choices that are routers' own.

    Args:
        metrics: sums over all passes.
    """
    if _CHOICES not in metrics:
        return metrics
    agreed, choices = metrics.pop(_AGREED), metrics.pop(_CHOICES)
    return metrics | {"routing_agreement": agreed / choices if choices else 1.0}
