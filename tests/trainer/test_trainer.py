"""Whole runs of a tiny random model on a toy task: they learn, and their numbers are those of the equations."""

import contextlib
import json
import math
from itertools import pairwise
from string import ascii_letters

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft_fast.config import Config
from rlft_fast.data import Batch
from rlft_fast.trainer import PPOTrainer, train
from rlft_fast.trainer.collect import mini_batch_rows
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model
from tests.trainer.ranks import train_in_process
from tests.trainer.toy import HERE, WORDS, comparable, even_share, read_lines, toy_config, write_rows

GAE = {"algorithm__advantage": "gae", "critic": {"max_tokens": 64, "optimizer": {"learning_rate": 1e-2}}}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def grpo(model, tmp_path_factory):
    """Folder, configuration and summary of a GRPO run with evaluations."""
    folder = tmp_path_factory.mktemp("grpo")
    held_out = write_rows(folder / "held_out.jsonl", [{"prompt": word} for word in ("sea", "ice", "fog", "sand")])
    config = toy_config(
        model, folder, steps=16, rollout__samples_per_prompt=8, checkpoint__every=6,
        evaluation={"path": str(held_out), "max_new_tokens": 6, "every": 8},
    )  # fmt: skip
    return folder / "run", config, train(config)


@pytest.fixture(scope="module")
def ppo(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    train(toy_config(model, folder, steps=16, rollout__samples_per_prompt=8, **GAE))
    return folder / "run"


def rewards(run) -> list[float]:
    return [row["reward_mean"] for row in comparable(run) if "reward_mean" in row]


# ---- learning -------------------------------------------------------------------------------------------------------


def test_grpo_learns(grpo):
    run, _, summary = grpo
    assert abs(np.mean(rewards(run)[:2]) - 0.5) < 0.1
    assert np.mean(rewards(run)[-3:]) > 0.75
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2


def test_ppo_with_a_critic_learns(ppo):
    assert abs(np.mean(rewards(ppo)[:2]) - 0.5) < 0.1
    assert np.mean(rewards(ppo)[-3:]) > 0.75


def test_the_first_step_is_on_policy(grpo, ppo):
    for run in (grpo[0], ppo):
        first = next(row for row in comparable(run) if row["step"] == 1)
        assert first["ratio_max"] == 1.0
        assert first["approx_kl"] == 0.0
        assert first["clip_share"] == 0.0


def test_every_step_is_on_policy_with_one_mini_batch(grpo):
    steps = [row for row in comparable(grpo[0]) if "ratio_max" in row]
    assert {row["ratio_max"] for row in steps} == {1.0}
    assert all(row["mismatch_max"] < 1e-4 for row in steps)  # generation with a cache, in other shapes


def test_top_k_and_top_p_are_on_policy(model, tmp_path):
    """Over what was sampled among: the sampler's probabilities, the reference's, and those of every update."""
    config = toy_config(
        model, tmp_path, steps=2, rollout__top_k=12, rollout__top_p=0.9, rollout__temperature=0.8,
        algorithm={"advantage": "optimal-token", "kl_coef": 0.1, "rollout_correction": "token-truncate"},
    )  # fmt: skip
    train(config)
    rows = comparable(tmp_path / "run")
    assert {row["ratio_max"] for row in rows} == {1.0}
    assert all(row["mismatch_max"] < 1e-4 for row in rows)
    assert rows[0]["ref_kl"] == pytest.approx(0.0, abs=1e-9)
    assert all(0 < row["entropy"] < math.log(12) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_rollout_of_equal_groups_is_skipped(model, tmp_path):
    """Also where their lengths cost them different amounts."""
    config = toy_config(
        model, tmp_path, steps=1, reward__function=f"{HERE}:constant", algorithm__skip_equal_groups=True,
        algorithm__entropy_coef=0.1, reward__overlong_buffer=6, rollout__stop=tuple(ascii_letters),
    )  # fmt: skip
    train(config)
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert len({sample["reward"] for sample in samples[:4]}) > 1  # of one prompt
    (row,) = comparable(tmp_path / "run")
    assert row["zero_std_group_share"] == 1.0
    assert "loss" not in row  # no optimizer step at all, although the entropy bonus would have had a gradient
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "hf"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_truncation_penalty_is_for_training_only(model, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "sea"}])
    summary = train(
        toy_config(
            model, tmp_path, steps=1, reward__function=f"{HERE}:constant", reward__truncation_penalty=0.5,
            rollout__max_new_tokens=2, evaluation={"path": str(held_out), "max_new_tokens": 2},
        )
    )  # fmt: skip
    assert summary["accuracy_before"] == 0.25
    rows = read_lines(tmp_path / "run" / "samples.jsonl")
    assert {(row["finish_reason"], row["reward"]) for row in rows} == {("length", -0.25)}
    assert all(row["parts"] == {f"{HERE}:constant": 0.25, "length": -0.5} for row in rows)


def test_a_completion_is_decoded_once(model, tmp_path):
    """For its reward, and never again for the log or for the answers that are shown."""
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "sea"}, {"prompt": "ice"}])
    trainer = PPOTrainer(toy_config(model, tmp_path, evaluation={"path": str(held_out)}))
    tokenizer, decoded = trainer.tokenizer, []

    class Counting(type(tokenizer)):
        def _decode(self, token_ids, *args, **kwargs):
            decoded.append(text := super()._decode(token_ids, *args, **kwargs))
            return text

    tokenizer.__class__ = Counting
    with contextlib.closing(trainer):
        records = [*trainer.train_step(0).records]
        assert decoded == [record["completion"] for record in records]
        assert trainer.evaluate().examples == [text.strip() for text in decoded[len(records) :]]


def test_the_greedy_baseline_costs_its_length_too(model, tmp_path):
    changes = {
        "reward__function": f"{HERE}:constant",
        "reward__truncation_penalty": 0.5,
        "algorithm__advantage": "remax",
    }
    trainer = PPOTrainer(toy_config(model, tmp_path, rollout__max_new_tokens=2, **changes))
    prompts, collector = trainer.prompts.select([0, 1]), trainer.collector
    greedy = collector.greedy(prompts, 0, 0)
    assert greedy.reward_B.tolist() == [-0.25, -0.25]
    # And it ends where a sample would end.
    (before, *_) = greedy.token_ids()
    stop = (trainer.tokenizer.decode(before[:1]),)
    rollout = trainer.config.rollout.model_copy(update={"stop": stop})
    collector.config = trainer.config.model_copy(update={"rollout": rollout})
    after = collector.greedy(prompts, 0, 0)
    assert (len(before), after.token_ids()[0], after.stopped_B[0]) == (2, before[:1], True)


# ---- what a run leaves behind ---------------------------------------------------------------------------------------


def test_configuration_is_complete(grpo):
    run, config, _ = grpo
    assert Config.load(run / "config.yaml") == config


def test_metrics(grpo):
    rows = read_lines(grpo[0] / "metrics.jsonl")
    steps = [row for row in rows if "accuracy" not in row]
    assert [row["step"] for row in steps] == list(range(1, 17))
    assert [row["step"] for row in rows if "accuracy" in row] == [0, 8, 16]
    assert all(a["time"] <= b["time"] for a, b in pairwise(rows))
    assert len({frozenset(row) for row in steps}) == 1
    assert all(math.isfinite(value) for row in rows for value in row.values())
    parts = {"generate", "reward", "logprobs", "update", "sync"}
    assert {name.removeprefix("seconds_") for name in steps[0] if name.startswith("seconds_")} == parts
    assert all(row["seconds"] > sum(row[f"seconds_{part}"] for part in parts) > 0 for row in steps)
    assert all(0.1 < row[f"memory_gib_{part}"] < 10 for row in steps for part in parts)
    assert all(row["idle_share_generate"] == row["idle_share_reward"] == 0 for row in steps)  # a single process
    assert all(0 < row["tflops_update"] < 10 for row in steps)
    samples = read_lines(grpo[0] / "samples.jsonl")
    for row in steps:
        prompts = [sample["prompt"] for sample in samples if sample["step"] == row["step"]]
        num_tokens = sum(map(len, prompts)) + len(prompts) * row["completion_length_mean"]  # one for each letter
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(num_tokens)


def test_samples(grpo):
    rows = read_lines(grpo[0] / "samples.jsonl")
    assert {frozenset(row) for row in rows} == {
        frozenset(("step", "prompt", "completion", "reward", "parts", "finish_reason", "weight_version"))
    }  # fmt: skip
    assert all(row["parts"] == {f"{HERE}:even_share": row["reward"]} for row in rows)
    assert all(row["weight_version"] == row["step"] for row in rows)  # one sync before the first step
    by_step = [rows[i : i + 32] for i in range(0, len(rows), 32)]
    assert [{row["step"] for row in step} for step in by_step] == [{i} for i in range(1, 17)]
    assert [np.mean([row["reward"] for row in step]) for step in by_step] == pytest.approx(rewards(grpo[0]), abs=1e-6)
    # 10 prompts, 4 a step: 5 steps are two passes.
    visits = [row["prompt"] for row in rows[: 5 * 32 : 8]]
    assert sorted(visits[:10]) == sorted(visits[10:]) == sorted(WORDS)


def test_summary(grpo):
    run, _, returned = grpo
    summary = json.loads((run / "summary.json").read_text())
    assert summary == returned
    assert set(summary) == {"accuracy_before", "accuracy_after", "steps", "minutes", "tokens_per_second"}
    accuracies = [row["accuracy"] for row in comparable(run) if "accuracy" in row]
    assert [summary["accuracy_before"], summary["accuracy_after"]] == [accuracies[0], accuracies[-1]]
    assert summary["steps"] == 16
    steps = [row for row in read_lines(run / "metrics.jsonl") if "seconds" in row]
    seconds = sum(row["seconds"] for row in steps)
    assert summary["minutes"] == pytest.approx(seconds / 60, abs=1e-3)
    num_tokens = sum(row["seconds"] * row["tokens_per_second"] for row in steps)
    assert summary["tokens_per_second"] == pytest.approx(num_tokens / seconds, abs=0.1)


def test_plain_transformers_loads_the_export_and_scores_the_same(grpo):
    run, _, summary = grpo
    model, tokenizer = (cls.from_pretrained(run / "hf") for cls in (AutoModelForCausalLM, AutoTokenizer))
    completions = []
    for row in read_lines(run.parent / "held_out.jsonl"):
        prompt = tokenizer(row["prompt"], return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        completions.append(output[0, prompt.input_ids.shape[1] :].tolist())
    assert np.mean(even_share(completions)) == pytest.approx(summary["accuracy_after"])


def test_checkpoints(grpo):
    run = grpo[0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000012", "step_00000016"]


# ---- the terms of the loss ------------------------------------------------------------------------------------------


def short_run(model, folder, **changes) -> list[dict]:
    train(toy_config(model, folder, **({"steps": 4} | changes)))
    return comparable(folder / "run")


@pytest.fixture
def moved(model, tmp_path):
    """Makes a trainer whose policy is no longer the model that it began with, and so differs from the reference."""

    def make(**changes) -> PPOTrainer:
        trainer = PPOTrainer(toy_config(model, tmp_path, **changes))
        with torch.no_grad():
            for weight in trainer.actor.model.parameters():
                weight.mul_(1.1)
        trainer.start(0)
        return trainer

    return make


def plain_logprob(model, batch: Batch) -> torch.Tensor:
    """(T,) of the next token, by transformers in float64; 0 where none was sampled."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    logprob_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        ids_L = batch.input_ids_T[start:end]
        with torch.no_grad():
            logits_LV = plain(input_ids=ids_L[None].long()).logits[0]
        logprob_T[start : end - 1] = logits_LV.log_softmax(-1)[:-1].gather(1, ids_L[1:, None].long()).squeeze(1)
    return logprob_T * batch.loss_mask_T


def test_kl_in_the_loss(model, moved):
    trainer = moved(algorithm__kl_coef=3.0)
    experience = trainer.collect(0)
    metrics, batch = trainer.learn(experience).metrics, experience.batch
    ref_logprob_T = plain_logprob(model, batch)
    torch.testing.assert_close(batch.ref_logprob_T.double() * batch.loss_mask_T, ref_logprob_T, rtol=0, atol=1e-5)
    ratio_T = (ref_logprob_T - batch.rollout_logprob_T.double())[batch.loss_mask_T]
    kl = (ratio_T.exp() - ratio_T - 1).mean().item()  # k3
    assert kl > 1e-4
    assert metrics["ref_kl"] == pytest.approx(kl, rel=1e-2)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 3.0 * metrics["ref_kl"], abs=1e-6)


def test_kl_in_the_reward(model, moved):
    """A token is paid for by log π(old) - log π(ref), and the last one gets the answer's reward."""
    options = {"algorithm__kl_in": "reward", "algorithm__kl_estimator": "k1", "algorithm__kl_coef": 3.0}
    trainer = moved(**GAE, **options)
    experience = trainer.collect(0)
    batch = experience.batch
    assert experience.metrics["mismatch_max"] < 1e-4
    log_ratio_T = batch.rollout_logprob_T.double() * batch.loss_mask_T - plain_logprob(model, batch)
    assert log_ratio_T.abs().max() > 1e-2
    expected_T = -3.0 * log_ratio_T
    expected_T[batch.cu_seqlens[1:] - 2] += experience.taught.reward_B
    torch.testing.assert_close(batch.reward_T.double() * batch.loss_mask_T, expected_T, rtol=0, atol=5e-4)
    metrics = trainer.learn(experience).metrics
    assert metrics["loss"] == metrics["policy_loss"]


def test_entropy_bonus(moved):
    trainer = moved(algorithm__entropy_coef=0.5)
    row = trainer.train_step(0).metrics
    assert 3 < row["entropy"] < math.log(trainer.actor.facts.num_embeddings)
    assert row["loss"] == pytest.approx(row["policy_loss"] - 0.5 * row["entropy"], abs=1e-5)


def test_epochs_and_mini_batches(model, tmp_path):
    trainer = PPOTrainer(toy_config(model, tmp_path, algorithm__epochs=2, algorithm__mini_batches=2))
    trainer.start(0)
    row = trainer.train_step(0).metrics
    assert trainer.actor.step == 4
    assert row["ratio_max"] > 1.0
    assert row["approx_kl"] > 0.0
    assert row["skipped_steps"] == 0


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A model that ends its completions at very different lengths."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("uneven") / "model", eos_token_id=[256, *range(60)])


# In the first step every ratio is 1, so the loss of a token is minus its advantage; the reward tells the length.
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_aggregation(aggregation, uneven, tmp_path):
    function = f"{HERE}:length"
    row = short_run(uneven, tmp_path, steps=1, reward__function=function, algorithm__aggregation=aggregation)[0]
    reward_B = np.array([sample["reward"] for sample in read_lines(tmp_path / "run" / "samples.jsonl")])
    length_B = np.rint(10 * reward_B)
    assert len(set(length_B)) > 2
    reward_GN = reward_B.reshape(4, 4)
    std_G = reward_GN.std(axis=1, ddof=1, keepdims=True)
    advantage_B = ((reward_GN - reward_GN.mean(axis=1, keepdims=True)) / (std_G + 1e-6)).flatten()
    weight_B = length_B / length_B.sum() if aggregation == "token-mean" else np.full(16, 1 / 16)
    assert row["policy_loss"] == pytest.approx(-(weight_B * advantage_B).sum(), abs=1e-5)
    assert row["completion_length_mean"] == pytest.approx(length_B.mean())


def test_the_critic_learns_alone_at_first(model, tmp_path):
    """The policy keeps its bits and the penalty its weight, then both move. The policy's warm-up begins then."""
    critic = GAE["critic"] | {"freeze_actor_steps": 1}
    penalty = {"algorithm__kl_coef": 0.1, "algorithm__kl_target": 0.01, "algorithm__kl_horizon": 100}
    schedule = {"actor__optimizer__schedule": "linear", "actor__optimizer__warmup_steps": 2}
    trainer = PPOTrainer(toy_config(model, tmp_path, **GAE | penalty | schedule | {"critic": critic}))
    weights = {name: [p.detach().clone() for p in x.model.parameters()] for name, x in trainer.models.trained.items()}

    def changed(name: str) -> bool:
        now = trainer.models.trained[name].model.parameters()
        return not all(torch.equal(*pair) for pair in zip(now, weights[name], strict=True))

    experience = trainer.collect(0)
    metrics = trainer.learn(experience).metrics
    assert (changed("actor"), changed("critic")) == (False, True)
    ran = metrics["tflops_update"] * 1e12 * metrics["seconds_update"] / trainer.config.algorithm.epochs
    assert ran == pytest.approx(trainer.critic.facts.flops.of(experience.batch.unweighted()))
    assert "critic_value_loss" in metrics
    assert "grad_norm" not in metrics
    assert metrics["kl_coef"] == 0.1
    metrics = trainer.train_step(1).metrics
    assert "grad_norm" in metrics
    assert metrics["kl_coef"] != 0.1
    assert metrics["learning_rate"] == pytest.approx(1e-2 / 2)
    assert trainer.actor.num_training_steps == 2  # of three
    assert changed("actor")
    trainer.close()


def test_a_new_critic_expects_nothing(model, tmp_path):
    row = short_run(model, tmp_path, steps=1, **GAE, algorithm__lam=1.0)[0]
    reward_B = np.array([sample["reward"] for sample in read_lines(tmp_path / "run" / "samples.jsonl")])
    assert row["completion_length_mean"] == 6.0  # so that sequences weigh alike
    assert row["critic_value_loss"] == pytest.approx(0.5 * np.square(reward_B).mean(), rel=1e-5)
    assert row["critic_explained_variance"] == pytest.approx(0.0, abs=1e-5)


def test_the_explained_variance_is_that_of_all_returns(model, tmp_path):
    """In the mini-batches it is another number, and unknown in one whose returns are equal."""
    critic = GAE["critic"] | {"optimizer": {"learning_rate": 1e-12}}
    options = {"reward__function": f"{HERE}:mostly_even", "algorithm__lam": 1.0, "algorithm__mini_batches": 8}
    trainer = PPOTrainer(toy_config(model, tmp_path, **GAE | options | {"critic": critic}))
    torch.nn.init.normal_(trainer.critic.model.head.weight, std=0.02)
    trainer.start(0)
    experience = trainer.collect(0)
    batch = experience.batch
    return_N, value_N = (x[batch.loss_mask_T].double() for x in (batch.return_T, batch.value_T))
    assert len(return_N) == 16 * 6  # mini-batches have the same number of tokens
    parts = [batch.select(rows) for rows in mini_batch_rows(batch, trainer.config.algorithm, seed=0)]
    assert any(part.return_T[part.loss_mask_T].unique().numel() == 1 for part in parts)
    expected = 1 - (return_N - value_N).var(correction=0) / return_N.var(correction=0)
    found = trainer.learn(experience).metrics["critic_explained_variance"]
    assert found == pytest.approx(expected.item(), abs=1e-4)
    trainer.close()


def test_a_critic_with_fewer_embeddings_reads_its_last_token(model, tmp_path):
    """In place of tokens that no text has, which the policy may sample all the same."""
    folder = save_tiny_model("llama", tmp_path / "critic", vocab_size=128, pad_token_id=0, num_hidden_layers=1)
    critic = GAE["critic"] | {"model": str(folder)}
    trainer = PPOTrainer(toy_config(model, tmp_path, **GAE | {"critic": critic}))
    torch.nn.init.normal_(trainer.critic.model.head.weight)
    trainer.start(0)
    batch = trainer.collect(0).batch
    known = batch.replace(input_ids_T=batch.input_ids_T.clamp(max=127))
    assert not torch.equal(known.input_ids_T, batch.input_ids_T)
    torch.testing.assert_close(batch.value_T, trainer.critic.infer(known, ("value",))["value"])
    assert trainer.train_step(0).metrics["critic_grad_norm"] > 0
    trainer.close()


def test_seeds(model, tmp_path):
    runs = [short_run(model, tmp_path / str(i), steps=1, seed=seed) for i, seed in enumerate((1, 1, 10**15))]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


BY_ROUNDING = {
    "refills": {
        "algorithm": {"skip_equal_groups": True, "max_refills": 2, "mini_batches": 2},
        "reward__function": f"{HERE}:even_share_of_some", "reward__normalize": "standardize",
    },
    "curriculum": {
        "algorithm": {"skip_equal_groups": True, "max_refills": 1, "curriculum": 0.5, "first_samples": 2},
        "reward__function": f"{HERE}:mostly_even",
    },
    # Its penalty has a kink where π is π_old.
    "kl-cov": {
        "algorithm": {"policy_loss": "kl-cov", "mini_batches": 2, "kl_coef": 0.1},
        "rollout__prompts_per_step": 8, "seed": 3,
    },
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ROUNDING)
def test_the_number_of_processes_changes_a_run_by_rounding(name, model, tmp_path):
    """The same samples in the same order, whichever process drew them, also in refills; close numbers."""
    changes = BY_ROUNDING[name]
    for size in (1, 2):
        run_distributed(train_in_process, size, toy_config(model, tmp_path / str(size), steps=3, **changes))
    one, two = (tmp_path / size / "run" for size in ("1", "2"))
    assert read_lines(one / "samples.jsonl") == read_lines(two / "samples.jsonl")
    for alone, shared in zip(comparable(one), comparable(two), strict=True):
        assert shared == pytest.approx(alone, rel=1e-3, abs=1e-5)


def test_bfloat16(model, tmp_path):
    (row,) = short_run(model, tmp_path, steps=1, actor__compute_dtype="bfloat16")
    assert row["ratio_max"] == 1.0
    assert row["grad_norm"] > 0
    assert row["skipped_steps"] == 0


def test_adapters_have_the_policy_itself_as_reference(model, tmp_path):
    """The divergence is measured from the policy without its adapters: 0 at first, more when they have learned."""
    options = {"actor__lora": {"rank": 8}, "algorithm__kl_coef": 0.01, "actor__optimizer": {"learning_rate": 0.02}}
    trainer = PPOTrainer(toy_config(model, tmp_path, **options))
    trainer.start(0)
    assert abs(trainer.train_step(0).metrics["ref_kl"]) < 1e-6
    experience = trainer.collect(1)
    batch = experience.batch
    expected_T = plain_logprob(model, batch)
    torch.testing.assert_close(batch.ref_logprob_T.double() * batch.loss_mask_T, expected_T, rtol=0, atol=1e-5)
    assert trainer.learn(experience).metrics["ref_kl"] > 1e-5


def test_a_reference_of_its_own(model, tmp_path):
    """Held in other dtypes it gives the same penalty up to their rounding, and that of the same dtypes is 0."""
    plain, narrow = (
        short_run(model, tmp_path / name, steps=1, algorithm__kl_coef=0.1, **options)[0]["ref_kl"]
        for name, options in (
            ("a", {}),
            ("b", {"reference": {"compute_dtype": "bfloat16", "param_dtype": "bfloat16", "max_tokens": 64}}),
        )
    )
    assert plain == 0.0
    assert 0 < narrow < 2e-2
