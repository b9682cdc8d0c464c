"""From a rollout to what is learned: every method runs and learns, and its numbers are those of its equations."""

import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlft_fast.config import AlgorithmConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.trainer import PPOTrainer, Run, train
from rlft_fast.trainer.learn.objective import Objective
from tests.trainer.toy import HERE, comparable, read_lines, toy_config, write_rows

OWN = HERE.with_name("my_methods.py")
MISMATCH = ("mismatch_mean", "mismatch_max", "mismatch_k1", "mismatch_k3", "effective_sample_share")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("shallow")


def make_batch() -> Batch:
    """Two prompts with two samples each, of two tokens, sampled at ratios of 1, 2, 4 and 1/8 to the policy."""
    rollout = [[-1.0, -1.0]] * 4
    batch = Batch.from_samples(
        [[1]] * 4, [[2, 3]] * 4, rewards=[1.0, 0.0, 1.0, 0.0], groups=[0, 0, 1, 1], rollout_logprobs=rollout
    )
    ratio_T = torch.tensor([1.0, 1, 1, 2, 1, 1, 1, 4, 1, 1, 0.125, 1])
    return batch.replace(old_logprob_T=(batch.rollout_logprob_T + ratio_T.log()) * batch.loss_mask_T)


def advantages(batch: Batch, **options) -> list[float]:
    prepared = Objective(AlgorithmConfig(advantage="dr-grpo", **options), max_new_tokens=2).prepare(batch)
    return prepared.advantage_T[batch.loss_mask_T].tolist()


def test_corrections_are_factors_on_the_advantage():
    plain = [0.5, 0.5, -0.5, -0.5, 0.5, 0.5, -0.5, -0.5]
    assert advantages(make_batch()) == plain
    assert advantages(make_batch(), rollout_correction="bypass") == plain
    weights = [1, 1, 2, 1, 1, 2, 1, 0.125]
    expected = [a * w for a, w in zip(plain, weights, strict=True)]
    assert advantages(make_batch(), rollout_correction="token-truncate") == pytest.approx(expected)
    masked = advantages(make_batch(), rollout_correction="token-mask", correction_low=0.1, correction_high=2.0)
    assert masked == pytest.approx([0.5, 0.5, -1, -0.5, 0.5, 0, -0.5, -0.0625])


def test_learning_from_uncertain_tokens_alone():
    batch = make_batch()
    batch = batch.replace(entropy_T=torch.arange(12.0))
    learned = advantages(batch, high_entropy_share=0.5)
    assert learned == [0, 0, 0, 0, 0.5, 0.5, -0.5, -0.5]


def test_covariance_losses_select_tokens():
    """Log-ratios have mean 0, so the covariance of ln 4 is 0.5 ln 4 = 0.69, and that of -ln 8 is 0.5 ln 8 = 1.04."""
    for name in ("kl-cov", "clip-cov"):
        config = AlgorithmConfig(advantage="dr-grpo", policy_loss=name)
        selected_T = Objective(config, max_new_tokens=2).prepare(make_batch(), seed=1).selected_T
        assert selected_T.nonzero().item() == 10  # the largest, and the only one of at least 1


def test_methods_of_your_own_get_what_they_declare():
    methods = {"advantage": f"{OWN}:declared_above_greedy", "policy_loss": f"{OWN}:declared_without_selected"}
    objective = Objective(AlgorithmConfig(**methods), max_new_tokens=2)
    assert objective.needs_greedy
    assert objective.outputs == ("logprob", "entropy")  # the choice reads the entropy
    assert not Objective(AlgorithmConfig(), max_new_tokens=2).needs_greedy
    batch = make_batch().replace(baseline_B=torch.full((4,), 0.25), entropy_T=torch.arange(12.0))
    prepared = objective.prepare(batch, seed=4)
    assert prepared.advantage_T[batch.loss_mask_T].tolist() == [0.75, 0.75, -0.25, -0.25] * 2
    assert prepared.selected_T.nonzero().item() == 10  # the last position whose next token was sampled
    assert not objective.prepare(batch, seed=5).selected_T.any()


def test_rounding_of_old_logprobs_is_not_a_divergence_that_kl_cov_penalises(model, tmp_path):
    """Another forward, such as another number of processes has, rounds otherwise."""
    trainer = PPOTrainer(toy_config(model, tmp_path, algorithm__policy_loss="kl-cov"))
    trainer.rollout.sync()
    experience = trainer.collect(0)
    rounded_T = experience.batch.old_logprob_T * (1 + 2**-22)
    before = deepcopy(trainer.actor.model.state_dict())
    steps = []
    for old_logprob_T in (experience.batch.old_logprob_T, rounded_T):
        trainer.actor.model.load_state_dict(before)
        batch = experience.batch.replace(old_logprob_T=old_logprob_T)
        steps.append(trainer.learn(replace(experience, batch=batch)).metrics)
    assert steps[0]["grad_norm"] == steps[1]["grad_norm"] > 0
    assert steps[0]["ratio_max"] == steps[1]["ratio_max"] == 1.0


def test_clip_cov_chooses_anew_in_every_step():
    """One of eight tokens that all have a covariance of 0.5 x 4."""
    batch = make_batch()
    batch = batch.replace(old_logprob_T=torch.tensor([8.0, 8, 0, 0, 0, 0] * 2) - 9)
    objective = Objective(AlgorithmConfig(advantage="dr-grpo", policy_loss="clip-cov"), max_new_tokens=2)
    chosen = [objective.prepare(batch, seed).selected_T.nonzero().item() for seed in (0, 1, 2, 3, 0)]
    assert chosen[0] == chosen[-1]
    assert len(set(chosen)) > 1


def test_divergence_in_the_reward_of_sequences():
    """The sum of log-ratios, which are 0 but for ln 2 and ln 4 and -ln 8, by a coefficient that has adapted."""
    batch = make_batch()
    batch = batch.replace(ref_logprob_T=batch.rollout_logprob_T.where(batch.loss_mask_T, 7.0))
    options = {"advantage": "dr-grpo", "kl_coef": 0.25, "kl_in": "reward", "kl_estimator": "k1"}
    objective = Objective(AlgorithmConfig(**options, kl_target=0.1, kl_horizon=4), max_new_tokens=2)
    for _ in range(3):
        objective.after_rollout({"ref_kl": 9.0}, num_sequences=4)
    (coef,) = objective.after_rollout({"ref_kl": 0.1}, num_sequences=4).values()
    assert coef == pytest.approx(0.25 * 1.2**3)
    assert objective.policy_loss.kl_coef == 0.0  # it is penalised once
    prepared = objective.prepare(batch)
    first, second = (1.0 + coef * np.log(2)) / 2, (1.0 - coef * np.log(4) - coef * np.log(8)) / 2
    expected = [first, first, -first, -first, second, second, -second, -second]
    assert prepared.advantage_T[batch.loss_mask_T].tolist() == pytest.approx(expected, abs=1e-6)
    assert prepared.reward_T is None  # no method reads it
    of_tokens = Objective(AlgorithmConfig(**options | {"advantage": "reinforce++"}), 2).prepare(batch)
    torch.testing.assert_close(of_tokens.reward_T.view(4, 3).sum(1), of_tokens.reward_B)


@pytest.mark.parametrize("name", ["gae", "reinforce++", "grpo"])
def test_rewards_of_turns_are_earned_by_the_tokens_before_them(name):
    """Two turns of two tokens each, with a token of the environment between them. Functions give 0.5."""
    rewards = [[0, 1.0, 0, 0, 2.0], [0, 0, 0, 0, 3.0]]
    batch = Batch.from_samples(
        [[1]] * 2, [[2, 3, 4, 5, 6]] * 2, rewards=[3.5, 3.5], groups=[0, 0],
        completion_masks=[[True, True, False, True, True]] * 2,
    )  # fmt: skip
    reward_T = torch.tensor([x for own in rewards for x in [*own, 0.0]], dtype=torch.float64)
    batch = batch.replace(reward_T=reward_T, value_T=torch.zeros(12) if name == "gae" else None)
    config = AlgorithmConfig(advantage=name, gamma=1.0, lam=1.0)
    prepared = Objective(config, max_new_tokens=5, has_critic=name == "gae").prepare(batch)
    to_go = torch.tensor([3.5, 3.5, 2.5, 2.5, 3.5, 3.5, 3.5, 3.5], dtype=torch.float64)
    expected = torch.zeros(8) if name == "grpo" else ((to_go - to_go.mean()) / to_go.std()).float()
    torch.testing.assert_close(prepared.advantage_T[batch.loss_mask_T], expected, atol=1e-5, rtol=0)
    if name == "gae":
        torch.testing.assert_close(prepared.return_T[batch.loss_mask_T], to_go.float())


def test_an_empty_completion_keeps_its_reward_beside_the_divergence():
    batch = Batch.from_samples([[1]] * 2, [[], [2, 3]], rewards=[1.0, 0.0], groups=[0, 0])
    batch = batch.replace(old_logprob_T=torch.zeros(4), ref_logprob_T=torch.zeros(4))
    assert advantages(batch, kl_coef=0.5, kl_in="reward", kl_estimator="k1") == [-0.5, -0.5]


def test_coefficients_survive_as_json():
    config = AlgorithmConfig(kl_coef=0.1, kl_target=0.05, kl_horizon=100, entropy_coef=0.01, entropy_target=0.5)
    objective, restored = Objective(config, 8), Objective(config, 8)
    assert objective.policy_loss.kl_coef == 0.1
    assert objective.after_rollout({"ref_kl": 1.0}, num_sequences=100) == {"kl_coef": pytest.approx(0.12)}
    assert objective.after_rollout({}, num_sequences=0) == {"kl_coef": pytest.approx(0.12)}  # there was nothing
    assert objective.after_optimizer_step({"entropy": 0.6}) == {"entropy_coef": 0.0}
    assert objective.policy_loss.kl_coef == pytest.approx(0.12)
    restored.load_state(objective.state())
    assert restored.policy_loss == objective.policy_loss
    assert restored.after_optimizer_step({"entropy": 0.4}) == objective.after_optimizer_step({"entropy": 0.4})
    assert objective.policy_loss.entropy_coef == pytest.approx(0.01)  # a step down, and up again
    assert Objective(AlgorithmConfig(), 8).state() == {}


@pytest.mark.parametrize("normalize", ["none", "scale", "standardize"])
def test_rewards_relative_to_all_of_the_run(normalize):
    """The second step's by the mean and deviation of both steps' rewards, also after a checkpoint between them."""
    steps = torch.tensor([[1.0, 2, 3, 4], [10, 20, 0, 5]], dtype=torch.float64)
    batch = Batch.from_samples([[1]] * 4, [[2, 3]] * 4, rewards=steps[1].tolist(), groups=[0, 0, 1, 1])
    baseline_B, reward_T = steps[1] / 2, torch.arange(12, dtype=torch.float64)
    batch = batch.replace(baseline_B=baseline_B, reward_T=reward_T)
    objective, restored = (Objective(AlgorithmConfig(), 8, normalize=normalize) for _ in range(2))
    objective.normalized(batch, steps[0])
    restored.load_state(json.loads(json.dumps(objective.state())))
    found = restored.normalized(batch, steps[1])
    shift, scale = steps.mean() * (normalize == "standardize"), steps.std(correction=0)
    if normalize == "none":
        assert found is batch
        assert restored.after_rollout({}, 4) == restored.state() == {}
        return
    torch.testing.assert_close(found.reward_B, (steps[1] - shift) / scale, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.baseline_B, (baseline_B - shift) / scale, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.reward_T, reward_T / scale, rtol=1e-14, atol=0)
    moments = {"reward_running_mean": pytest.approx(5.625), "reward_running_std": pytest.approx(scale.item())}
    assert restored.after_rollout({}, 4) == moments
    assert torch.equal(objective.normalized(batch, steps[1]).reward_B, found.reward_B)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": f"{OWN}:centred"}, r"has no function 'centred' \(did you mean centered"),
        ({"advantage": "gae"}, "whitened_gae reads value_T: it needs a critic"),
        ({"policy_loss": f"{OWN}:without_reward"}, "without_reward reads value_T: it needs a critic"),
        ({"policy_loss": f"{OWN}:near_reference"}, "reads ref_logprob_T: it needs algorithm.kl_coef"),
        ({"advantage": f"{OWN}:misspelt"}, r"misspelt reads rewards_B, which is no field .*\(did you mean reward_B"),
        ({"policy_loss": f"{OWN}:misspelt"}, r"misspelt reads rewards_B, which is no field .*\(did you mean reward_T"),
        ({"policy_loss": f"{OWN}:misspelt_token"}, r"reads advantages_T, .*\(did you mean advantage_T"),
        ({"advantage": f"{OWN}:misspelt_token"}, "misspelt_token reads logprob_T: it is made after the advantages"),
        ({"policy_loss": f"{OWN}:concentrated"}, "reads sum_prob_squared_T: it is made for an advantage that reads it"),
        ({"advantage": f"{OWN}:above_greedy"}, r"above_greedy reads baseline_B: declare .*needs\(greedy=True\)"),
        ({"policy_loss": f"{OWN}:without_selected"}, r"reads selected_T: declare .*needs\(selection=\.\.\.\)"),
        ({"policy_loss": f"{OWN}:selected_by_greedy"}, "token selection above_greedy reads baseline_B: declare"),
        ({"policy_loss": "cispo", "loss_options": {"max_ratio": 2.0}}, "cispo has no option 'max_ratio'"),
        ({"rollout_correction": "token-truncate", "correction_low": 0.5}, "token-truncate has no bound 'low'"),
        ({"rollout_correction": "sequence-truncate", "correction_low": 0.0}, "no bound 'low': it has high"),
        ({"rollout_correction": "token-mask", "correction_low": 5.0, "correction_high": 0.5}, r"from 5\.0 to 0\.5"),
        ({"rollout_correction": "sequence-mask", "correction_low": 1.5}, r"from 1\.5 to 1\.002"),
    ],
)
def test_unusable_methods_are_refused_before_anything_runs(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(AlgorithmConfig(**options), max_new_tokens=8)


def test_a_critic_needs_returns():
    batch = make_batch()
    batch = batch.replace(value_T=torch.zeros(batch.num_tokens))
    objective = Objective(AlgorithmConfig(advantage=f"{OWN}:centered"), max_new_tokens=8, has_critic=True)
    with pytest.raises(ValueError, match="advantage centered returned no returns, which the critic is trained towards"):
        objective.prepare(batch)


def test_what_a_method_reads_may_be_there_for_another():
    options = {"advantage": "optimal-token", "loss_options": {"strength": 2.0}, "policy_loss": f"{OWN}:concentrated"}
    loss = Objective(AlgorithmConfig(**options), max_new_tokens=8).policy_loss
    assert loss.fields == ("old_logprob_T", "advantage_T", "loss_weight_T", "sum_prob_squared_T")
    with pytest.raises(ValueError, match="concentrated reads strength, which is no field of a batch and no setting"):
        Objective(AlgorithmConfig(**options | {"loss_options": {}}), max_new_tokens=8)


# ---- whole runs -----------------------------------------------------------------------------------------------------


def run(model, folder, **changes) -> list[dict]:
    train(toy_config(model, folder, **changes))
    return comparable(folder / "run")


METHODS = {
    "optimal-token": {"advantage": "optimal-token"},
    "rloo": {"advantage": "rloo"},
    "dr-grpo": {"advantage": "dr-grpo", "aggregation": "constant"},
    "reinforce++": {"advantage": "reinforce++", "kl_coef": 0.01, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline"},
    "remax": {"advantage": "remax"},  # one noisy baseline, nothing scaled: slower
    "gspo": {"policy_loss": "gspo", "aggregation": "sequence-mean", "mini_batches": 2},
    "kl-cov": {"policy_loss": "kl-cov", "mini_batches": 2, "high_entropy_share": 0.5},  # half of the tokens: slower
    "own": {"advantage": f"{OWN}:centered", "policy_loss": f"{OWN}:unclipped", "loss_options": {"strength": 2.0}},
    "bypass": {"rollout_correction": "bypass"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_learns(name, tiny_model, tmp_path):
    options = {f"algorithm__{key}": value for key, value in METHODS[name].items()}
    steps = 20 if name in ("remax", "kl-cov") else 10
    rows = run(tiny_model("llama"), tmp_path, steps=steps, rollout__samples_per_prompt=8, **options)
    rewards = [row["reward_mean"] for row in rows]
    assert abs(np.mean(rewards[:2]) - 0.5) < 0.12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.15
    assert all(row.keys() >= {*MISMATCH} for row in rows)


def centered(reward_GN: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return reward_GN - reward_GN.mean(1, keepdim=True)


# Of four samples to each prompt, and the reward of the greedy answer to each prompt.
ADVANTAGES = {
    "dr-grpo": centered,
    "rloo": lambda reward_GN, _: centered(reward_GN, _) * 4 / 3,
    "remax": lambda reward_GN, greedy_G1: reward_GN - greedy_G1,
    "own": centered,
    "bypass": lambda reward_GN, _: centered(reward_GN, _) / (reward_GN.std(1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_step_learns_from_the_advantages_of_its_method(name, model, tmp_path):
    options = {f"algorithm__{key}": value for key, value in METHODS[name].items()}
    trainer = PPOTrainer(toy_config(model, tmp_path, reward__function=f"{HERE}:spread", **options))
    trainer.start(0)
    experience = trainer.collect(0)
    batch, reward_GN = experience.batch, experience.taught.reward_B.view(4, 4)
    greedy_G1 = None if batch.baseline_B is None else batch.baseline_B.view(4, 4)[:, :1]
    advantage_B = ADVANTAGES[name](reward_GN, greedy_G1).flatten()
    mask_T, length_B = batch.loss_mask_T, experience.taught.length_B
    expected_T = advantage_B.repeat_interleave(length_B)
    torch.testing.assert_close(batch.advantage_T[mask_T].double(), expected_T, rtol=1e-5, atol=1e-6)
    metrics = trainer.learn(experience).metrics
    constant = 16 * 6 if name == "dr-grpo" else len(expected_T)  # at most six tokens in each of 16 samples
    factor = 2.0 if name == "own" else 1.0
    assert metrics["policy_loss"] == pytest.approx(-factor * expected_T.sum().item() / constant, abs=1e-5)
    assert metrics["grad_norm"] > 0
    assert metrics.keys() >= {*MISMATCH}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm__policy_loss": "gspo", "algorithm__aggregation": "sequence-mean"},  # looks at whole sequences
        {"algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "unbiased", "algorithm__entropy_coef": 0.01},
    ],
)
def test_a_single_step_needs_no_pass_for_old_logprobs(options, model, tmp_path):
    """Its own log-probabilities are the same bits: so are metrics, the mismatch among them, and weights."""
    options = {"steps": 2, "reward__function": f"{HERE}:spread", **options}
    own = run(model, tmp_path / "own", **options)
    inferred = run(model, tmp_path / "inferred", algorithm__advantage=f"{OWN}:grpo_after_a_pass", **options)
    assert own[-1]["grad_norm"] > 0
    assert own == inferred
    weights = [(tmp_path / name / "run" / "hf" / "model.safetensors").read_bytes() for name in ("own", "inferred")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({}, ()),
        ({"kl_coef": 0.1}, ()),
        ({"rollout_correction": "bypass"}, ()),
        ({"rollout_correction": "bypass", "high_entropy_share": 0.5}, ("entropy",)),
        ({"epochs": 2}, ("logprob",)),
        ({"mini_batches": 2}, ()),
        ({"mini_batches": 2, "kl_coef": 0.1}, ()),
        ({"mask_truncated": True}, ("logprob",)),  # whose metrics tell of all samples, an update of some
        ({"rollout_correction": "token-mask"}, ("logprob",)),
        ({"policy_loss": "kl-cov"}, ("logprob",)),
        ({"kl_coef": 0.1, "kl_in": "reward"}, ("logprob",)),
        ({"kl_coef": 0.1, "kl_target": 0.1}, ("logprob",)),
        ({"advantage": f"{OWN}:grpo_after_a_pass"}, ("logprob",)),
        ({"high_entropy_share": 0.5}, ("logprob", "entropy")),  # of a pass that is made anyway
        ({"advantage": "optimal-token"}, ("logprob", "sum_prob_squared")),
    ],
)
def test_what_is_inferred_before_the_update(options, outputs):
    objective = Objective(AlgorithmConfig(**options), max_new_tokens=8)
    assert objective.outputs == outputs
    assert objective.defers_old == (not outputs and "bypass" not in options.values())
    one, several = (Objective(AlgorithmConfig(mini_batches=n), max_new_tokens=8, logs_tokens=True) for n in (1, 2))
    assert (one.outputs, several.outputs) == ((), ("logprob",))


def test_mismatch_without_a_pass_is_that_of_the_first_optimizer_step(model, tmp_path):
    """Its log-probabilities are those of a pass before the update; after it the policy is elsewhere."""
    options = {"steps": 1, "algorithm__epochs": 2, "reward__function": f"{HERE}:spread"}
    (inferred,) = run(model, tmp_path / "inferred", **options)
    (bypassed,) = run(model, tmp_path / "bypassed", **options, algorithm__rollout_correction="bypass")
    for name in MISMATCH:
        assert bypassed[name] == pytest.approx(inferred[name], rel=1e-5, abs=1e-8)
    assert bypassed["approx_kl"] > 1e-3  # of the second step


def test_old_logprobs_of_later_steps_are_inferred_where_they_are_read(model, tmp_path, monkeypatch):
    """The numbers are those of a pass over the whole rollout, but for rounding; the mismatch is over what ran."""
    counts: list[int] = []
    infer = FSDPEngine.infer
    monkeypatch.setattr(
        FSDPEngine,
        "infer",
        lambda self, batch, *a: counts.append(int(batch.loss_mask_T.sum())) or infer(self, batch, *a),
    )
    options = {"algorithm__mini_batches": 3, "reward__function": f"{HERE}:even_share_of_some", "steps": 2}
    deferred = run(model, tmp_path / "deferred", **options)
    of_deferred = counts.copy()
    counts.clear()
    whole = run(model, tmp_path / "whole", **options, log_tokens_mib=1)
    assert len(counts) == 2  # one pass for each rollout
    for row, other, count, count_of_all in zip(deferred, whole, of_deferred, counts, strict=True):
        assert row["ratio_max"] > 1.0
        assert 0 < count < row["taught_share"] * count_of_all
        assert row.keys() == other.keys()
        for name in row.keys() - {*MISMATCH}:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
        assert 0 < row["mismatch_mean"] <= row["mismatch_max"] <= other["mismatch_max"] + 1e-6


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_groups_without_a_signal_do_not_run(mini_batches, model, tmp_path):
    """Six of ten prompts always have equal rewards. The run is that in which all tokens run, up to rounding."""
    options = {"rollout__prompts_per_step": 10, "reward__function": f"{HERE}:even_share_of_some", "steps": 1}
    options["algorithm__mini_batches"] = mini_batches
    skips = run(model, tmp_path / "skips", **options)
    runs = run(model, tmp_path / "runs", **options, algorithm__policy_loss=f"{OWN}:ppo_of_every_token")
    samples = read_lines(tmp_path / "skips" / "run" / "samples.jsonl")
    for row, other in zip(skips, runs, strict=True):
        by_prompt: dict[str, list[dict]] = {}
        for sample in samples:
            if sample["step"] == row["step"]:
                by_prompt.setdefault(sample["prompt"], []).append(sample)
        groups = [len({sample["reward"] for sample in group}) > 1 for group in by_prompt.values()]
        assert 0 < sum(groups) <= 4
        assert row["zero_std_group_share"] == pytest.approx(1 - sum(groups) / 10)
        assert 0.0 < row["taught_share"] < 0.55
        assert other["taught_share"] == 1.0
        for name in ("loss", "grad_norm", "reward_mean"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)
        assert row["mismatch_max"] < 1e-4
        assert row["entropy"] > 0
    exported = [load_file(tmp_path / name / "run" / "hf" / "model.safetensors") for name in ("skips", "runs")]
    for name, weight in exported[0].items():
        torch.testing.assert_close(weight, exported[1][name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_step_without_any_advantage_has_no_means(mini_batches, model, tmp_path):
    options = {"reward__function": f"{HERE}:constant", "algorithm__mini_batches": mini_batches}
    (row,) = run(model, tmp_path, steps=1, **options)
    assert row["taught_share"] == row["loss"] == row["grad_norm"] == 0.0
    assert not row.keys() & {"entropy", "approx_kl", "clip_share", "ratio_max", *MISMATCH}


def test_schedules_reach_their_end_where_steps_teach_nothing(model, tmp_path):
    """No answer to half of the prompts has a reward, and a step has one prompt."""
    data = write_rows(tmp_path / "words.jsonl", [{"prompt": word} for word in ("sun", "moon", "sun", "star")])
    options = {
        "data__path": str(data), "rollout__prompts_per_step": 1, "reward__function": f"{HERE}:not_for_sun", "steps": 8,
        "algorithm__advantage": "gae",
        "actor__optimizer": {"schedule": "linear", "learning_rate": 1e-3},
        "critic": {"max_tokens": 64, "optimizer": {"schedule": "linear", "learning_rate": 2e-3}},
    }  # fmt: skip
    trainer = PPOTrainer(toy_config(model, tmp_path, **options))
    Run(trainer).run()
    rates = {row["step"]: row["learning_rate"] for row in comparable(tmp_path / "run") if "learning_rate" in row}
    assert len(rates) == 4
    for step, rate in rates.items():
        assert rate == pytest.approx(1e-3 * (1 - (step - 1) / 8))
    assert trainer.critic.optimizer.param_groups[0]["lr"] == pytest.approx(2 * rates[max(rates)])


def test_an_entropy_target_reads_every_token():
    """Also while the bonus has the weight 0."""
    objective = Objective(AlgorithmConfig(entropy_coef=0.01, entropy_target=0.5), max_new_tokens=8)
    objective.load_state({"entropy": {"coef": 0.0, "weight": 0.0}})
    assert objective.policy_loss.entropy_coef == 0.0
    assert not objective.policy_loss.needs_advantage
    assert Objective(AlgorithmConfig(), max_new_tokens=8).policy_loss.needs_advantage


def test_truncated_samples_teach_nothing(model, tmp_path):
    row = run(model, tmp_path, steps=1, rollout__max_new_tokens=2, algorithm__mask_truncated=True)[0]
    assert row["truncated_share"] == 1.0
    assert "loss" not in row


@pytest.mark.parametrize("filter_by", [None, f"{HERE}:even_share_of_some"])
def test_refills_until_enough_prompts_can_be_learned_from(filter_by, model, tmp_path):
    """Half of the prompts always get equal rewards, or equal values of the part that decides.

    Each pass over the data has every prompt once, however many a step takes, and also after a resume.
    """
    words = [{"prompt": word} for word in ("sun", "moon", "star", "rain", "hill", "lake", "tree", "leaf")]
    data = write_rows(tmp_path / "words.jsonl", words)
    blurred = 0.0 if filter_by is None else 1.0
    options = {
        "data__path": str(data), "algorithm__skip_equal_groups": True, "algorithm__max_refills": 2,
        "reward__function": {f"{HERE}:even_share_of_some": 1.0, f"{HERE}:even_share": blurred},
        "algorithm__filter_by": filter_by,
    }  # fmt: skip
    run(model, tmp_path, steps=2, **options)
    train(toy_config(model, tmp_path, steps=4, **options), resume=True)
    rows = comparable(tmp_path / "run")
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    stream = [sample["prompt"] for sample in samples][::4]
    for start in range(0, len(stream) - 7, 8):
        assert set(stream[start : start + 8]) == {row["prompt"] for row in words}
    for step, row in enumerate(rows, start=1):
        prompts = [s["prompt"] for s in samples if s["step"] == step][::4]
        signal = [word in ("hill", "lake", "tree", "leaf") for word in prompts]
        assert 4 < len(prompts) <= 12
        assert sum(signal) >= 4 or len(prompts) == 12
        assert sum(signal[:-4]) < 4  # without its last refill it had too few
        assert row["zero_std_group_share"] == 1 - sum(signal) / len(signal)
        assert row["grad_norm"] > 0
