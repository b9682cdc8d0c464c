"""A run: the loop around `PPOTrainer.train_step`, and its folder with logs, checkpoints, weights and summary."""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlft_fast.cluster import WorkerError
from rlft_fast.config import Config
from rlft_fast.data import Samples
from rlft_fast.engine import CheckpointError, remove_export
from rlft_fast.errors import Interrupted, RunError
from rlft_fast.models import load_tokenizer, name_some
from rlft_fast.rewards import RewardError
from rlft_fast.rl import AdvantageError
from rlft_fast.rollout import NonFiniteLogitsError, RolloutError
from rlft_fast.trainer.folder import claim, identity_of, require_same, require_usable, run_id
from rlft_fast.trainer.inputs import load_data
from rlft_fast.trainer.lock import locked
from rlft_fast.trainer.log import RunLog, sample_records
from rlft_fast.trainer.plot import plot_runs
from rlft_fast.trainer.ppo import PPOTrainer, StepResult
from rlft_fast.trainer.tokens import write_tokens
from rlft_fast.trainer.trackers import TrackedRun, Tracker, require_trackers
from rlft_fast.world import STOP, World, init_distributed, naming_lost_ranks

_SHOWN_EXAMPLES = 3
_MAX_LOSSES = 3  # in a row that are made good, without a checkpoint between two of them
_MAY_FAIL = {RewardError: "reward function", AdvantageError: "advantage", RolloutError: "generator"}


def train(config: Config, resume: bool = False, *, force: bool = False) -> dict[str, Any]:
    """Runs the configuration from its newest checkpoint (``resume``) or the beginning; returns the summary.

    From the beginning, checkpoints and logs of an earlier run in ``output_dir`` are replaced; logs of a run that saved
    no checkpoint are kept under other names. A run that is finished is not run again.

    Args:
        config: the run.
        resume: continue from the newest checkpoint, if there is one.
        force: also with other data, models or settings than the run had before.

    Raises:
        ModuleNotFoundError: a tracker is not installed.
        ValueError: models, data or reward function cannot be used, ``output_dir`` is not a run's or holds what this run
            reads, another run is writing to it, or the run to resume had other data, models or settings, except those
            that are marked `MayChange`.
        RewardError: the reward function failed; a checkpoint holds the last complete step.
        AdvantageError: an advantage of one's own failed; likewise.
        RolloutError: the generator failed, and again after a restart; likewise, if it was while it sampled.
            Logits that are not finite save nothing.
        DivergedError: weights are not finite after a step; the checkpoint before it is the newest.
        WorkerError: workers on a cluster died, again and again; the newest checkpoint is as it was.
        Interrupted: SIGINT (Ctrl-C), SIGTERM or SIGHUP stopped it; likewise. It is a KeyboardInterrupt.
        KeyboardInterrupt: a second Ctrl-C stopped it at once; the newest checkpoint is as it was.
    """
    world = init_distributed(config.timeout_minutes)
    with naming_lost_ranks(world):
        require_usable(config, resume=resume)
        require_trackers(config.log)
        if resume and (summary := _finished(config)) is not None:
            return _same_again(config, summary, world, force=force)
        return Run(PPOTrainer(config, world)).run(resume, force=force)


def _finished(config: Config) -> dict[str, Any] | None:
    """What the run in ``output_dir`` ended with, if it has done all its steps."""
    try:
        summary = json.loads((Path(config.output_dir) / "summary.json").read_text(encoding="utf-8"))
        return summary if summary["steps"] >= config.steps else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_again(config: Config, summary: dict[str, Any], world: World, *, force: bool) -> dict[str, Any]:
    """The summary of a finished run, which is said; raises ValueError if this configuration is of another run."""
    directory = Path(config.output_dir)
    if not force:
        prompts, held_out = load_data(config, load_tokenizer(config.model))
        _by_first(world, lambda: require_same(directory, identity_of(config, prompts, held_out)))
    log = RunLog(directory, config.steps, world.rank)
    log.message(f"the run in {directory} is finished, with {summary['steps']} steps: to go on, raise steps")
    return summary


class DivergedError(RunError):
    """Weights are not finite after a step."""


class Run:
    """All steps of a trainer, from the start or from a checkpoint.

    Args:
        trainer: in any state; a checkpoint puts it into that of its step.
    """

    def __init__(self, trainer: PPOTrainer) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.config = trainer.config
        self.directory = Path(self.config.output_dir)
        self.checkpoints = trainer.models.checkpoints(self.directory / "checkpoints")
        self.log = RunLog(self.directory, self.config.steps, self.world.rank)
        self.saved_step = 0  # what a checkpoint holds; step 0 needs none
        self.told_failure: BaseException | None = None
        self.is_hurried = dist.is_torchelastic_launched()  # torchrun kills its processes 30 s after a signal

    def run(self, resume: bool = False, *, force: bool = False) -> dict[str, Any]:
        """Trains, evaluates, saves and exports; returns what ``summary.json`` holds. Closes the trainer.

        Args:
            resume: see `train`.
            force: see `train`.
        """
        with contextlib.closing(self.trainer), self._locked():
            return self._run_interruptibly(self._prepare(resume, force))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder belongs to this run alone."""
        with contextlib.ExitStack() as stack:
            _by_first(self.world, lambda: stack.enter_context(locked(self.directory)))
            yield

    def _run_interruptibly(self, state: dict[str, Any]) -> dict[str, Any]:
        losses, loss = 0, None
        with self.log, STOP.listening(self._announce_stop):
            while True:
                saved_before = self.checkpoints.latest()
                try:
                    if loss is not None:
                        state = self._start_again(loss)
                    with self.checkpoints:
                        return self._run_or_save(state)
                except WorkerError as error:
                    losses = 1 if self.checkpoints.latest() != saved_before else losses + 1
                    if losses > _MAX_LOSSES:
                        raise
                    loss = error

    def _start_again(self, loss: WorkerError) -> dict[str, Any]:
        """New workers, and the state of the newest checkpoint."""
        self.log.message(f"warning: {loss}. Starting new workers")
        self.trainer.restart()
        self.checkpoints = self.trainer.models.checkpoints(self.checkpoints.directory)
        state = self._begin(self.checkpoints.load(self.trainer.models.trained))
        self.log.message(f"new workers continue after step {state['step']}")
        return state

    def _run_or_save(self, state: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._run(state)
        except Interrupted:  # only where the models are as the last step left them
            self._save(state)
            self.log.message(f"stopped after step {state['step']}: {self._saved()}")
            raise
        except tuple(_MAY_FAIL) as error:
            diverged = isinstance(error, NonFiniteLogitsError)
            # The models are as the last step left them; otherwise the generator failed while it took their weights.
            intact = self.trainer.rollout.weight_version == state["step"] + 1
            if intact and not diverged:
                with contextlib.suppress(DivergedError):  # the first error is the one to raise
                    self._save(state)
            what = next(name for kind, name in _MAY_FAIL.items() if isinstance(error, kind))
            saved = self._saved()
            if diverged and 0 < state["step"] == self.saved_step and self._is_written():
                newest = self.checkpoints.latest()
                saved = f"{newest} has the weights of that step, remove it to continue from an older one"
            self.log.message(f"the {what} failed after step {state['step']}: {saved}")
            raise

    def _prepare(self, resume: bool, force: bool) -> dict[str, Any]:
        """The folder and the state to start from; a run that does not resume replaces what an earlier one left."""
        identity = identity_of(self.config, self.trainer.prompts, self.trainer.held_out)
        if resume and not force and self.checkpoints.latest() is not None:
            _by_first(self.world, lambda: require_same(self.directory, identity))
        state = self.checkpoints.load(self.trainer.models.trained) if resume else None
        _by_first(self.world, lambda: claim(self.directory, identity, resume=resume))
        if self.world.is_first:
            if self.checkpoints.latest() is None and (kept := self.log.set_aside()):
                self.log.message(f"logs of a run that saved no checkpoint are kept as {' and '.join(kept)}")
            if resume:
                self.checkpoints.remove_leftovers()
            else:
                self.checkpoints.clear()
                remove_export(self.directory / "best")
            (self.directory / "config.yaml").write_text(self.config.to_yaml(), encoding="utf-8")
            (self.directory / "summary.json").unlink(missing_ok=True)  # of a run that ended, which this one has not
        self.world.barrier()
        if resume and state is None:
            self.log.message(f"no checkpoint in {self.checkpoints.directory}: starting from the beginning")
        state = self._begin(state)
        if self.world.is_first:
            tracked = TrackedRun(
                self.directory, run_id(self.directory) or "", state["step"], self.config.model_dump(mode="json")
            )
            names = [name for name in dict.fromkeys(self.config.log) if name != "jsonl"]
            trackers = [Tracker(name, tracked, self.log.message) for name in names]
            self.log.send_to(trackers, self.config.log_texts)
        return state

    def _begin(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """The state of a checkpoint, completed, or that of the beginning; trainer and logs are put into it."""
        beginning: dict[str, Any] = {
            "step": 0, "num_prompts": None, "seconds": 0.0, "tokens": 0, "evaluated": 0, "before": None,
            "examples_before": None, "after": None, "examples_after": None, "num_scored": 0, "log_bytes": {},
            "objective": {}, "best": None,
        }  # fmt: skip
        state = beginning | (state or {})
        if state["before"] is None and state.get("accuracy_before") is not None:  # a checkpoint of an early version
            state["before"] = {"accuracy": state["accuracy_before"]}
        if state["num_prompts"] is None:  # in earlier versions the prompts of a step had room for all its refills
            room = self.config.rollout.prompts_per_step * (1 + self.config.algorithm.max_refills)
            state["num_prompts"] = state["step"] * room
        if state["best"] is not None and not self._measure_of_best().items() <= state["best"].items():
            state["best"] = None
        self.trainer.objective.load_state(state["objective"])
        self.saved_step = self.trainer.rollout.weight_version = state["step"]
        self.log.rewind(state["step"], state["log_bytes"])
        return state

    def _run(self, state: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        for name, engine in self.trainer.models.trained.items():
            if units := engine.facts.units:
                self.log.message(f"{name}: units of sharding\n{units}")
        self.trainer.rollout.sync()
        STOP.can_leave = self.is_hurried
        if self.trainer.held_out and state["before"] is None:
            state["before"], samples = self._evaluate_and_log(state)
            state["examples_before"] = self._examples(samples)
        self._evaluate_if_due(state)  # the judge may have failed at it, and the run goes on from there
        while state["step"] < config.steps:
            STOP.raise_if_asked(self.world)
            done_step = self.trainer.train_step(state["step"], state["num_prompts"])
            state["step"] += 1
            state["num_prompts"] += len(done_step.prompts)
            state["objective"] = self.trainer.objective.state()
            STOP.can_leave = self.is_hurried
            self._record(state["step"], done_step)
            metrics = done_step.metrics
            state["seconds"] += metrics["seconds"]
            state["tokens"] += round(metrics["tokens_per_second"] * metrics["seconds"])
            self.log.metrics(state["step"], metrics)
            step, done = state["step"], state["step"] == config.steps
            self._evaluate_if_due(state)  # before the checkpoint, which then knows of the best policy
            self._tell_failed_save()
            if done or (config.checkpoint.every and step % config.checkpoint.every == 0):
                self._save(state, asynchronous=config.checkpoint.asynchronous and not done)
        return self._finish(state)

    def _record(self, number: int, step: StepResult) -> None:
        """Writes the samples of a step, counted from 1, and warns of rewards that tell no answer from another."""
        samples = step.samples
        for record in sample_records(samples, step.prompts, self.trainer.judge.texts(samples)):
            self.log.sample(number, **record)
        if step.tokens is not None:
            try:
                write_tokens(self.directory, number, step.tokens, len(samples))
            except OSError as error:
                self.log.message(f"warning: step {number}: numbers of its tokens are not kept: {error}")
        if not samples.has_reward_B.any():
            self.log.message(f"warning: step {number}: the reward function left out every sample; nothing is learned")
        elif step.metrics["reward_std"] == 0:
            self.log.message(
                f"warning: step {number}: all rewards are {step.metrics['reward_mean']:g}, which tells no answer from "
                "another (is the task too easy, too hard, or the reward function blind?)"
            )

    def _save(self, state: dict[str, Any], asynchronous: bool = False) -> None:
        """A checkpoint of the last complete step, unless there is one."""
        if state["step"] == self.saved_step and self._is_written():
            return
        self._require_finite(state["step"])
        state["log_bytes"] = self.log.num_bytes()
        self.checkpoints.save(state["step"], self.trainer.models.trained, state, asynchronous=asynchronous)
        self.saved_step = state["step"]

    def _require_finite(self, step: int) -> None:
        """A checkpoint that no run could continue from must not become the newest."""
        for name, engine in self.trainer.models.trained.items():
            if bad := engine.non_finite_weights():
                raise DivergedError(
                    f"step {step} is not saved, because weights of the {name} are not finite ({name_some(bad)}): "
                    f"{self.trainer.models.divergence(name)}; {self._saved()}"
                )

    def _tell_failed_save(self) -> None:
        """Says once that an asynchronous save has failed, not as late as at the next save."""
        failure = self.checkpoints.failure()
        if failure is not None and failure is not self.told_failure:
            self.log.message(f"warning: {failure}. The next checkpoint is tried all the same")
        self.told_failure = failure

    def _is_written(self) -> bool:
        """Whether the last save ended well, for which it waits."""
        try:
            self.checkpoints.wait()
        except CheckpointError as failure:
            warnings.warn(f"{failure}. It is tried once more", stacklevel=2)
            return False
        return True

    def _saved(self) -> str:
        if self.saved_step == 0:
            return "nothing was learned yet, so nothing is saved"
        export = f"rlft-fast export {shlex.quote(str(self.directory))}"
        return (
            f"step {self.saved_step} is saved in {self.directory}, continue with --resume; `{export}` writes its model "
            "as a Hugging Face folder"
        )

    def _evaluate_if_due(self, state: dict[str, Any]) -> None:
        """Every so many steps, and at the last step; each of them once."""
        evaluation, step = self.config.evaluation, state["step"]
        is_last = step == self.config.steps
        due = evaluation is not None and (is_last or (evaluation.every and step % evaluation.every == 0))
        if due and (state["evaluated"] < step or (is_last and state["after"] is None)):
            state["after"], samples = self._evaluate_and_log(state)
            state["examples_after"] = self._examples(samples)
            state["num_scored"] = sum(len(found.row_B[found.has_reward_B].unique()) for found in samples.values())

    def _evaluate_and_log(self, state: dict[str, Any]) -> tuple[dict[str, float], dict[str, Samples]]:
        metrics, samples = self.trainer.evaluate()
        if metrics:
            self.log.metrics(state["step"], metrics)
        state["evaluated"] = state["step"]
        value = metrics.get(self.config.checkpoint.best or "")
        if value is not None and (state["best"] is None or value > state["best"]["value"]):
            try:
                self.trainer.models.export(self.directory / "best")
                state["best"] = {"step": state["step"], "value": value, **self._measure_of_best()}
            except CheckpointError as error:  # on all ranks; a copy is no reason to end a run
                self.log.message(f"warning: the best policy so far, of step {state['step']}, is not kept: {error}")
        return metrics, samples

    def _measure_of_best(self) -> dict[str, Any]:
        """The number that decides, and how it is measured. Values of another measure are not compared."""
        evaluation = self.config.evaluation
        measured = None if evaluation is None else evaluation.model_dump(mode="json", exclude={"every"})
        if measured is not None:
            measured["max_new_tokens"] = self.config.max_evaluation_tokens
        return {"name": self.config.checkpoint.best, "measured": measured}

    def _examples(self, samples: dict[str, Samples]) -> list[str]:
        """The first answers to the first prompts of the first set."""
        first = next(iter(samples.values()))
        shown = first.token_ids((first.number_B == 0).nonzero().flatten()[:_SHOWN_EXAMPLES].tolist())
        return [text.strip() for text in self.trainer.tokenizer.batch_decode(shown, skip_special_tokens=True)]

    def _finish(self, state: dict[str, Any]) -> dict[str, Any]:
        self.trainer.models.export(self.directory / "hf")
        summary: dict[str, Any] = {
            "steps": state["step"],
            "minutes": round(state["seconds"] / 60, 3),
            "tokens_per_second": round(state["tokens"] / max(state["seconds"], 1e-9), 1),
        }
        if self.config.evaluation is not None:
            before, after = state["before"], state["after"]
            names, both = self.config.evaluation.metrics, {"before": before, "after": after}
            summary = {f"{name}_{when}": found.get(name) for name in names for when, found in both.items()} | summary
            if (best := state["best"]) is not None:
                summary |= {"best_step": best["step"], f"{best['name']}_best": best["value"]}
        if self.world.is_first:
            (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            if importlib.util.find_spec("matplotlib") is not None:
                self._draw(self.directory / "curve.png")
        if self.trainer.held_out:
            self._show_answers(state)
        self.log.message(f"the model is in {self.directory / 'hf'}, numbers and samples of each step beside it")
        return summary

    def _show_answers(self, state: dict[str, Any]) -> None:
        prompts = next(iter(self.trainer.held_out.values()))
        rows = zip(prompts.texts, state["examples_before"], state["examples_after"], strict=False)
        self.log.table("held-out answers", ["prompt", "before", "after"], [list(row) for row in rows])
        before, after = (_three_digits(state[when].get("accuracy")) for when in ("before", "after"))
        self.log.message(
            f"held-out accuracy {before} -> {after} on {state['num_scored']} problems, "
            f"{state['seconds'] / 60:.1f} minutes of training"
        )

    def _draw(self, path: Path) -> None:
        try:
            plot_runs([self.directory], path)
        except Exception as error:  # the run is finished, and its picture can be drawn again
            warnings.warn(f"{path.name} cannot be drawn: {error} (rlft-fast plot {self.directory})", stacklevel=2)

    def _announce_stop(self, number: int) -> None:
        """What the first signal leads to."""
        if number == signal.SIGHUP:
            _outlive_terminal()
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if not self.is_hurried:
            then = "stopping after this step, then saving (Ctrl-C again stops at once)"
        elif STOP.can_leave:
            then = "leaving this step, then saving the last complete one"
        else:
            newest = self.checkpoints.latest()
            then = (
                "finishing this step, which has changed the weights, then saving. torchrun waits 30 s for that; if it "
                f"takes longer, the newest checkpoint is {newest.name if newest else 'missing: none was saved yet'}"
            )
        self.log.announce(f"{what}: {then}")


def _by_first(world: World, action: Callable[[], object]) -> None:
    """Does something on the first process; where that is refused, no process goes on."""
    failure: Exception | None = None
    try:
        if world.is_first:
            action()
    except (ValueError, OSError) as error:
        failure = error
    if world.any_rank(failure is not None):
        raise failure or ValueError("output_dir cannot be used, as the first process says")


def _three_digits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _outlive_terminal() -> None:
    """Where the terminal is gone, writing to it would be an error, and end the run before it has saved."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nowhere:  # it may be closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(nowhere.fileno(), descriptor)
