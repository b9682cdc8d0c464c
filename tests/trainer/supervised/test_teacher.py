"""Distillation over a fixed data set: the loss of a step by plain transformers, and what a run learns."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlft_fast.config import ConfigError
from rlft_fast.errors import Checks
from rlft_fast.rl import top_k_divergence
from rlft_fast.trainer import RowsTrainer, check_inputs, train
from tests.support.tiny_models import save_tiny_model
from tests.trainer.supervised.rows import assert_two_learn_what_one_learns, encode, sft_config, texts
from tests.trainer.toy import comparable, read_lines


def plain_logprobs(model, row: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """(K taught tokens of a row, their log-probabilities over the vocabulary)."""
    completion = torch.tensor([*encode(row["completion"]), 256])
    tokens = torch.cat([torch.tensor(encode(row["prompt"])), completion])
    return completion, model(tokens[None]).logits[0].log_softmax(-1)[-len(completion) - 1 : -1]


@pytest.mark.parametrize("options", [{}, {"actor__lora": {"rank": 2}}], ids=["whole", "lora"])
def test_the_first_step_is_that_of_plain_transformers(tiny_model, teacher, tmp_path, options):
    config = sft_config(
        tiny_model("llama"), tmp_path, batch_size=20, actor__optimizer__max_grad_norm=None, teacher__model=str(teacher),
        teacher__top_k=6, teacher__weight=2.0, teacher__cross_entropy_weight=0.5, **options,
    )  # fmt: skip
    metrics = RowsTrainer(config).train_step(0).metrics
    plain = {
        path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        for path in (config.model, config.teacher.model)
    }
    entropies, divergences = [], []
    for row in texts(20):
        taught, log_p = plain_logprobs(plain[config.model], row)
        log_q, ids = plain_logprobs(plain[config.teacher.model], row)[1].detach().topk(6)
        entropies.append(-log_p.gather(1, taught[:, None])[:, 0])
        of_ids = log_p.gather(1, ids)
        rest_q, rest_p = 1 - log_q.exp().sum(1), 1 - of_ids.exp().sum(1)
        divergences.append((log_q.exp() * (log_q - of_ids)).sum(1) + rest_q * (rest_q / rest_p).log())
    cross_entropy, divergence = torch.cat(entropies).mean(), torch.cat(divergences).mean()
    loss = 0.5 * cross_entropy + 2 * divergence
    assert metrics["train_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["cross_entropy"] == pytest.approx(cross_entropy.item(), rel=1e-4)
    assert metrics["teacher_divergence"] == pytest.approx(divergence.item(), rel=1e-4)
    if not options:
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain[config.model].parameters()])
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_learn_what_one_learns(tiny_model, teacher, tmp_path):
    """A large eps makes the step nearly proportional to the gradient, which shows how far gradients are apart."""
    options = {"actor__optimizer__eps": 1.0, "teacher__model": str(teacher), "teacher__weight": 2.0}
    configs = [sft_config(tiny_model("llama"), tmp_path / name, **options) for name in ("one", "two")]
    assert_two_learn_what_one_learns(configs, least_movement=1e-3, tolerance=1e-5)


def test_a_run_learns_from_its_teacher_and_resumes_with_the_same_bits(tiny_model, teacher, tmp_path):
    options = {"teacher__model": str(teacher), "teacher__cross_entropy_weight": 0.0, "steps": 4}
    train(sft_config(tiny_model("llama"), tmp_path / "whole", **options))
    for steps in (2, 4):
        train(sft_config(tiny_model("llama"), tmp_path / "parts", **options | {"steps": steps}), resume=steps == 4)
    whole, parts = (tmp_path / name / "run" for name in ("whole", "parts"))
    assert comparable(whole) == comparable(parts)
    divergences = [row["teacher_divergence"] for row in read_lines(whole / "metrics.jsonl") if "train_loss" in row]
    assert divergences[-1] < divergences[0]


def test_the_rest_of_the_ids_and_ids_that_are_none():
    """A distribution over two tokens, of which the teacher names one; another id is none."""
    log_q = torch.tensor([[0.25, 0.0]]).log()
    log_p = torch.tensor([[0.5, 0.3]]).log().requires_grad_()
    loss = top_k_divergence(log_p, log_q)
    assert loss.item() == pytest.approx(torch.distributions.kl_divergence(*map(_coin, (0.25, 0.5))).item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), log_p)
    # d/d log p of -q log p - (1 - q) log(1 - p)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25 + 0.75 * 0.5 / 0.5, 0.0]]))
    certain = top_k_divergence(torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1))
    assert certain.item() == 0


def _coin(p: float) -> torch.distributions.Bernoulli:
    return torch.distributions.Bernoulli(torch.tensor(p))


def test_a_row_that_the_teacher_cannot_take(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"teacher\.max_tokens is 8, but a row may have \d+ tokens"):
        sft_config(tiny_model("llama"), tmp_path, teacher__model="t", teacher__max_tokens=8)


def test_a_teacher_that_lacks_embeddings(tiny_model, tmp_path):
    """A dry run says so, too."""
    folder = save_tiny_model("llama", tmp_path / "teacher", vocab_size=60, pad_token_id=0)
    config, checks = sft_config(tiny_model("llama"), tmp_path, teacher__model=str(folder)), Checks()
    with pytest.raises(ValueError, match=r"teacher\.model has embeddings of 60 tokens, but model has embedd") as raised:
        RowsTrainer(config)
    check_inputs(config, checks)
    assert str(raised.value) in [*map(str, checks.found)]
