"""Reward models score whole sequences as transformers does, and train; compiled blocks compute what plain ones do."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification

from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import EOS_TOKEN_ID, save_tiny_model


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


def test_scores_where_the_end_of_a_text_is_padding_are_those_of_transformers(tmp_path):
    """TRL trains the model of a tokenizer without a token for padding so."""
    folder = save_tiny_model("llama-reward", tmp_path, pad_token_id=EOS_TOKEN_ID)
    ids = [[5, 6, EOS_TOKEN_ID], [5, 6], [5, EOS_TOKEN_ID, 7, EOS_TOKEN_ID, EOS_TOKEN_ID], [EOS_TOKEN_ID] * 2]
    batch = Batch.from_samples(ids, [[]] * len(ids))
    scores, expected = make_scorer(folder).score(batch), plain_scores(folder, batch)
    torch.testing.assert_close(scores, expected)
    assert scores[0] == pytest.approx(scores[1].item())


def check_scores_and_training(rank: int, folder, expected) -> None:
    scores = make_scorer(folder, shard_size="auto").score(random_batch(9))
    tensors = load_file(expected)
    torch.testing.assert_close(scores, tensors["scores"])
    check_training(folder, tensors)


@pytest.mark.dist
def test_two_processes(reward_model, tmp_path):
    tensors = {"scores": plain_scores(reward_model, random_batch(9)), **plain_training(reward_model, labelled_batch())}
    save_file(tensors, tmp_path / "expected.safetensors")
    run_distributed(check_scores_and_training, 2, reward_model, tmp_path / "expected.safetensors")


def test_only_reward_models_score(reward_model, tiny_model):
    with pytest.raises(ValueError, match=r"a logprob head gives logprob, .*, not score"):
        make_engine(tiny_model("llama")).score(random_batch())
    with pytest.raises(ValueError, match=r"is LlamaForCausalLM .*: a reward model must be"):
        make_scorer(tiny_model("llama"))


class LogisticLoss:
    """-log sigmoid(±score) at every active position, a Loss of one's own."""

    aggregation, max_response_tokens = "token-mean", None
    fields, needs_sequences = ("reward_T", "loss_weight_T"), False

    def per_token(self, fields):
        loss_T = binary_cross_entropy_with_logits(fields["score_T"], fields["reward_T"], reduction="none")
        return fields["loss_weight_T"] * loss_T

    def metrics(self, fields):
        is_right_T = (fields["score_T"] > 0) == (fields["reward_T"] > 0)
        return {"accuracy": (fields["loss_weight_T"] * is_right_T).sum()}


def labelled_batch() -> Batch:
    batch = random_batch(9)
    return batch.replace(reward_T=(batch.input_ids_T % 2).float())


def plain_training(folder, batch) -> dict[str, torch.Tensor]:
    """Loss, accuracy and gradients by transformers and autograd."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = batch.input_ids_T.split(batch.lengths.tolist())
    hidden_T = torch.cat([model.model(sequence[None]).last_hidden_state[0] for sequence in sequences])
    score_A, right_A = model.score(hidden_T).squeeze(-1)[batch.loss_mask_T], batch.reward_T[batch.loss_mask_T]
    loss = binary_cross_entropy_with_logits(score_A, right_A)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "accuracy": ((score_A > 0) == (right_A > 0)).float().mean(), **gradients}


def check_training(folder, expected) -> None:
    engine = make_engine(folder, head="score", max_tokens=32)
    metrics = engine.train_step(labelled_batch(), LogisticLoss())
    gradients = {name.removeprefix("model."): value for name, value in reference.gradients(engine).items()}
    assert metrics["loss"] == pytest.approx(expected["loss"].item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(expected["accuracy"].item(), rel=1e-5)
    for name in ("score.weight", "model.layers.0.mlp.up_proj.weight"):
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-6)


def test_reward_models_train_as_autograd_says(reward_model):
    check_training(reward_model, plain_training(reward_model, labelled_batch()))


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
