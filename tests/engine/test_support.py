"""Log-probabilities and gradients over the tokens that each one was sampled among."""

import pytest
import torch

from rlft_fast.rl import PolicyLoss
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch, with_supports

TEMPERATURE = reference.TEMPERATURE


@pytest.fixture
def batch():
    return with_supports(random_batch())  # with prompts that are shared, and so rows that are asked for twice


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gemma2"])  # Gemma 2 soft-caps its logits
def test_statistics_and_gradient_are_those_of_masked_logits(tiny_model, batch, name):
    path = tiny_model(name)
    engine = make_engine(path, temperature=TEMPERATURE, max_tokens=48)
    found = engine.infer(batch, ("logprob", "entropy", "sum_prob_squared"))
    plain = reference.PlainPolicy(path, batch)
    torch.testing.assert_close(found["logprob"].double(), plain.logprob_T, rtol=0, atol=1e-4)
    torch.testing.assert_close(found["entropy"].double(), plain.entropy_T, rtol=0, atol=1e-4)
    wanted = reference.over_supports(plain.log_softmax_TV, batch).exp().square().sum(-1) * batch.loss_mask_T
    torch.testing.assert_close(found["sum_prob_squared"].double(), wanted, rtol=0, atol=1e-4)

    batch = near_policy(batch, plain.logprob_T.float())
    metrics = engine.train_step(batch, policy_loss())
    assert 0.05 < metrics["clip_share"] < 0.95
    reference.assert_close(reference.gradients(engine), plain.gradients(batch, "token-mean"), 2e-5)


# Fused with its loss, and apart from it; more than one micro-batch; an adapter on the head.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_first_step_is_exactly_on_policy(tiny_model, batch, loss, dtype):
    lora = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "lm_head"]}}
    engine = make_engine(tiny_model("llama"), temperature=TEMPERATURE, max_tokens=24, dtype=dtype, config=lora)
    for _ in range(2):  # an adapter starts at 0
        batch = batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
        assert engine.train_step(batch, PolicyLoss(loss=loss))["ratio_max"] == 1.0
