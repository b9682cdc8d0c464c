"""Reward models score whole sequences as transformers does; compiled blocks compute what plain ones do."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine
from tests.distributed import run_distributed
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch


@pytest.fixture(scope="module")
def reward_model(tiny_model):
    return tiny_model("llama-reward")


def plain_scores(folder, batch) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = batch.input_ids_T.split(batch.lengths.tolist())
    with torch.no_grad():
        return torch.cat([model(sequence[None]).logits[0] for sequence in sequences])


def make_scorer(folder, **config) -> FSDPEngine:
    return FSDPEngine(str(folder), EngineConfig(max_tokens=32, **config), head="score").initialize()


def test_scores_are_those_of_transformers(reward_model):
    batch = random_batch(9)
    torch.testing.assert_close(make_scorer(reward_model).score(batch), plain_scores(reward_model, batch))


def check_scores(rank: int, folder, expected) -> None:
    scores = make_scorer(folder, shard_size="auto").score(random_batch(9))
    torch.testing.assert_close(scores, torch.load(expected))


@pytest.mark.dist
def test_scores_on_two_processes(reward_model, tmp_path):
    torch.save(plain_scores(reward_model, random_batch(9)), tmp_path / "expected.pt")
    run_distributed(check_scores, 2, reward_model, tmp_path / "expected.pt")


def test_only_reward_models_score(reward_model, tiny_model):
    with pytest.raises(ValueError, match="a logprob head gives logprob, entropy, sum_prob_squared, not score"):
        make_engine(tiny_model("llama")).score(random_batch())
    with pytest.raises(ValueError, match=r"is LlamaForCausalLM .*: a reward model must be"):
        make_scorer(tiny_model("llama"))
    with pytest.raises(ValueError, match="reward model is only used here, not trained"):
        FSDPEngine(str(reward_model), EngineConfig(), head="score", num_training_steps=1).initialize()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [{}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}]
)
def test_compiled_blocks_compute_the_same(config, tiny_model):
    path = tiny_model("llama")
    plain = make_engine(path, max_tokens=24, config=config)
    compiled = make_engine(path, max_tokens=24, config=config | {"compile": True})
    metrics = [engine.train_step(random_batch(), policy_loss()) for engine in (plain, compiled)]
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-5)
    reference.assert_close(reference.gradients(compiled), reference.gradients(plain), 1e-4)
    logprob = [engine.infer(random_batch(), ("logprob",)) for engine in (plain, compiled)]
    reference.assert_close(logprob[1], logprob[0], 1e-4)
