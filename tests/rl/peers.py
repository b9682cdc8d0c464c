"""What the comparisons with verl, OpenRLHF and TRL share: rollouts in their layout and in ours, and access to them."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support.flash_attn import flash_attn_without_cuda

MARKS = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("verl", "openrlhf"))), reason="no verl, no OpenRLHF: make test-peers"
    ),
]

# By our name, verl's.
AGGREGATIONS = {
    "token-mean": "token-mean",
    "sequence-mean": "seq-mean-token-mean",
    "sequence-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
    "token-sum": "token-sum",
}


def import_openrlhf(name: str) -> ModuleType:
    """A module of OpenRLHF, where there is neither flash_attn nor vLLM."""
    launcher = ModuleType("openrlhf.trainer.ray.launcher")  # starts processes, with vLLM among them
    launcher.RayActorGroup = None
    with pytest.MonkeyPatch.context() as patch:
        for module in (*flash_attn_without_cuda(), ModuleType("openrlhf.trainer.ray"), launcher):
            patch.setitem(sys.modules, module.__name__, module)
        return importlib.import_module(f"openrlhf.{name}")


def value_and_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    leaf = at.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


class Rollout:
    """Responses of other lengths, one of them empty, with holes where a tool answered.

    Args:
        seed: of everything random.
        sizes: samples of each prompt; the rewards of the first prompt's are all 0.
        holes: whether there are masked tokens within responses.
    """

    def __init__(self, seed: int, sizes: tuple[int, ...] = (3, 4, 2), holes: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        batch, columns = sum(sizes), 9
        group_B = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        length_B = torch.randint(2, columns + 1, (batch,), generator=self.generator)
        length_B[-1] = 0
        self.mask = torch.arange(columns) < length_B[:, None]
        if holes:
            self.mask &= torch.rand(self.mask.shape, generator=self.generator) < 0.8
        order = torch.randperm(batch, generator=self.generator)
        self.mask, self.group = self.mask[order], group_B[order]
        self.reward = self.normal(batch).where(self.group > 0, 0.0)
        # Packed are prompts of 1 to 3 tokens, the columns, and a last token that predicts nothing.
        sequences = [
            [-1] * (1 + b % 3) + list(range(b * columns, (b + 1) * columns))[: int(row.nonzero().max()) + 1] + [-1]
            if row.any()
            else [-1] * (2 + b % 3)
            for b, row in enumerate(self.mask)
        ]
        self.cu_seqlens = torch.tensor([0, *map(len, sequences)]).cumsum(0).int()
        self._column_T = torch.tensor([column for sequence in sequences for column in sequence])
        self.mask_T = (self._column_T >= 0) & self.mask.flatten()[self._column_T]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape or self.mask.shape, generator=self.generator, dtype=torch.float64)

    def logprobs(self, distance: float = 0.5) -> tuple[Tensor, Tensor]:
        """Two policies' log-probabilities."""
        logprob = -3 + self.normal()
        return logprob, logprob + distance * self.normal()

    def pack(self, values: Tensor) -> Tensor:
        """(B, S) to (T,), NaN where nothing was sampled: nobody may read it."""
        return values.flatten()[self._column_T].where(self.mask_T, torch.nan)

    def unpack(self, values_T: Tensor) -> Tensor:
        """(T,) to (B, S), 0 outside the mask."""
        padded = values_T.new_zeros(self.mask.numel())
        padded[self._column_T[self.mask_T]] = values_T[self.mask_T]
        return padded.view(self.mask.shape)
