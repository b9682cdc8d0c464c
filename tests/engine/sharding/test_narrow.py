"""bfloat16 of one process without FSDP: the numbers of FSDP, and parameters that are their own between passes."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from rlft_fast.engine.sharding import build
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch

CONFIGS = {
    "mixed": {},
    "pure": {"param_dtype": "bfloat16"},
    "recomputed": {"activation_checkpointing": "full"},
    "lora": {"lora": {"rank": 4}},
}


def run(path, config):
    """Two steps of two micro-batches or more, inference between two parts of the second one."""
    torch.manual_seed(0)  # adapters
    engine = make_engine(path, max_tokens=48, dtype="bfloat16", config=config)
    first = engine.train_step(random_batch(), policy_loss())
    engine.zero_grad()
    engine.forward_backward(random_batch(seed=1), policy_loss(), is_last=False)
    inferred = engine.infer(random_batch(seed=2), ("logprob",))["logprob"]
    engine.forward_backward(random_batch(seed=2), policy_loss())
    return engine, [first, engine.optimizer_step(), {"logprob": inferred.sum().item()}]


# Each configuration with one of the models; the other pairs are slow.
PAIRS = [("qwen2-tied", "mixed"), ("llama", "pure"), ("llama", "recomputed"), ("qwen2-tied", "lora")]
OTHERS = [("llama", "mixed"), ("qwen2-tied", "pure"), ("qwen2-tied", "recomputed"), ("llama", "lora")]


@pytest.mark.parametrize(
    ("model", "name"), [*PAIRS, *(pytest.param(*pair, marks=[pytest.mark.slow, pytest.mark.long]) for pair in OTHERS)]
)
def test_the_bits_are_those_of_fsdp(model, name, tiny_model, monkeypatch):
    narrow, found = run(tiny_model(model), CONFIGS[name])
    monkeypatch.setattr(build, "is_wrapped", lambda *_: True)
    wrapped, expected = run(tiny_model(model), CONFIGS[name])
    assert [isinstance(each.model, FSDPModule) for each in (narrow, wrapped)] == [False, True]
    assert found == expected
    states = [reference.state_of({"actor": each}) for each in (narrow, wrapped)]
    reference.assert_equal(*states)


def test_parameters_are_their_own_between_passes(tiny_model):
    engine = make_engine(tiny_model("llama"), dtype="bfloat16")
    before = reference.weights(engine)
    with pytest.raises(ValueError, match="old_logprob_T"):
        engine.train_step(random_batch().replace(old_logprob_T=None), policy_loss())
    engine.infer(random_batch(), ("logprob",))
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    reference.assert_equal(reference.weights(engine), before)
    engine.forward_backward(random_batch(), policy_loss())
    engine.zero_grad()  # the sums, too
    metrics = [engine.train_step(random_batch(), policy_loss())]
    again = make_engine(tiny_model("llama"), dtype="bfloat16")
    metrics.append(again.train_step(random_batch(), policy_loss()))
    assert metrics[0] == metrics[1]
    assert all(parameter.grad is None for parameter in engine.model.parameters())
