"""Policy losses and their gradients beside the code of verl, OpenRLHF and TRL: make test-peers.

Where a number differs on purpose, the difference is what is tested.
"""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft_fast.ops.packing.pack import segment_expand, segment_sum
from rlft_fast.rl import (
    AdaptiveEntropy,
    PolicyLoss,
    clip_cov_tokens,
    correction_weights,
    high_entropy_tokens,
    kl_cov_tokens,
    loss_scale,
    loss_weights,
)
from tests.rl.peers import AGGREGATIONS, MARKS, Rollout, import_openrlhf, value_and_gradient

pytestmark = MARKS
SEEDS = range(3)
BOUNDS = {"clip_low": 0.1, "clip_high": 0.3}
VERL_BOUNDS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
UNBOUNDED = 1e9
MOST = 20  # tokens of a response, for aggregation "constant"


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert theirs[1].abs().max() > 1e-3


class Policies:
    """Log-probabilities of four policies, some ratios beyond all bounds, and advantages."""

    def __init__(self, seed: int, *, far: bool = True, per_sequence: bool = False) -> None:
        self.rollout = rollout = Rollout(seed)
        self.new, self.old = rollout.logprobs()
        if far:
            self.old += 30 * rollout.normal().sign() * (rollout.normal() > 1.3)
        self.ref, self.sampler = (self.new + 0.5 * rollout.normal() for _ in range(2))
        self.advantage, self.entropy = rollout.normal(), rollout.normal().square()
        if per_sequence:
            self.advantage = self.advantage[:, :1].expand_as(self.advantage)

    def ours(self, loss: PolicyLoss, *, factor: Tensor | None = None, **more: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the batch and its gradient; `factor` (T,) is on the advantage."""
        rollout = self.rollout
        weight_T = loss_weights(rollout.mask_T, rollout.cu_seqlens, loss.aggregation)
        fields = more | {
            "old_logprob_T": rollout.pack(self.old), "ref_logprob_T": rollout.pack(self.ref),
            "advantage_T": rollout.pack(self.advantage) * (1.0 if factor is None else factor),
            "loss_weight_T": weight_T.double(), "entropy_T": rollout.pack(self.entropy),
        }  # fmt: skip
        length_B = segment_sum(rollout.mask_T, rollout.cu_seqlens).clamp(min=1)

        def sequence_mean(values_T: Tensor) -> Tensor:
            mean_B = segment_sum(values_T.detach(), rollout.cu_seqlens) / length_B
            return segment_expand(mean_B, rollout.cu_seqlens, num_tokens=len(values_T))

        whole = {"sequence_mean": sequence_mean} if loss.needs_sequences else {}
        scale = loss_scale(rollout.mask_T, rollout.cu_seqlens, loss.aggregation, loss.max_response_tokens)
        return value_and_gradient(
            lambda new: scale * loss.per_token({"logprob_T": rollout.pack(new)} | fields, **whole).sum(), self.new
        )

    def verl(self, name: str, mode: str, *, factor: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        rest = (self.advantage, self.rollout.mask, AGGREGATIONS[mode], self.verl_config(**options), factor)
        return value_and_gradient(lambda new: get_policy_loss_fn(name)(self.old, new, *rest)[0], self.new)

    def openrlhf(self, **options: Any) -> tuple[Tensor, Tensor]:
        loss = import_openrlhf("models.loss").PolicyLoss(BOUNDS["clip_low"], BOUNDS["clip_high"], **options)
        rest = (self.old, self.advantage, self.rollout.mask.long(), self.sampler)
        return value_and_gradient(lambda new: loss(new, *rest)[0], self.new)

    @staticmethod
    def verl_config(**options: Any) -> Any:
        from verl.workers.config import ActorConfig

        config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
        config.global_batch_info["loss_scale_factor"] = MOST
        return config


LOSSES = [
    ("ppo", "vanilla", {"clip_ratio_c": UNBOUNDED}),
    ("dual-clip", "vanilla", {}),
    ("cispo", "cispo", {}),
    ("dppo-tv", "dppo_tv", {"clip_ratio_c": 20.0}),
    ("gspo", "gspo", {}),
    ("reinforce", "gpg", {}),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs", "more", "mode"),
    [*((*case, mode) for case in LOSSES for mode in AGGREGATIONS), ("sapo", "sapo", {}, "sequence-mean")],
)
def test_losses_are_those_of_verl(name, theirs, more, mode, seed):
    policies = Policies(seed, far=name != "gspo")
    factor = policies.rollout.normal().clamp(min=0)  # a correction; some are 0
    bounds = BOUNDS if name not in ("reinforce", "sapo") else {}
    loss = PolicyLoss(loss=name, aggregation=mode, max_response_tokens=MOST, **bounds)
    ours = policies.ours(loss, factor=policies.rollout.pack(factor))
    assert_same(ours, policies.verl(theirs, mode, factor=factor, **VERL_BOUNDS, **more))


def test_gspo_follows_a_ratio_of_exp_15_which_verl_bounds_at_exp_10():
    policies = Policies(0, far=False)
    policies.old, policies.advantage = policies.new - 15, -policies.rollout.mask.double()
    ours = policies.ours(PolicyLoss(loss="gspo"))
    value, gradient = policies.verl("gspo", "token-mean")
    assert ours[0].item() == pytest.approx(math.exp(15))
    assert ours[1].sum().item() == pytest.approx(math.exp(15))
    assert value.item() == pytest.approx(math.exp(10))
    assert not gradient.any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), [("ppo", {}), ("dual-clip", {"max_ratio": 1.5})])
def test_the_share_of_clipped_tokens_is_that_of_verl(name, options, seed):
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    policies = Policies(seed, far=False)
    pack, config = policies.rollout.pack, policies.verl_config(clip_ratio_c=1.5, **VERL_BOUNDS)
    _, theirs = compute_policy_loss_vanilla(
        policies.old, policies.new, policies.advantage, policies.rollout.mask, "token-mean", config
    )
    weight_T = loss_weights(policies.rollout.mask_T, policies.rollout.cu_seqlens, "token-mean").double()
    fields = {
        "logprob_T": pack(policies.new), "old_logprob_T": pack(policies.old), "advantage_T": pack(policies.advantage),
        "loss_weight_T": weight_T,
    }  # fmt: skip
    share = PolicyLoss(loss=name, options=options, **BOUNDS).metrics(fields)["clip_share"].item()
    beyond = theirs["actor/pg_clipfrac_lower"] if name == "dual-clip" else 0.0
    assert share == pytest.approx(theirs["actor/pg_clipfrac"] + beyond)
    assert theirs["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_is_that_of_verl_but_for_empty_responses(seed):
    """Which count there."""
    policies = Policies(seed, far=False, per_sequence=True)
    expected = policies.verl("geo_mean", "sequence-mean", **VERL_BOUNDS)
    share = policies.rollout.mask.any(1).double().mean()
    ours = policies.ours(PolicyLoss(loss="gmpo", aggregation="sequence-mean", **BOUNDS))
    assert_same(ours, tuple(x / share for x in expected))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_entropy_bonus_and_penalty_are_those_of_verl(mode):
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    policies = Policies(0)
    loss = PolicyLoss(
        entropy_coef=0.2, kl_coef=0.1, kl_estimator="k2", aggregation=mode, max_response_tokens=MOST, **BOUNDS
    )
    options = {"loss_mask": policies.rollout.mask, "loss_agg_mode": AGGREGATIONS[mode], "loss_scale_factor": MOST}
    value, gradient = policies.verl("vanilla", mode, clip_ratio_c=UNBOUNDED, **VERL_BOUNDS)
    penalty, slope = value_and_gradient(
        lambda new: agg_loss(kl_penalty(new, policies.ref, "k2"), **options), policies.new
    )
    bonus = agg_loss(policies.entropy, **options)
    assert_same(policies.ours(loss), (value - 0.2 * bonus + 0.1 * penalty, gradient + 0.1 * slope))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [1e-3, 0.3])
def test_kl_cov_is_that_of_verl_where_the_choice_is_that_of_the_current_policy(share, seed):
    policies = Policies(seed, far=False)
    rollout = policies.rollout
    share = max(round(share * int(rollout.mask.sum())), 1) / int(rollout.mask.sum()) + 1e-9  # it rounds down
    chosen_T = kl_cov_tokens(rollout.pack(policies.new), rollout.pack(policies.advantage), rollout.mask_T, share=share)
    ours = policies.ours(PolicyLoss(loss="kl-cov", options={"penalty": 0.4}), selected_T=chosen_T)
    assert_same(ours, policies.verl("kl_cov", "token-mean", policy_loss=cov(kl_cov_ratio=share, ppo_kl_coef=0.4)))


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_has_the_gradient_of_verl_where_the_choice_is_that_of_the_current_policy(seed):
    """All that are in bounds, which is no choice at random; it counts the loss of tokens that PPO clips anyway."""
    policies = Policies(seed, far=False)
    rollout = policies.rollout
    chosen_T = clip_cov_tokens(
        rollout.pack(policies.new), rollout.pack(policies.advantage), rollout.mask_T, share=1.0, low=0.2, high=2.0
    )
    _, ours = policies.ours(PolicyLoss(loss="clip-cov", **BOUNDS), selected_T=chosen_T)
    _, theirs = policies.verl(
        "clip_cov", "token-mean", **VERL_BOUNDS,
        policy_loss=cov(clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=2.0),
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert 0 < chosen_T.sum() < rollout.mask.sum()


def cov(**options: float) -> Any:
    from verl.workers.config.actor import PolicyLossConfig

    return PolicyLossConfig(**options)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs", "mode"),
    [
        ("ppo", {}, "token-mean"),
        ("ppo", {}, "sequence-mean"),
        ("dual-clip", {"dual_clip": 3.0}, "token-mean"),
        ("gspo", {"policy_loss_type": "gspo"}, "sequence-mean"),
    ],
)
def test_losses_are_those_of_openrlhf(name, theirs, mode, seed):
    policies = Policies(seed, far=name != "gspo", per_sequence=name == "gspo")
    expected = policies.openrlhf(token_level_loss=mode == "token-mean", **theirs)
    assert_same(policies.ours(PolicyLoss(loss=name, aggregation=mode, **BOUNDS)), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "bounds", "level", "mode"),
    [
        ("token-truncate", {"high": 2.0}, "token", "clip"),
        ("token-mask", {"low": 0.5, "high": 5.0}, "token", "mask"),
        ("sequence-mask", {"low": 0.9, "high": 1.2}, "seq", "mask"),
    ],
)
def test_corrected_losses_are_those_of_openrlhf(name, bounds, level, mode, seed):
    policies = Policies(seed, far=False)
    rollout = policies.rollout
    expected = policies.openrlhf(
        is_correction_level=level, is_correction_mode=mode,
        is_correction_threshold=(bounds.get("low", 0.0), bounds["high"]),
    )  # fmt: skip
    logprobs_T = rollout.pack(policies.old), rollout.pack(policies.sampler)
    factor = correction_weights(name, *logprobs_T, rollout.mask_T, rollout.cu_seqlens, **bounds)
    assert_same(policies.ours(PolicyLoss(**BOUNDS), factor=factor), expected)


class TRL:
    """What TRL's `_compute_loss` reads of its trainer, whose model gives these log-probabilities and entropies."""

    def __init__(self, policies: Policies, **options: Any) -> None:
        from accelerate import Accelerator
        from trl import GRPOConfig, GRPOTrainer

        self.policies = policies
        defaults = {"epsilon": 0.1, "epsilon_high": 0.3, "max_completion_length": MOST, "use_cpu": True, "bf16": False}
        args = GRPOConfig(output_dir="unused", **defaults | {"report_to": "none"} | options)
        self.args, self.accelerator = args, Accelerator(cpu=True)
        for name in ("loss_type", "beta", "importance_sampling_level", "epsilon_high", "top_entropy_quantile",
                     "off_policy_mask_threshold", "use_vllm", "max_completion_length", "entropy_coef",
                     "use_adaptive_entropy"):  # fmt: skip
            setattr(self, name, getattr(args, name))
        self.epsilon_low, self.current_gradient_accumulation_steps = args.epsilon, args.steps_per_generation
        self.model, self.aux_loss_enabled = torch.nn.Module(), False
        self._entropy_bonus_enabled = bool(args.entropy_coef) or args.use_adaptive_entropy
        self._last_world_entropy, self._entropy_window_stats = 0.0, None
        self._metrics: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        self.compute_loss = lambda inputs: GRPOTrainer._compute_loss(self, self.model, inputs)
        self.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(self, *args)

    def loss(self) -> tuple[Tensor, Tensor]:
        policies, mask = self.policies, self.policies.rollout.mask.long()
        inputs = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": policies.advantage, "old_per_token_logps": policies.old,
            "ref_per_token_logps": policies.ref, "num_items_in_batch": mask.sum(),
        }  # fmt: skip

        def loss(new: Tensor) -> Tensor:
            self._get_per_token_logps_and_entropies = lambda *_, **__: (new, policies.entropy, None)
            return self.compute_loss(inputs)

        return value_and_gradient(loss, policies.new)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("ours", "theirs", "empty_count"),
    [
        ({}, {"loss_type": "dapo"}, False),
        ({}, {"loss_type": "bnpo"}, False),
        ({"aggregation": "sequence-mean"}, {"loss_type": "grpo"}, True),
        ({"aggregation": "constant", "max_response_tokens": MOST}, {"loss_type": "dr_grpo"}, True),
        ({"loss": "two-sided"}, {"loss_type": "dapo", "delta": 4.0}, False),
        ({"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, {"loss_type": "cispo", "epsilon_high": 5.0}, False),
        ({"loss": "sapo", "aggregation": "sequence-mean"}, {"loss_type": "sapo"}, True),
        ({"loss": "gspo", "aggregation": "sequence-mean"}, {"loss_type": "grpo", "level": "sequence"}, True),
        ({"loss": "gspo", "aggregation": "sequence-mean-token-sum"}, {"loss_type": "luspo", "level": "sequence"}, True),
        ({"kl_coef": 0.3}, {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False}, False),
        ({"kl_coef": 0.3, "kl_estimator": "unbiased"}, {"loss_type": "dapo", "beta": 0.3}, False),
        ({"entropy_coef": 0.2}, {"loss_type": "dapo", "entropy_coef": 0.2}, False),
    ],
)
def test_losses_are_those_of_trl(ours, theirs, empty_count, seed):
    """Its means over sequences count empty ones too."""
    policies = Policies(seed, far=False, per_sequence=ours.get("loss") == "gspo")
    theirs = theirs | {"importance_sampling_level": theirs.get("level", "token")}
    expected = TRL(policies, **{name: value for name, value in theirs.items() if name != "level"}).loss()
    share = policies.rollout.mask.any(1).double().mean() if empty_count else 1.0
    bounds = {} if ours.get("loss") == "sapo" else BOUNDS
    assert_same(policies.ours(PolicyLoss(**bounds | ours)), tuple(x / share for x in expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_high_entropy_tokens_are_those_of_trl(seed):
    policies = Policies(seed, far=False)
    rollout = policies.rollout
    share = round(0.3 * int(rollout.mask.sum())) / int(rollout.mask.sum())  # between two tokens, it interpolates
    kept_T = high_entropy_tokens(rollout.pack(policies.entropy), rollout.mask_T, share)
    trl = TRL(policies, top_entropy_quantile=share)
    expected = trl.get_high_entropy_mask(policies.entropy, rollout.mask, 1 - share)
    assert torch.equal(rollout.unpack(kept_T), expected)
    assert_same(policies.ours(PolicyLoss(**BOUNDS), factor=kept_T), trl.loss())


def test_the_entropy_controller_is_that_of_trl():
    policies = Policies(0, far=False)
    options = {"use_adaptive_entropy": True, "entropy_target": 0.5, "entropy_coef_delta": 0.005}
    trl = TRL(policies, entropy_coef=0.01, entropy_coef_min=0.0, **options)
    trl.model.train()
    controller = AdaptiveEntropy(coef=0.01, target=0.5, step=0.005)
    for entropy in (0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6, 0.4):
        policies.entropy = torch.full_like(policies.entropy, entropy)
        trl.loss()
        controller.update(entropy)
        applied = trl.entropy_coef if trl._last_world_entropy <= 0.5 else 0.0
        assert (controller.weight, controller.coef) == pytest.approx((trl.entropy_coef, applied))
