"""The K most likely ids of a teacher, against all logits."""

import pytest
import torch

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, top_logprob
from rlft_fast.ops.logprob import reference
from tests.ops.logprob.problems import BF16, F32, F64
from tests.support.numerics import assert_no_further_from_truth

T, D, V, K = 67, 24, 4099, 7


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": 0.8, "bias": True}], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_top_ids_against_all_logits(dtype, options):
    hidden, weight, target, *_ = make_inputs(T, D, V, dtype=dtype)
    target[::7] = -100
    options = {**options, "temperature": torch.linspace(0.5, 2, T)}
    if options.pop("bias", False):
        options["bias_V"] = torch.linspace(-1, 1, V)
    found = top_logprob(hidden, weight, target, K, workspace_mib=1, **options)  # two chunks of rows
    exact, plain = (
        reference.softmax_logits(hidden.to(x), weight.to(x), **options).log_softmax(-1).topk(K) for x in (F64, F32)
    )
    active = target != -100
    assert torch.equal(found.ids[active], exact.indices[active])
    assert_no_further_from_truth(found.ids_logprob[active], plain.values[active], exact.values[active])
    assert torch.equal(found.logprob, linear_logprob(hidden, weight, target, workspace_mib=1, **options).logprob)
    assert not found.ids[~active].any()
    assert not found.ids_logprob[~active].any()
    frozen, adapter = weight[:, :-4], weight[:, -4:]
    adapted = top_logprob(hidden, frozen, target, K, adapter_VE=adapter, **options)
    torch.testing.assert_close(adapted.ids_logprob, found.ids_logprob, rtol=1e-5, atol=1e-5)
