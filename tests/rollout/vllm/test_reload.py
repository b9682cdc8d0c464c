"""What a reload of vLLM may leave as it was; without vLLM."""

import pytest
import torch
from torch import nn

from rlft_fast.rollout.vllm.reload import Reload


def test_weights_that_are_still_random_are_named():
    """A reload may give a weight another dtype, which torch does not compare with the one before."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    reload = Reload(model, is_first=True)
    model.weight = nn.Parameter(torch.ones(2, 3).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"vLLM did not get all weights of its model: bias$"):
        reload.require_all()
    model.bias = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    reload.require_all()
