"""The training loop of PPO and GRPO. One step, from top to bottom, is :meth:`PPOTrainer.train_step`.

Every random draw of a step is seeded by (seed, step, rank), and the order of prompts is a function of the step, so a
run that continues from a checkpoint repeats what the uninterrupted run would have done, bit for bit.
"""

import contextlib
import importlib.util
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from rlft_fast.config import Config, EngineConfig
from rlft_fast.data import Batch
from rlft_fast.data.prompts import Prompts, load_prompts
from rlft_fast.engine import CheckpointManager, FSDPEngine, export_hf
from rlft_fast.engine.distributed import (
    any_rank,
    barrier,
    get_rank,
    get_world_size,
    init_distributed,
    require_agreement,
)
from rlft_fast.engine.failures import naming_lost_ranks
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import RewardError
from rlft_fast.rl import ValueLoss, explained_variance, mismatch_from_sums
from rlft_fast.rollout import SamplingParams, build_rollout
from rlft_fast.trainer.experience import (
    Sample,
    build_batch,
    first_prompts,
    leave_out_truncated,
    merge_metrics,
    mini_batches,
    penalize_length,
    rollout_metrics,
    skip_equal_groups,
)
from rlft_fast.trainer.judge import Judge
from rlft_fast.trainer.log import RunLog
from rlft_fast.trainer.objective import Objective
from rlft_fast.trainer.plot import plot_runs

_SHOWN_EXAMPLES = 3


class PPOTrainer:
    """Trains a policy on verifiable rewards, as the configuration says.

    Everything that can be wrong with the input is checked here, before anything runs.

    Args:
        config: the run.

    Raises:
        ValueError: models, data or reward function cannot be used.
    """

    def __init__(self, config: Config) -> None:
        init_distributed(config.timeout_minutes)
        require_agreement("configuration", _flat(config.model_dump(mode="json")))
        self.config = config
        self.directory = Path(config.output_dir)
        if config.rollout.prompts_per_step % get_world_size():
            raise ValueError(
                f"rollout.prompts_per_step is {config.rollout.prompts_per_step}, which {get_world_size()} processes "
                "cannot share evenly: make it a multiple of the number of processes"
            )
        algorithm, temperature = config.algorithm, config.rollout.temperature
        self.objective = Objective(algorithm, config.rollout.max_new_tokens, has_critic=config.critic is not None)
        self.tokenizer = load_tokenizer(config.model)
        self.evaluation_judge = Judge.for_evaluation(config, self.tokenizer)
        self.judge = Judge(config, self.tokenizer)
        self.prompts = load_prompts(config.data, self.tokenizer, config.rollout.max_prompt_tokens)
        self.held_out: Prompts | None = None
        if config.evaluation is not None:
            self.held_out = load_prompts(
                config.data, self.tokenizer, config.rollout.max_prompt_tokens, config.evaluation.path
            )
        num_training_steps = config.steps * algorithm.epochs * algorithm.mini_batches
        self.actor = FSDPEngine(
            config.model, config.actor, num_training_steps=num_training_steps, temperature=temperature
        ).initialize()
        self.engines = {"actor": self.actor}
        self.critic: FSDPEngine | None = None
        if config.critic is not None:
            self.critic = self.engines["critic"] = FSDPEngine(
                config.critic.model or config.model, config.critic,
                head="value", num_training_steps=num_training_steps,
            ).initialize()  # fmt: skip
            self.value_loss = ValueLoss(
                clip=config.critic.value_clip, aggregation=algorithm.aggregation,
                max_response_tokens=config.rollout.max_new_tokens,
            )  # fmt: skip
        self.reference: FSDPEngine | None = None
        if algorithm.kl_coef and config.actor.lora is None:
            frozen = config.actor if config.reference is None else EngineConfig(**config.reference.model_dump())
            self.reference = FSDPEngine(config.model, frozen, temperature=temperature).initialize()
        longest = max(config.rollout.max_new_tokens, config.evaluation.max_new_tokens if config.evaluation else 0)
        self.rollout = build_rollout(
            self.actor, self.tokenizer, config.rollout, config.rollout.max_prompt_tokens + longest
        )
        self.seconds: dict[str, float] = {}  # of the current step, by part
        self.checkpoints = CheckpointManager(
            self.directory / "checkpoints", config.checkpoint.max_num, config.checkpoint.max_mem
        )
        self.log = RunLog(self.directory, config.steps, get_rank())
        self.saved_step = 0  # what a checkpoint holds; step 0 needs none
        self.stop_requested = False

    # ---- one step -----------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> dict[str, float]:
        """prompts -> rollout -> rewards -> batch -> old and reference log-probs, values -> advantages -> updates."""
        started = time.perf_counter()
        self.seconds = {}
        prompts, samples = self._collect(step)
        greedy = self._greedy_rewards(prompts) if self.objective.needs_greedy else None
        with self._timed("generate"):
            self.rollout.sleep()  # not before: only the sync after the update wakes it
        taught = self._with_signal(samples)
        with self._timed("logprobs"):
            batch = self._infer(build_batch(taught, dict(enumerate(prompts.token_ids)), greedy))
        metrics = rollout_metrics(samples, batch)
        batch = self.objective.prepare(batch, self._seed(step))
        metrics |= self.objective.after_rollout(metrics, batch.num_sequences)
        if self.config.algorithm.mask_truncated:
            batch = leave_out_truncated(batch, taught, greedy)
        with self._timed("update"):
            metrics |= self._update(batch, self._seed(step))
        with self._timed("sync"):
            self.rollout.sync()
        self._record(step, prompts, samples, metrics)
        num_tokens = sum(len(prompts.token_ids[s.row]) + len(s.completion.token_ids) for s in samples)
        seconds = time.perf_counter() - started
        return metrics | {
            **{f"seconds_{part}": value for part, value in self.seconds.items()},
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
        }

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    def _collect(self, step: int) -> tuple[Prompts, list[Sample]]:
        """The prompts of a step and their samples; further ones while too few prompts are left to learn from.

        Each step has a window of the stream of prompts to itself, so which ones it takes is a function of the step.
        """
        count, refills = self.config.rollout.prompts_per_step, self.config.algorithm.max_refills
        rows: list[int] = []
        samples: list[Sample] = []
        for attempt in range(1 + refills):
            torch.manual_seed(self._seed(step) + attempt * get_world_size() + get_rank())
            more = self.prompts.order((step * (1 + refills) + attempt) * count, count, self.config.seed)
            samples += [replace(s, row=s.row + len(rows)) for s in self._rollout(self.prompts.select(more))]
            rows += more
            if not refills or len({s.row for s in self._with_signal(samples)}) == count:
                break
        return self.prompts.select(rows), samples

    def _with_signal(self, samples: list[Sample]) -> list[Sample]:
        """The samples to learn from."""
        if not self.config.algorithm.skip_equal_groups:
            return samples
        return first_prompts(skip_equal_groups(samples), self.config.rollout.prompts_per_step)

    def _rollout(self, prompts: Prompts) -> list[Sample]:
        """Each rank samples and scores its share of the prompts; all ranks get all samples."""
        config = self.config.rollout
        rows = range(get_rank(), len(prompts), get_world_size())
        own = prompts.select(rows)
        params = SamplingParams(
            n=config.samples_per_prompt, max_new_tokens=config.max_new_tokens, temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p, stop=config.stop,
        )  # fmt: skip
        with self._timed("generate"):
            groups = self.rollout.generate(own.token_ids, params)
        with self._timed("reward"):
            samples = self.judge.score(prompts, [(row, c) for row, g in zip(rows, groups, strict=True) for c in g])
        return penalize_length(samples, self.config.reward, config.max_new_tokens)

    def _greedy_rewards(self, prompts: Prompts) -> dict[int, float]:
        """The reward of the most likely answer to each prompt, where there is one."""
        samples = self._greedy(prompts, self.config.rollout.max_new_tokens, self.judge)
        samples = penalize_length(samples, self.config.reward, self.config.rollout.max_new_tokens)
        return {sample.row: sample.reward for sample in samples if sample.reward is not None}

    def _greedy(self, prompts: Prompts, max_new_tokens: int, judge: Judge) -> list[Sample]:
        """One most likely answer to each prompt, from all ranks."""
        rows = range(get_rank(), len(prompts), get_world_size())
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, stop=self.config.rollout.stop)
        with self._timed("generate"):
            groups = self.rollout.generate(prompts.select(rows).token_ids, params)
        return judge.score(prompts, [(row, group[0]) for row, group in zip(rows, groups, strict=True)])

    def _infer(self, batch: Batch) -> Batch:
        """Log-probabilities and values under the models as they are before the updates."""
        inferred = self.actor.infer(batch, self.objective.outputs) if self.objective.outputs else {}
        old_logprob_T = None if self.objective.on_policy else inferred.get("logprob", batch.rollout_logprob_T)
        batch = batch.replace(
            old_logprob_T=old_logprob_T, entropy_T=inferred.get("entropy"),
            sum_prob_squared_T=inferred.get("sum_prob_squared"),
        )  # fmt: skip
        if self.config.algorithm.kl_coef:
            batch = batch.replace(ref_logprob_T=self._reference_logprob(batch))
        if self.critic is not None:
            batch = batch.replace(value_T=self.critic.infer(batch, ("value",))["value"])
        return batch

    def _reference_logprob(self, batch: Batch) -> Tensor:
        if self.reference is not None:
            return self.reference.infer(batch, ("logprob",))["logprob"]
        with self.actor.disable_adapter():
            return self.actor.infer(batch, ("logprob",))["logprob"]

    def _update(self, batch: Batch, seed: int) -> dict[str, float]:
        """One optimizer step per mini-batch: first all of the critic's, then all of the policy's."""
        cut = partial(mini_batches, batch, self.config.algorithm, seed)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            with self.critic.train_mode():
                metrics = merge_metrics([self._critic_step(mini_batch) for mini_batch in cut()])
        with self.actor.train_mode():
            return metrics | merge_metrics([self._actor_step(mini_batch) for mini_batch in cut()])

    def _actor_step(self, mini_batch: Batch) -> dict[str, float]:
        metrics = self.actor.train_step(mini_batch, self.objective.policy_loss)
        if self.objective.on_policy:
            sums = {name: metrics.pop(name) for name in [*metrics] if name.startswith("mismatch_")}
            metrics |= mismatch_from_sums(sums)
        return metrics | self.objective.after_optimizer_step(metrics)

    def _critic_step(self, mini_batch: Batch) -> dict[str, float]:
        assert self.critic is not None
        values = self.critic.train_step(mini_batch, self.value_loss)
        moments = {name: torch.tensor(value) for name, value in values.items()}
        metrics = {f"critic_{name}": values[name] for name in ("grad_norm", "value_loss", "value_clip_share")}
        return metrics | {"critic_explained_variance": explained_variance(moments).item()}

    def _record(self, step: int, prompts: Prompts, samples: list[Sample], metrics: dict[str, float]) -> None:
        texts = self.tokenizer.batch_decode([s.completion.token_ids for s in samples], skip_special_tokens=True)
        for sample, text in zip(samples, texts, strict=True):
            self.log.sample(
                step + 1, prompt=prompts.texts[sample.row], completion=text, reward=sample.reward,
                finish_reason=sample.completion.finish_reason, weight_version=sample.completion.weight_version,
                **({"parts": sample.parts} if len(sample.parts) > 1 else {}),
            )  # fmt: skip
        if all(sample.reward is None for sample in samples):
            self.log.message(f"warning: step {step + 1}: the reward function left out every sample; nothing is learned")
        elif metrics["reward_std"] == 0:
            self.log.message(
                f"warning: step {step + 1}: all rewards are {metrics['reward_mean']:g}; there is nothing to learn from "
                "in this step (is the task too easy, too hard, or the reward function blind?)"
            )

    def _seed(self, step: int) -> int:
        return (self.config.seed * 1_000_003 + step) * 1_009 % 2**63

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[float, list[Sample]]:
        """Mean reward of greedy answers to the held-out prompts, and the answers."""
        assert self.held_out is not None
        assert self.config.evaluation is not None
        judge = self.evaluation_judge or self.judge
        samples = self._greedy(self.held_out, self.config.evaluation.max_new_tokens, judge)
        samples.sort(key=lambda sample: sample.row)
        scored = [sample.reward for sample in samples if sample.reward is not None]
        return (sum(scored) / len(scored) if scored else 0.0), samples

    def _examples(self, samples: list[Sample]) -> list[str]:
        texts = [sample.completion.token_ids for sample in samples[:_SHOWN_EXAMPLES]]
        return [text.strip() for text in self.tokenizer.batch_decode(texts, skip_special_tokens=True)]

    # ---- the run ------------------------------------------------------------------------------------------------

    def run(self, resume: bool = False) -> dict[str, Any]:
        """Trains, evaluates, saves and exports; returns what ``summary.json`` holds."""
        state = self._prepare(resume)
        handler = signal.signal(signal.SIGINT, self._request_stop)
        try:
            with self.log, self.checkpoints:
                return self._run(state)
        except RewardError:  # comes from a rollout or an evaluation: the models are as the last complete step left them
            self._save(state)
            self.log.message(f"the reward function failed after step {state['step']}: {self._saved()}")
            raise
        finally:
            for judge in filter(None, (self.judge, self.evaluation_judge)):
                judge.close()
            signal.signal(signal.SIGINT, handler)
            self.rollout.close()

    def _prepare(self, resume: bool) -> dict[str, Any]:
        """The folder and the state to start from; a run that does not resume replaces what an earlier one left."""
        state = self.checkpoints.load(self.engines) if resume else None
        if get_rank() == 0:
            if not resume:
                self.checkpoints.clear()
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.yaml").write_text(self.config.to_yaml())
        barrier()
        if resume and state is None:
            self.log.message(f"no checkpoint in {self.checkpoints.directory}: starting from the beginning")
        state = state or {
            "step": 0, "seconds": 0.0, "tokens": 0, "accuracy_before": None, "examples_before": None, "log_bytes": {},
            "objective": {},
        }  # fmt: skip
        self.objective.load_state(state["objective"])
        self.saved_step = self.rollout.weight_version = state["step"]
        self.log.rewind(state["step"], state["log_bytes"])
        return state

    def _run(self, state: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        for name, engine in self.engines.items():
            if engine.units:
                self.log.message(f"{name}: units of sharding\n{engine.units}")
        self.rollout.sync()
        if self.held_out is not None and state["accuracy_before"] is None:
            state["accuracy_before"], samples = self._evaluate_and_log(0)
            state["examples_before"] = self._examples(samples)
        stop = any_rank(self.stop_requested)  # agreed on, because a signal reaches the processes at different times
        while state["step"] < config.steps and not stop:
            metrics = self.train_step(state["step"])
            state["step"] += 1
            state["seconds"] += metrics["seconds"]
            state["tokens"] += round(metrics["tokens_per_second"] * metrics["seconds"])
            self.log.metrics(state["step"], metrics)
            step, done = state["step"], state["step"] == config.steps
            if config.evaluation and config.evaluation.every and step % config.evaluation.every == 0 and not done:
                self._evaluate_and_log(step)
            stop = any_rank(self.stop_requested)
            if done or stop or (config.checkpoint.every and step % config.checkpoint.every == 0):
                self._save(state, asynchronous=config.checkpoint.asynchronous and not done and not stop)
        if stop and state["step"] < config.steps:
            self.log.message(f"stopped after step {state['step']}: {self._saved()}")
            raise KeyboardInterrupt
        return self._finish(state)

    def _save(self, state: dict[str, Any], asynchronous: bool = False) -> None:
        """A checkpoint of the last complete step, unless there is one."""
        if state["step"] != self.saved_step:
            state |= {"log_bytes": self.log.num_bytes(), "objective": self.objective.state()}
            self.checkpoints.save(state["step"], self.engines, state, asynchronous=asynchronous)
            self.saved_step = state["step"]

    def _saved(self) -> str:
        if self.saved_step == 0:
            return "nothing was learned yet, so nothing is saved"
        return f"step {self.saved_step} is saved, continue with --resume"

    def _evaluate_and_log(self, step: int) -> tuple[float, list[Sample]]:
        accuracy, samples = self.evaluate()
        self.log.metrics(step, {"accuracy": accuracy})
        return accuracy, samples

    def _finish(self, state: dict[str, Any]) -> dict[str, Any]:
        export_hf(self.actor, self.directory / "hf", overwrite=True)
        summary: dict[str, Any] = {
            "steps": state["step"],
            "minutes": round(state["seconds"] / 60, 3),
            "tokens_per_second": round(state["tokens"] / max(state["seconds"], 1e-9), 1),
        }
        if self.held_out is not None:
            accuracy, samples = self._evaluate_and_log(state["step"])
            summary = {"accuracy_before": state["accuracy_before"], "accuracy_after": accuracy, **summary}
            rows = zip(self.held_out.texts, state["examples_before"], self._examples(samples), strict=False)
            self.log.table("held-out answers", ["prompt", "before", "after"], [list(row) for row in rows])
            self.log.message(
                f"held-out accuracy {state['accuracy_before']:.3f} -> {accuracy:.3f} "
                f"on {len(self.held_out)} problems, {summary['minutes']:.1f} minutes of training"
            )
        if get_rank() == 0:
            (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            if importlib.util.find_spec("matplotlib") is not None:
                plot_runs([self.directory], self.directory / "curve.png")
        return summary

    def _request_stop(self, _signal: int, _frame: FrameType | None) -> None:
        """The first Ctrl-C finishes the step and saves, the second one stops at once."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        self.log.message("stopping after this step, then saving (Ctrl-C again stops at once)")


def train(config: Config, resume: bool = False) -> dict[str, Any]:
    """Runs the configuration from its newest checkpoint (``resume``) or the beginning; returns the summary.

    From the beginning, checkpoints and logs of an earlier run in ``output_dir`` are replaced.
    """
    store = init_distributed(config.timeout_minutes)
    with naming_lost_ranks(store):
        return PPOTrainer(config).run(resume)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
