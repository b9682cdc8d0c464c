"""A run: the loop around a trainer's steps, and its folder with logs, checkpoints, weights and summary."""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlft_fast.cluster import HEAD, HeadLostError, WorkerError
from rlft_fast.config import Config, HeldOutConfig
from rlft_fast.engine import CheckpointError, is_export, remove_export, step_of
from rlft_fast.errors import Interrupted, RunError, StepError
from rlft_fast.files import replacing
from rlft_fast.models import name_some
from rlft_fast.run.copies import Copies
from rlft_fast.run.folder import claim, require_same, run_id
from rlft_fast.run.going_back import keep_later
from rlft_fast.run.lock import locked
from rlft_fast.run.profile import profiled
from rlft_fast.run.progress import Progress, as_json, measure_of_best, measure_of_evaluations
from rlft_fast.run.protocol import Evaluated, StepResult, Trainer
from rlft_fast.run.records import (
    RunLog,
    TrackedRun,
    Tracker,
    draw_timeline,
    merged,
    plot_runs,
    write_rollout,
    write_tokens,
)
from rlft_fast.run.store import Store, StoreError
from rlft_fast.world import SPANS, STOP, Span, World

_MAX_LOST = 3  # restarts of lost workers without a new checkpoint in between


class DivergedError(RunError):
    """Weights are not finite after a step."""


class Run:
    """All steps of a trainer, from the start or from a checkpoint.

    Args:
        trainer: in any state; a checkpoint puts it into that of its step.

    Attributes:
        progress: how far the run has come.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.config = trainer.config
        self.directory = Path(self.config.output_dir).absolute()  # a reward function may change the working directory
        self.checkpoints = trainer.models.checkpoints(self.directory / "checkpoints")
        self.log = RunLog(self.directory, self.config.steps, self.world.rank)
        self.progress = Progress()
        self.measure: dict[str, Any] | None = None  # of evaluations
        address = self.config.checkpoint.store
        has_copies = address is not None and self.world.is_first
        self.copies = Copies(Store(address), self.directory, self.log.message) if has_copies else None
        self.saved_step = 0  # what a checkpoint holds; step 0 needs none
        self.recorded = 0.0  # when the last step was recorded, in seconds since the epoch
        self.told_failure: BaseException | None = None
        self.is_hurried = dist.is_torchelastic_launched()  # torchrun kills its processes 30 s after a signal
        self.is_evaluating = False

    def run(self, resume: bool | str = False, *, force: bool = False) -> dict[str, Any]:
        """Trains, evaluates, saves and exports; returns what ``summary.json`` holds. Closes the trainer.

        Args:
            resume: see `train`.
            force: see `train`.
        """
        with contextlib.closing(self.trainer), self._locked():
            self._prepare(resume, force)
            return self._run_interruptibly()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder belongs to this run alone."""
        with contextlib.ExitStack() as stack:
            by_first(self.world, lambda: stack.enter_context(locked(self.directory)))
            yield

    # ---- the beginning ------------------------------------------------------------------------------------------

    def _prepare(self, resume: bool | str, force: bool) -> None:
        """The folder and the state to start from; a run that does not resume replaces what an earlier one left."""
        identity, step = self.trainer.identity(), self._step_to_resume(resume)
        self.measure = measure_of_evaluations(self.config, identity)
        if resume and not force and self.checkpoints.latest() is not None:
            by_first(self.world, lambda: require_same(self.directory, identity))
        state = self.checkpoints.load(self.trainer.models.trained, step) if resume else None
        if state is not None:  # which the trainer may refuse, before the folder changes
            self.trainer.load_state(Progress.of_checkpoint(state, self.config).trainer)
        goes_back = state is not None and step is not None and self._go_back(step, state)
        by_first(self.world, lambda: claim(self.directory, identity, resume=bool(resume) and not goes_back))
        if self.world.is_first:
            self._prepare_folder(bool(resume))
        self.world.barrier()
        if resume and state is None:
            self.log.message(f"no checkpoint in {self.checkpoints.directory}: starting from the beginning")
        self._begin(state)
        if goes_back:  # before a step: another machine would go on with the later steps
            by_first(self.world, self._copy)
        if self.world.is_first:
            self._send_to_trackers()

    def _step_to_resume(self, resume: bool | str) -> int | None:
        """The step of the checkpoint that a user has named; None: the newest, or none."""
        if not isinstance(resume, str):
            return None
        by_first(self.world, lambda: step_of(resume, self.checkpoints.directory))
        return step_of(resume, self.checkpoints.directory)

    def _go_back(self, step: int, state: dict[str, Any]) -> bool:
        """Moves what came after a checkpoint out of the way. Returns whether there was a later checkpoint.

        A best model of a later step is moved, too. Then ``state`` is made to know of no best model.
        """
        later = self.checkpoints.after(step)
        progress, best = Progress.of_checkpoint(state, self.config), self.config.checkpoint.best
        is_beaten = best is not None and progress.is_beaten(best, self.directory)
        ((has_later, is_beaten), *_) = self.world.all_gather_json([bool(later), is_beaten])

        def move() -> None:
            kept = keep_later(self.directory, step, later, best=is_beaten)
            self.log.message(
                f"going back to step {step}: everything of later steps, such as {later[-1].name}, is kept in {kept}, "
                "which can be viewed, plotted and exported as a run"
            )

        if has_later:
            by_first(self.world, move)
            state["best"] = None if is_beaten else state.get("best")
        return has_later

    def _prepare_folder(self, resume: bool) -> None:
        if self.checkpoints.latest() is None and (kept := self.log.set_aside()):
            self.log.message(f"logs of a run that saved no checkpoint are kept as {' and '.join(kept)}")
        if resume:
            self.checkpoints.remove_leftovers()
        else:
            self.checkpoints.clear()
            remove_export(self.directory / "best")
        with replacing(self.directory / "config.yaml") as file:
            file.write_text(self.config.to_yaml(Path.cwd()), encoding="utf-8")
        (self.directory / "summary.json").unlink(missing_ok=True)  # of a run that ended, which this one has not

    def _send_to_trackers(self) -> None:
        config = self.config.model_dump(mode="json")
        tracked = TrackedRun(self.directory, run_id(self.directory) or "", self.progress.step, config)
        names = [name for name in dict.fromkeys(self.config.log) if name != "jsonl"]
        num_texts = self.config.log_texts if isinstance(self.config, Config) else 0
        self.log.send_to([Tracker(name, tracked, self.log.message) for name in names], num_texts)

    def _begin(self, state: dict[str, Any] | None) -> None:
        """Puts progress, trainer and logs into the state of a checkpoint, or into that of the beginning."""
        self.progress = progress = Progress.of_checkpoint(state, self.config)
        best = progress.best if is_export(self.directory / "best") else None  # then the best from now on is kept
        progress.best = self.world.all_gather_json(best)[0]  # ranks may have started in other folders
        if progress.measure_by(self.measure):
            self.log.message(
                "the held-out rows, or how they are measured, are others than before: the numbers before training are "
                f"those of step {progress.step}"
            )
        self.saved_step = progress.step
        self.trainer.load_state(progress.trainer)
        self.trainer.load_ahead(state or {})
        self.log.rewind(progress.step, progress.log_bytes)

    def _start_again(self, lost: WorkerError) -> None:
        """New workers, and the state of the newest checkpoint."""
        self.log.message(f"warning: {lost}. Starting new workers")
        try:
            self.trainer.restart()
        except ValueError as error:
            raise RunError(f"{lost}; new workers cannot start: {error}") from error
        self.checkpoints = self.trainer.models.checkpoints(self.checkpoints.directory)
        self._begin(self.checkpoints.load(self.trainer.models.trained))
        self.log.message(f"new workers continue after step {self.progress.step}")

    # ---- the steps ----------------------------------------------------------------------------------------------

    def _run_interruptibly(self) -> dict[str, Any]:
        num_lost, lost = 0, None
        with self.log, STOP.listening(self._announce_stop), HEAD.listening(self._announce_loss):
            while True:
                saved_before = self.checkpoints.latest()
                try:
                    if lost is not None:
                        self._start_again(lost)
                    with self._copied(), self.checkpoints:
                        return self._run_or_save()
                except WorkerError as error:
                    if not HEAD.answers():
                        self.log.message(f"the workers are lost, too: {self._saved()}")
                    HEAD.require()
                    num_lost = 1 if self.checkpoints.latest() != saved_before else num_lost + 1
                    if num_lost > _MAX_LOST:
                        raise
                    lost = error

    @contextlib.contextmanager
    def _copied(self) -> Iterator[None]:
        """At the end, the store has what the folder has; not after a second Ctrl-C, since a copy may take minutes."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
                raise
            try:
                self._copy()
            except StoreError as failure:
                self.log.message(f"warning: {failure}")  # the first error is the one to raise
            raise
        self._copy()

    def _copy(self) -> None:
        if self.copies is not None:
            self.copies.copy(self.checkpoints.latest())

    def _run_or_save(self) -> dict[str, Any]:
        try:
            return self._run()
        except (Interrupted, HeadLostError):  # only where the models are as the last step left them
            self._save()
            self.log.message(f"stopped after step {self.progress.step}: {self._saved()}")
            raise
        except StepError as error:
            step = self.progress.step
            try:
                if self.trainer.is_after(step) and not error.is_divergence:
                    self._save(waits=False)  # samples of coming steps may never come
                saved = self._saved()
            except (DivergedError, CheckpointError) as failure:  # the first error is the one to raise
                saved = str(failure)
            if error.is_divergence and 0 < step == self.saved_step and self._is_written():
                newest = self.checkpoints.latest()
                saved = f"{newest} has the weights of that step, remove it to continue from an older one"
            self.log.message(f"the {error.part} failed after step {step}: {saved}")
            raise

    def _run(self) -> dict[str, Any]:
        config, progress = self.config, self.progress
        for note in self.trainer.notes():
            self.log.message(note)
        SPANS.take()  # of the beginning
        self.recorded = time.time()
        self.trainer.start(progress.step)
        STOP.can_leave = self.is_hurried
        if config.evaluation is not None and progress.before is None:
            found = self._evaluate()
            progress.before, progress.examples_before = as_json(found.metrics), found.examples
        self._evaluate_if_due()  # the judge may have failed at it, and the run goes on from there
        while progress.step < config.steps:
            STOP.raise_if_asked(self.world)
            with profiled(config.profile, self.directory, progress.step + 1, self.world):
                result = self.trainer.train_step(progress.step, progress.num_prompts)
            progress.add_step(result.metrics, result.num_prompts)
            progress.trainer = self.trainer.state()
            STOP.can_leave = self.is_hurried
            self._record(result)
            self._evaluate_if_due()  # before the checkpoint, which then knows of the best policy
            self._tell_failed_save()
            done = progress.step == config.steps
            self._begin_copy(before_save=True)
            if done or (config.checkpoint.every and progress.step % config.checkpoint.every == 0):
                self._save(asynchronous=config.checkpoint.asynchronous and not done)
            self._begin_copy(before_save=False)
        return self._finish()

    def _record(self, result: StepResult) -> None:
        """Writes the samples and numbers of the step, and warns of what users should look at."""
        number, num_samples = self.progress.step, 0
        if self.world.is_first:
            for num_samples, record in enumerate(result.records, start=1):  # noqa: B007 (read below)
                self.log.sample(number, **record)
        with self._telling(f"step {number}: numbers of its tokens are not kept"):
            if result.tokens is not None:
                write_tokens(self.directory, number, result.tokens, num_samples)
        with self._telling(f"step {number}: its samples are not kept"):
            if result.samples is not None:
                write_rollout(self.directory, number, result.samples)
        for warning in result.warnings:
            self.log.message(f"warning: step {number}: {warning}")
        self.log.metrics(number, result.metrics)
        self._record_spans(number)

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """A file that cannot be written costs a warning."""
        try:
            yield
        except OSError as error:
            self.log.message(f"warning: {what}: {error}")

    def _record_spans(self, number: int) -> None:
        """Writes when the ranks, and the workers that they drive, have worked since the last step was recorded."""
        own = merged(SPANS.take())
        found = [
            Span(phase, worker or f"rank {rank}", start, end)
            for rank, spans in enumerate(self.world.all_gather_json(own))
            for phase, worker, start, end in spans
        ]
        start, self.recorded = self.recorded, time.time()
        self.log.spans(number, start, self.recorded, found)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _save(self, *, asynchronous: bool = False, waits: bool = True) -> None:
        """A checkpoint of the last complete step, unless there is one; `Trainer.ahead` says what ``waits`` is."""
        progress = self.progress
        if progress.step == self.saved_step and self._is_written():
            return
        self._require_finite(progress.step)
        progress.log_bytes = self.log.num_bytes()
        if self.copies is not None:
            self.copies.wait()  # a save may remove the folder that is copied
        trained = self.trainer.models.trained
        state = progress.state() | self.trainer.ahead(waits=waits and not self.is_hurried)
        self.checkpoints.save(progress.step, trained, state, asynchronous=asynchronous)
        self.saved_step = progress.step

    def _begin_copy(self, *, before_save: bool) -> None:
        """Begins to copy the newest checkpoint.

        The store gets it while the next one is written. A save that may remove it waits for the copy, which then begins
        before the save.
        """
        kept = self.config.checkpoint
        may_go = kept.max_num == 1 or kept.max_mem is not None
        if self.copies is not None and before_save == may_go:
            self.copies.begin(self.checkpoints.latest())

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

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        """Every so many steps, and at the last step; each of them once."""
        evaluation, progress = self.config.evaluation, self.progress
        is_last = progress.step >= self.config.steps  # fewer than it has made, where a resumed run was given fewer
        due = evaluation is not None and (is_last or (evaluation.every and progress.step % evaluation.every == 0))
        if due and (progress.evaluated < progress.step or (is_last and progress.after is None)):
            found = self._evaluate()
            progress.after, progress.examples_after = as_json(found.metrics), found.examples
            progress.num_scored = found.num_scored

    def _evaluate(self) -> Evaluated:
        """Evaluates the model, and exports it if it is the best so far.

        A signal ends the evaluation at once, because nothing is lost: a run that goes on evaluates again.
        """
        STOP.can_leave = self.is_evaluating = True
        try:
            found, progress = self.trainer.evaluate(), self.progress
        finally:
            STOP.can_leave, self.is_evaluating = self.is_hurried, False
        if found.metrics:
            self.log.metrics(progress.step, found.metrics)
        progress.evaluated = progress.step
        name = self.config.checkpoint.best or ""
        value = found.metrics.get(name)
        if progress.is_best(name, value):
            if self.copies is not None:
                self.copies.wait()  # the export replaces a folder that is copied
            try:
                self.trainer.models.export(self.directory / "best")
                progress.best = {"step": progress.step, "value": value, **measure_of_best(self.config)}
            except CheckpointError as error:  # on all ranks; a copy is no reason to end a run
                self.log.message(f"warning: the best policy so far, of step {progress.step}, is not kept: {error}")
        return found

    # ---- the end ------------------------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any]:
        self.trainer.models.export(self.directory / "hf")
        summary = self.progress.summary(self.config)
        if self.world.is_first:
            with replacing(self.directory / "summary.json") as file:
                file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            if importlib.util.find_spec("matplotlib") is not None:
                self._draw("curve.png", lambda path: plot_runs([self.directory], path))
                self._draw("timeline.png", lambda path: draw_timeline(self.directory, path))
        if self.config.evaluation is not None:
            self._show_evaluation(self.config.evaluation)
        self.log.message(f"the model is in {self.directory / 'hf'}, numbers and samples of each step beside it")
        return summary

    def _show_evaluation(self, evaluation: HeldOutConfig) -> None:
        progress, name = self.progress, evaluation.kinds[0]
        if self.trainer.example_prompts:
            answers = (progress.examples_before or [], progress.examples_after or [])
            rows = zip(self.trainer.example_prompts, *answers, strict=False)
            self.log.table("held-out answers", ["prompt", "before", "after"], [list(row) for row in rows])
        before, after = (_three_digits((found or {}).get(name)) for found in (progress.before, progress.after))
        self.log.message(
            f"held-out {name.removeprefix('held_out_')} {before} -> {after} on {progress.num_scored} problems, "
            f"{progress.seconds / 60:.1f} minutes of training"
        )

    def _draw(self, name: str, draw: Callable[[Path], object]) -> None:
        try:
            draw(self.directory / name)
        except Exception as error:  # the run is finished, and its picture can be drawn again
            warnings.warn(f"{name} cannot be drawn: {error} (rlft-fast plot {self.directory})", stacklevel=2)

    # ---- signals ------------------------------------------------------------------------------------------------

    def _announce_loss(self, loss: HeadLostError) -> None:
        self.log.announce(f"{loss}. The run stops after this step, then saves")
        STOP.reason = loss

    def _announce_stop(self, number: int) -> None:
        """What the first signal leads to."""
        if number == signal.SIGHUP:
            _outlive_terminal()
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.is_evaluating:
            then = "leaving this evaluation, then saving the last step (a run that goes on evaluates again)"
        elif not self.is_hurried:
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


def by_first(world: World, action: Callable[[], object]) -> None:
    """Acts on the first process. If the action raises a ValueError or an OSError, every process raises it."""
    world.together(lambda: world.is_first and action(), ValueError, OSError)


def _three_digits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _outlive_terminal() -> None:
    """Where the terminal is gone, writing to it would be an error, and end the run before it has saved."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nowhere:  # it may be closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(nowhere.fileno(), descriptor)
