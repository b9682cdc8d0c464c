"""What a run learns from its rollouts: advantage estimator, policy loss, and coefficients that adapt."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from rlft_fast.config import AlgorithmConfig, TeacherConfig
from rlft_fast.data import Batch
from rlft_fast.engine import Output
from rlft_fast.ops.packing import segment_sum
from rlft_fast.plugins import find_function, function_name, parameter_names, required_names, suggestion
from rlft_fast.rl import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdaptiveEntropy,
    AdaptiveKL,
    AdvantageError,
    PolicyLoss,
    RunningReward,
    arguments_of,
    call_method,
    check_correction,
    compute_advantages,
    correction_weights,
    distillation_advantage,
    high_entropy_tokens,
    kl_estimate,
    needs_of,
    reward_with_kl,
)

_FIELDS = frozenset(field.name for field in fields(Batch))


class Objective:
    """The methods that a configuration names, found and checked once.

    Args:
        config: names and coefficients.
        max_new_tokens: most tokens of a completion.
        has_critic: whether batches have values.
        teacher: whose distributions the policy learns; None: there is none.
        logs_tokens: whether log π_old of every token is logged.
        normalize: `RewardConfig.normalize`.

    Attributes:
        advantage: the estimator.
        needs_greedy: whether the reward of a greedy answer to every prompt is the baseline.

    Raises:
        ValueError: an unknown method or option, or a method reads what the run does not have.
    """

    def __init__(
        self, config: AlgorithmConfig, max_new_tokens: int, *, has_critic: bool = False,
        teacher: TeacherConfig | None = None, logs_tokens: bool = False, normalize: str = "none",
    ) -> None:  # fmt: skip
        self.config = config
        self._teacher = teacher
        self._logs_tokens = logs_tokens
        self.advantage = find_function("advantage", ADVANTAGES, config.advantage)
        if self._corrects:
            check_correction(config.rollout_correction, **self._bounds)
        policy_loss = find_function("policy loss", POLICY_LOSSES, config.policy_loss)
        self.needs_greedy = needs_of(self.advantage).greedy
        self._selection = needs_of(policy_loss).selection
        self._check_fields(policy_loss, has_critic)
        self._has_token_rewards = "reward_T" in {*self._reads, *parameter_names(policy_loss)}
        self._loss = PolicyLoss(
            loss=policy_loss, clip_low=config.clip_low, clip_high=config.clip_high, options=config.loss_options,
            entropy_coef=config.entropy_coef, kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator, aggregation=config.aggregation, max_response_tokens=max_new_tokens,
            every_token=config.entropy_target is not None, **self._of_teacher,
        )  # fmt: skip
        if self._loss.ids_field is not None and self._loss.needs_sequences:
            raise ValueError(
                f"teacher.loss: topk reads single tokens, but policy loss {config.policy_loss} reads whole sequences: "
                "take another loss, or teacher.loss: sampled"
            )
        self._kl: AdaptiveKL | None = None
        if config.kl_target is not None:
            self._kl = AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
        self._entropy: AdaptiveEntropy | None = None
        if config.entropy_target is not None:
            self._entropy = AdaptiveEntropy(config.entropy_coef, config.entropy_target, config.entropy_step)
        self._normalize = normalize
        self._rewards = None if normalize == "none" else RunningReward()

    # ---- what it needs ------------------------------------------------------------------------------------------

    @property
    def _reads(self) -> set[str]:
        """What the methods read before the first optimizer step."""
        methods = filter(None, (self.advantage, self._selection))
        return {name for method in methods for name in parameter_names(method)}

    @property
    def defers_old(self) -> bool:
        """Whether π_old is read in the update alone, and each token is in one optimizer step.

        The forward of the first step computes π_old itself, on CPUs to the bit. For later steps, a pass computes it
        when the advantages say which tokens run.
        """
        config = self.config
        read_before = (
            config.rollout_correction != "none"
            or config.mask_truncated  # the metrics are of all samples, the update is not
            or (config.kl_coef != 0 and (config.kl_in == "reward" or config.kl_target is not None))
            or self._adds_to_advantages
            or "old_logprob_T" in self._reads
        )
        is_cut = config.mini_batches > 1
        return config.epochs == 1 and not (
            read_before or self._statistics or config.routing_replay or (is_cut and self._logs_tokens)
        )

    @property
    def starts_on_policy(self) -> bool:
        """Whether π_old is the policy itself in the first optimizer step, whose forward then computes π_old.

        Another forward gives the same numbers to rounding alone, and the penalty of `kl_cov` has a kink at a ratio of
        1: with π_old from there, rounding would decide on the sign of the gradient.
        """
        return self.config.rollout_correction != "bypass"

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs to infer of all tokens before the update.

        Log-probabilities are left out where they are computed later (`defers_old`) or the sampler's are used (bypass).
        """
        logprob: tuple[Output, ...] = ("logprob",)
        if self.defers_old or self.config.rollout_correction == "bypass":
            logprob = ()
        experts: tuple[Output, ...] = ("routed_experts",) if self.config.routing_replay else ()
        return (*logprob, *self._statistics, *experts)

    @property
    def _statistics(self) -> tuple[Output, ...]:
        """The outputs to infer besides log-probabilities."""
        asked: dict[Output, bool] = {
            "entropy": self.config.high_entropy_share < 1.0 or "entropy_T" in self._reads,
            "sum_prob_squared": "sum_prob_squared_T" in self._reads,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    @property
    def _adds_to_advantages(self) -> bool:
        """Whether a teacher scores sampled tokens."""
        return self._teacher is not None and self._teacher.loss == "sampled"

    @property
    def _of_teacher(self) -> dict[str, Any]:
        """The options of the policy loss by which a teacher teaches."""
        if self._teacher is None or self._adds_to_advantages:
            return {}
        return {"teacher_coef": self._teacher.weight, "teacher_tail": self._teacher.add_tail}

    @property
    def _corrects(self) -> bool:
        return self.config.rollout_correction not in ("none", "bypass")

    @property
    def _bounds(self) -> dict[str, float]:
        """The bounds that the configuration sets; the correction has defaults for the others."""
        bounds = {"low": self.config.correction_low, "high": self.config.correction_high}
        return {name: value for name, value in bounds.items() if value is not None}

    def _check_fields(self, policy_loss: Callable[..., Any], has_critic: bool) -> None:
        """Refuses a method that reads a field which no batch of this run has by then."""
        missing, later = self._never_made(has_critic), "it is made after the advantages"
        early = missing | dict.fromkeys(("logprob_T", "loss_weight_T", "selected_T"), later)
        if not self.needs_greedy:
            early["baseline_B"] = "declare that greedy answers are sampled for it, @rlft_fast.rl.needs(greedy=True)"
        made = dict.fromkeys(("advantage_T", "return_T"), later)
        _check_names("advantage", self.advantage, {*_FIELDS, "gamma", "lam"}, early | made)
        if self._selection is None:
            missing["selected_T"] = "declare what chooses these tokens, @rlft_fast.rl.needs(selection=...)"
        else:
            _check_names("token selection", self._selection, {*_FIELDS, "seed"}, early)
        if "sum_prob_squared_T" not in self._reads:
            missing["sum_prob_squared_T"] = "it is made for an advantage that reads it"
        bounds = {name for name in ("clip_low", "clip_high") if getattr(self.config, name) is not None}
        settings = bounds | {"sequence_mean", *self.config.loss_options}
        _check_names("policy loss", policy_loss, {name for name in _FIELDS if name.endswith("_T")} | settings, missing)

    def _never_made(self, has_critic: bool) -> dict[str, str]:
        """The fields that this run makes for no method, each with the reason."""
        missing: dict[str, str] = {}
        if not has_critic:
            missing |= dict.fromkeys(("value_T", "return_T"), "it needs a critic section")
        if not self.config.kl_coef:
            missing["ref_logprob_T"] = "it needs algorithm.kl_coef"
        if not self.config.routing_replay:
            missing["routed_experts_TK"] = "it needs algorithm.routing_replay"
        if self._teacher is None:
            missing["teacher_logprob_T"] = "it needs a teacher section"
        if "teacher_coef" not in self._of_teacher:
            missing |= dict.fromkeys(("teacher_ids_TK", "teacher_logprob_TK"), "it needs teacher.loss: topk")
        return missing

    # ---- what it makes ------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, seed: int = 0) -> Batch:
        """Fills in rewards and advantages, corrected and masked.

        Args:
            batch: the whole rollout with the log-probabilities (entropies, values) of the models.
            seed: of the choice of tokens that the policy loss declares.

        Raises:
            ValueError: the batch lacks a field that a method reads.
            AdvantageError: the advantage or the choice of tokens failed, or there is a critic and nothing for it to
                learn.
        """
        whole = self._prepare(batch.episodes(), seed)
        if batch.episode_B is None:
            return whole
        made = {name: getattr(whole, name) for name in ("reward_T", "advantage_T", "return_T", "selected_T")}
        return batch.replace(**made)

    def _prepare(self, batch: Batch, seed: int) -> Batch:
        """`prepare`, of a batch with one sequence per episode."""
        config = self.config
        batch = compute_advantages(self._with_rewards(batch), self.advantage, gamma=config.gamma, lam=config.lam)
        if batch.value_T is not None and batch.return_T is None:
            raise AdvantageError(
                f"advantage {function_name(self.advantage)} returned no returns, which the critic is trained towards: "
                "return an rlft_fast.rl.AdvantageReturn, or leave the critic section out"
            )
        batch = self._with_selection(self._with_teacher(batch), seed)
        assert batch.advantage_T is not None
        if config.high_entropy_share == 1.0 and not self._corrects:
            return batch
        # A policy loss is proportional to |A|: a factor on A scales it, but not the entropy bonus, penalty or critic.
        return batch.replace(advantage_T=batch.advantage_T * self._weights(batch))

    def _with_rewards(self, batch: Batch) -> Batch:
        """Rewards of each sequence and of the tokens, both with the divergence where it is penalised in the reward.

        Tokens have rewards where a method reads them: they would be a large column that all workers are sent.
        """
        assert batch.reward_B is not None
        config, reward_B, kl_T = self.config, batch.reward_B, None
        if config.kl_coef and config.kl_in == "reward":
            assert batch.old_logprob_T is not None
            assert batch.ref_logprob_T is not None
            kl_T = kl_estimate(batch.old_logprob_T, batch.ref_logprob_T, config.kl_estimator)
            # Not the sum of reward_T: a sequence without response tokens has a reward, but no token that carries it.
            kl_B = segment_sum(kl_T.where(batch.loss_mask_T, 0.0), batch.cu_seqlens)
            reward_B = batch.reward_B - self._kl_coef * kl_B
        reward_T = None
        if self._has_token_rewards:
            reward_T = reward_with_kl(
                batch.reward_B, kl_T, batch.loss_mask_T, batch.cu_seqlens, self._kl_coef, batch.reward_T
            )
        return batch.replace(reward_T=reward_T, reward_B=reward_B)

    def _with_selection(self, batch: Batch, seed: int) -> Batch:
        """The tokens that the policy loss treats apart."""
        if self._selection is None:
            return batch
        arguments = arguments_of("token selection", self._selection, batch, {"seed": seed})
        return batch.replace(selected_T=call_method("token selection", self._selection, arguments, AdvantageError))

    def _with_teacher(self, batch: Batch) -> Batch:
        """The advantages with the term of the teacher. Returns, which a critic learns, are of rewards alone."""
        if self._teacher is None or not self._adds_to_advantages:
            return batch
        assert batch.advantage_T is not None
        assert batch.old_logprob_T is not None
        assert batch.teacher_logprob_T is not None
        term_T = distillation_advantage(batch.old_logprob_T, batch.teacher_logprob_T, batch.loss_mask_T)
        return batch.replace(advantage_T=batch.advantage_T + self._teacher.weight * term_T)

    def _weights(self, batch: Batch) -> Tensor:
        """(T,) factor on the policy loss of each token."""
        config, weight_T = self.config, batch.loss_mask_T.float()
        if config.high_entropy_share < 1.0:
            assert batch.entropy_T is not None
            weight_T *= high_entropy_tokens(batch.entropy_T, batch.loss_mask_T, config.high_entropy_share)
        if self._corrects:
            assert batch.old_logprob_T is not None
            weight_T *= correction_weights(
                config.rollout_correction, batch.old_logprob_T, batch.rollout_logprob_T, batch.loss_mask_T,
                batch.cu_seqlens, **self._bounds,
            )  # fmt: skip
        return weight_T

    def normalized(self, batch: Batch, reward_B: Tensor) -> Batch:
        """The batch with rewards and baselines relative to all rewards of the run, the step's own included.

        Args:
            batch: to learn from.
            reward_B: (B,) rewards of all samples of the step.
        """
        if self._rewards is None:
            return batch
        self._rewards.update(reward_B)
        scale = self._rewards.std or 1.0
        shift = self._rewards.mean if self._normalize == "standardize" else 0.0
        return batch.replace(
            reward_B=None if batch.reward_B is None else (batch.reward_B - shift) / scale,
            baseline_B=None if batch.baseline_B is None else (batch.baseline_B - shift) / scale,
            reward_T=None if batch.reward_T is None else batch.reward_T / scale,  # a part of the whole
        )

    # ---- coefficients -------------------------------------------------------------------------------------------

    @property
    def _kl_coef(self) -> float:
        return self.config.kl_coef if self._kl is None else self._kl.coef

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss with its coefficients as they are now."""
        loss = self._loss
        if self._kl is not None and loss.kl_coef:
            loss = replace(loss, kl_coef=self._kl.coef)
        return loss if self._entropy is None else replace(loss, entropy_coef=self._entropy.coef)

    def after_rollout(self, metrics: dict[str, float], num_sequences: int) -> dict[str, float]:
        """Adapts the weight of the penalty; returns its metric, and the moments of the rewards so far."""
        found = {}
        if self._rewards is not None:
            found |= {"reward_running_mean": self._rewards.mean, "reward_running_std": self._rewards.std}
        if self._kl is None:
            return found
        if "ref_kl" in metrics:
            self._kl.update(metrics["ref_kl"], num_sequences)
        return found | {"kl_coef": self._kl.coef}

    def after_optimizer_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adapts the weight of the entropy bonus; returns its metric."""
        if self._entropy is None:
            return {}
        self._entropy.update(metrics["entropy"])
        return {"entropy_coef": self._entropy.coef}

    def state(self) -> dict[str, Any]:
        """The coefficients, as JSON for a checkpoint."""
        controllers = {"kl": self._kl, "entropy": self._entropy, "rewards": self._rewards}
        return {name: {**vars(controller)} for name, controller in controllers.items() if controller is not None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Coefficients that a checkpoint kept; targets and steps are those of the configuration."""
        if self._kl is not None and "kl" in state:
            self._kl.coef = state["kl"]["coef"]
        if self._entropy is not None and "entropy" in state:
            self._entropy.coef, self._entropy.weight = state["entropy"]["coef"], state["entropy"]["weight"]
        if self._rewards is not None and "rewards" in state:
            self._rewards = RunningReward(**state["rewards"])


def _check_names(what: str, function: Callable[..., Any], known: set[str], missing: dict[str, str]) -> None:
    """Refuses a parameter of a missing field, and an unknown one without a default or with the name of a tensor."""
    required = required_names(function)
    for name in parameter_names(function):
        reads = f"{what} {function_name(function)} reads {name}"
        if name in missing:
            raise ValueError(f"{reads}: {missing[name]}")
        if name not in known and (name in required or name.endswith("_T")):
            raise ValueError(f"{reads}, which is no field of a batch and no setting{suggestion(name, known)}")
