"""On-policy distillation: the teacher's log-probabilities, the advantage that they make, and what a run learns."""

import contextlib
import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlft_fast.config import ConfigError
from rlft_fast.data import Batch
from rlft_fast.errors import Checks
from rlft_fast.rl import grpo_advantage
from rlft_fast.trainer import PPOTrainer, check_inputs, train
from rlft_fast.trainer.inputs import make_objective
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model
from tests.trainer.ranks import train_in_process
from tests.trainer.toy import HERE, comparable, read_lines, toy_config

ALONE = {"algorithm__advantage": "none", "reward": {}}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def config_of(model, folder, teacher, **changes):
    changes = {"teacher__model": str(teacher), "teacher__max_tokens": 64} | changes
    return toy_config(model, folder, **changes)


def plain_logprob(model, batch: Batch, temperature: float) -> torch.Tensor:
    """(T,) of the next token, by transformers in float64; 0 where none was sampled."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    logprob_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        ids_L = batch.input_ids_T[start:end]
        with torch.no_grad():
            logits_LV = plain(input_ids=ids_L[None]).logits[0] / temperature
        logprob_T[start : end - 1] = logits_LV.log_softmax(-1)[:-1].gather(1, ids_L[1:, None]).squeeze(1)
    return logprob_T * batch.loss_mask_T


def collected(config):
    with contextlib.closing(PPOTrainer(config)) as trainer:
        trainer.start(0)
        return trainer.collect(0)


@pytest.mark.parametrize("advantage", ["none", "grpo"])
def test_a_token_is_taught_by_the_teachers_log_ratio(model, teacher, tmp_path, advantage):
    """Alone, and added to the advantage of the reward."""
    config = config_of(
        model, tmp_path, teacher, algorithm__advantage=advantage, teacher__weight=0.5, rollout__temperature=0.8
    )
    experience = collected(config)
    batch, metrics = experience.batch, experience.metrics
    ratio_T = plain_logprob(teacher, batch, 0.8) - plain_logprob(model, batch, 0.8)
    expected_T = 0.5 * ratio_T
    if advantage == "grpo":
        reward_B = grpo_advantage(batch.reward_B, batch.group_B)
        assert reward_B.abs().max() > 0.1
        expected_T += reward_B.repeat_interleave(batch.cu_seqlens.diff()) * batch.loss_mask_T
    torch.testing.assert_close(batch.advantage_T.double(), expected_T, rtol=1e-5, atol=1e-5)
    kl = -ratio_T[batch.loss_mask_T].mean().item()
    assert kl > 0.1
    assert metrics["teacher_kl"] == pytest.approx(kl, rel=1e-5)


def test_a_teacher_alone_teaches_of_samples_without_a_reward(model, teacher, tmp_path):
    """The reward is measured alone. Beside a reward, samples that have none are left out."""
    settings = {"reward__function": f"{HERE}:nothing", "log_tokens_mib": 1, "steps": 1}
    config = config_of(model, tmp_path, teacher, algorithm__advantage="none", **settings)
    with contextlib.closing(PPOTrainer(config)) as trainer:
        trainer.start(0)
        experience = trainer.collect(0)
        result = trainer.learn(experience)
    batch = experience.batch
    assert len(experience.taught) == 16
    ratio_T = plain_logprob(teacher, batch, 1.0) - plain_logprob(model, batch, 1.0)
    torch.testing.assert_close(batch.advantage_T.double(), ratio_T, rtol=1e-5, atol=1e-5)
    assert result.metrics["grad_norm"] > 0
    assert (result.metrics["left_out_share"], result.warnings) == (1.0, [])
    assert not len(collected(config_of(model, tmp_path, teacher, **settings)).taught)


def plain_divergence(policy, batch: Batch, likely: list[torch.Tensor], add_tail: bool) -> torch.Tensor:
    """0-d mean over the sampled tokens, by transformers in float64 from all logits."""
    losses = []
    for (start, end), ids_LK, log_q in zip(pairwise(batch.cu_seqlens.tolist()), *likely, strict=True):
        log_p = policy(input_ids=batch.input_ids_T[None, start:end]).logits[0].log_softmax(-1).gather(1, ids_LK)
        loss_L = (log_q.exp() * (log_q - log_p)).sum(-1)
        if add_tail:
            rest_q, rest_p = (1 - x.exp().sum(-1) for x in (log_q, log_p))
            loss_L = loss_L + rest_q * (rest_q / rest_p).log()
        losses.append(loss_L[batch.loss_mask_T[start:end]])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("add_tail", [True, False])
def test_a_token_is_taught_by_the_teachers_likely_ids(model, teacher, tmp_path, add_tail):
    """Loss and gradient of a step, by plain transformers in float64; a teacher pads its embeddings."""
    config = config_of(
        model, tmp_path, teacher, teacher__loss="topk", teacher__top_k=5, teacher__weight=0.5,
        teacher__add_tail=add_tail, actor__optimizer__max_grad_norm=None, **ALONE,
    )  # fmt: skip
    with contextlib.closing(PPOTrainer(config)) as trainer:
        trainer.start(0)
        experience = trainer.collect(0)
        metrics = trainer.learn(experience).metrics
    batch, likely = experience.batch, ([], [])
    plain = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        with torch.no_grad():
            found = plain(input_ids=batch.input_ids_T[None, start:end]).logits[0].log_softmax(-1).topk(5)
        is_sampled = batch.loss_mask_T[start:end]
        assert torch.equal(batch.teacher_ids_TK[start:end][is_sampled].long(), found.indices[is_sampled])
        likely[0].append(found.indices), likely[1].append(found.values)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    divergence = plain_divergence(policy, batch, likely, add_tail)
    (0.5 * divergence).backward()
    norm = torch.nn.utils.get_total_norm([x.grad for x in policy.parameters() if x.grad is not None])
    assert metrics["teacher_divergence"] == pytest.approx(divergence.item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * divergence.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ratio_T = plain_logprob(teacher, batch, 1.0) - plain_logprob(model, batch, 1.0)
    assert metrics["teacher_kl"] == pytest.approx(-ratio_T[batch.loss_mask_T].mean().item(), rel=1e-4)


@pytest.mark.slow
def test_a_taught_policy_learns_what_its_teacher_has_learned(model, tmp_path):
    """From the teacher alone: the rewards are measured, and one sample of a prompt is enough."""
    train(toy_config(model, tmp_path / "teacher", steps=16, rollout__samples_per_prompt=8))
    trained = tmp_path / "teacher" / "run" / "hf"
    train(
        config_of(
            model, tmp_path, trained, steps=16, algorithm__advantage="none", rollout__prompts_per_step=32,
            rollout__samples_per_prompt=1,
        )
    )  # fmt: skip
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if "teacher_kl" in row]
    reward, kl = ([row[name] for row in rows] for name in ("reward_mean", "teacher_kl"))
    assert sum(reward[-3:]) / 3 > 0.75 > 0.6 > sum(reward[:2]) / 2
    assert sum(kl[-3:]) < 0.5 * sum(kl[:3])
    assert all(row["ratio_max"] == 1.0 and row["seconds_teacher"] > 0 for row in rows)


def test_a_resumed_distillation_repeats_the_uninterrupted_run(model, teacher, tmp_path):
    for folder, stops in (("whole", (4,)), ("parts", (2, 4))):
        for steps in stops:
            config = config_of(model, tmp_path / folder, teacher, steps=steps, checkpoint__every=2, **ALONE)
            train(config, resume=steps == 4 and len(stops) == 2)
    whole, parts = (tmp_path / folder / "run" for folder in ("whole", "parts"))
    assert comparable(whole) == comparable(parts)
    weights = [(run / "hf" / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]


@pytest.mark.dist
def test_one_process_and_two_distil_the_same(model, teacher, tmp_path):
    for size in (1, 2):
        likely = {"teacher__loss": "topk", "teacher__top_k": 4}
        run_distributed(train_in_process, size, config_of(model, tmp_path / str(size), teacher, steps=2, **likely))
    one, two = (tmp_path / size / "run" for size in ("1", "2"))
    assert read_lines(one / "samples.jsonl") == read_lines(two / "samples.jsonl")
    for alone, shared in zip(comparable(one), comparable(two), strict=True):
        assert shared == pytest.approx(alone, rel=1e-3, abs=1e-5)  # log-probabilities of size 8 are rounded to 1e-6


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__advantage": "none"}, "none learns from a teacher alone: give a teacher section"),
        (
            {"teacher": {"model": "t"}, "algorithm": {"advantage": "none", "kl_coef": 0.1, "kl_in": "reward"}},
            "kl_in: reward has no effect with advantage: none",
        ),
        (
            {"teacher": {"model": "t"}, "algorithm": {"advantage": "none", "skip_equal_groups": True}},
            "skip_equal_groups prefers prompts whose samples differ in reward, but advantage: none learns from no",
        ),
        (
            {"teacher": {"model": "t"}, "algorithm": {"advantage": "none", "curriculum": 0.5}},
            "curriculum prefers prompts whose samples differ in reward, but advantage: none learns from no reward",
        ),
        ({"teacher": {"weight": 1.0}}, r"teacher\.model"),
        ({"teacher": {"model": "t", "max_tokens": 13}}, r"teacher\.max_tokens is 13, but a sequence may have 14"),
        ({"teacher": {"model": "t"}, "reward": {}}, "reward.function is needed"),
        (
            {"teacher": {"model": "t", "loss": "topk"}, "rollout__top_k": 4},
            "over the whole vocabulary, but rollout.top_k samples among a part of it",
        ),
        ({"cluster": {"teacher": {}}}, r"cluster\.teacher is given, but the run has no teacher of its own"),
    ],
)
def test_settings_that_do_not_go_together(model, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        toy_config(model, tmp_path, **changes)


def swap(file: dict) -> None:
    vocabulary = file["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def drop(file: dict) -> None:
    """Its last two tokens get other ids, too."""
    del file["model"]["vocab"]["a"]


@pytest.mark.parametrize(("change", "number"), [(swap, 2), (drop, 3)])
def test_a_teacher_of_another_tokenizer(model, tmp_path, change, number):
    """Whatever its name: a token has another id, or none."""
    folder = save_tiny_model("llama", tmp_path / "teacher")
    file = json.loads((folder / "tokenizer.json").read_text())
    change(file)
    (folder / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=rf"teacher\.model is .*, or none, for {number} of the .* tokens of model"):
        PPOTrainer(config_of(model, tmp_path, folder))
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_lacks_embeddings(model, tmp_path):
    """A dry run says so, too."""
    folder = save_tiny_model("llama", tmp_path / "teacher", vocab_size=60, pad_token_id=0)
    config, checks = config_of(model, tmp_path, folder), Checks()
    with pytest.raises(ValueError, match=r"teacher\.model has embeddings of 60 tokens, but model has embedd") as raised:
        PPOTrainer(config)
    check_inputs(config, checks)
    assert str(raised.value) in [*map(str, checks.found)]


def test_more_ids_than_the_teacher_has_tokens(model, teacher, tmp_path):
    with pytest.raises(ValueError, match=r"teacher\.top_k is 60000, but the teacher has \d+ tokens: lower it"):
        PPOTrainer(config_of(model, tmp_path, teacher, teacher__loss="topk", teacher__top_k=60_000))


def test_likely_ids_and_a_loss_of_whole_sequences(model, teacher, tmp_path):
    config = config_of(model, tmp_path, teacher, teacher__loss="topk", algorithm__policy_loss="gspo")
    with pytest.raises(ValueError, match="topk reads single tokens, but policy loss gspo reads whole sequences"):
        make_objective(config)


def test_a_missing_teacher(model, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path / 'nowhere'} does not exist"):
        PPOTrainer(config_of(model, tmp_path, tmp_path / "nowhere"))
