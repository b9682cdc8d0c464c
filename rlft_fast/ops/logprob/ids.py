"""Log-probabilities of a few ids beside each target, for `linear_logprob_loss`: what a distillation loss reads.

With x the logit that the softmax sees, log p_k = log p_t + x_k - x_t: the GEMM of the logits has given log p_t, and the
x are dot products with gathered rows. A gradient g_k in log p_k is one of g_k in log p_t, which the other GEMMs carry,
and one of g_k in x_k - x_t, which is finished here: the GEMMs stay three, and memory is that of T K numbers.

Shapes: T packed tokens, R rows of one chunk, K ids of each row, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlft_fast.ops.logprob.gathered import add_gathered_grad_weight_, gathered_grad_hidden, gathered_logits
from rlft_fast.ops.logprob.problem import Problem
from rlft_fast.ops.logprob.reference import transform_logits
from rlft_fast.ops.logprob.statistics import Rows
from rlft_fast.ops.logprob.ways import Gradients

_WORKSPACE_MIB = 64  # of gathered rows, where the caller names none


@dataclass(frozen=True, slots=True)
class IdLogits:
    """Of a chunk: the raw logits of K ids and, in the last column, of the target."""

    problem: Problem
    rows: Rows
    ids: Tensor  # (R, K + 1)
    raw: Tensor  # (R, K + 1) float32, with bias

    @classmethod
    def of(cls, problem: Problem, rows: Rows, ids_RK: Tensor) -> IdLogits:
        target_R1 = rows.target_R.clamp(0, problem.vocab - 1).unsqueeze(1)  # another one has a log-probability of nan
        ids = torch.cat([ids_RK, target_R1], dim=1)
        columns = rows.hidden_RD.split([part.shape[1] for part in problem.parts], dim=1)
        raw = sum(
            gathered_logits(x, part, ids, _workspace_mib(problem), problem.dtype)
            for x, part in zip(columns, problem.parts, strict=True)
        )
        assert isinstance(raw, Tensor)
        return cls(problem, rows, ids, raw if problem.bias_V is None else raw + problem.bias_V[ids])

    def logprob(self, raw: Tensor, logprob_R: Tensor) -> Tensor:
        """(R, K) log-probabilities of the ids, differentiable in the raw logits and the target's log-probability."""
        x = transform_logits(raw, 1.0, self.problem.softcap or None, self.problem.scale)
        x = x * self.rows.inv_temperature.unsqueeze(1)
        others = self.ids[:, :-1] != self.ids[:, -1:]  # a target among the ids would add a gradient and take it away
        return logprob_R.unsqueeze(1) + (x[:, :-1] - x[:, -1:]).where(others, 0)

    def add_gradients(self, grad: Tensor, index: Tensor, grads: Gradients) -> None:
        """Adds what the gradient of the raw logits gives to float32 gradients; ``index`` are the rows' tokens."""
        workspace_mib, dtype = _workspace_mib(self.problem), self.problem.dtype
        if grads.hidden.numel():
            of_parts = [gathered_grad_hidden(grad, x, self.ids, workspace_mib, dtype) for x in self.problem.parts]
            grads.hidden[index] += torch.cat(of_parts, dim=1)
        if grads.weight.numel():
            factor = self.problem.factor_of_trained(self.rows.hidden_RD)
            add_gathered_grad_weight_(grads.weight, grad, factor, self.ids, workspace_mib, dtype)
        if grads.bias.numel():
            flat = (self.ids.flatten(), grad.flatten())
            if grad.is_cuda:  # in the same order every time
                grads.bias.index_put_((flat[0],), flat[1], accumulate=True)
            else:
                grads.bias.index_add_(0, *flat)


def _workspace_mib(problem: Problem) -> int:
    return problem.workspace_mib or _WORKSPACE_MIB
