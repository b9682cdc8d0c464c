"""Runs a configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft_fast.config import Config, RunConfig, TaughtConfig, run_roles, value_at
from rlft_fast.models import load_tokenizer
from rlft_fast.run import (
    Run,
    RunLog,
    Store,
    Trainer,
    by_first,
    require_replayable,
    require_restartable,
    require_same,
    require_trackers,
    require_usable,
)
from rlft_fast.trainer.dtypes import settle_compute_dtype
from rlft_fast.trainer.inputs import identity_of
from rlft_fast.trainer.ppo import PPOTrainer
from rlft_fast.trainer.prompts import load_data
from rlft_fast.trainer.supervised import RowsData, RowsTrainer, rows_identity
from rlft_fast.world import World, init_distributed, keep_freed_memory, naming_lost_ranks


def train(
    config: RunConfig, resume: bool | str = False, *, force: bool = False, replay: Path | None = None
) -> dict[str, Any]:
    """Runs the configuration from its newest checkpoint (``resume``) or the beginning; returns the summary.

    From the beginning, checkpoints and logs of an earlier run in ``output_dir`` are replaced; logs of a run that saved
    no checkpoint are kept under other names. A run that is finished is not run again. On a CPU this process keeps the
    memory that it frees, see `keep_freed_memory`.

    Args:
        config: the run.
        resume: continue from the newest checkpoint, if there is one; or from the checkpoint of this name, such as
            ``step_00000020``. Then everything of later steps is kept in the folder ``later.1`` of ``output_dir``. What
            the folder lacks comes from ``checkpoint.store``, which then goes back, too.
        force: also with other data, models or settings than the run had before.
        replay: folder of a run of this configuration, but for ``output_dir``, that has kept its samples with
            ``log_samples``. The steps learn from them, and repeat its numbers without its generator.

    Raises:
        ModuleNotFoundError: a tracker is not installed.
        ValueError: there is no checkpoint of this name, models, data or reward function cannot be used, ``output_dir``
            is not a run's or holds what this run reads, another run is writing to it, the run to resume had other data,
            models or settings, except those that are marked `MayChange`, or torchrun would restart a run that does not
            resume.
        RewardError: the reward function failed; a checkpoint holds the last complete step.
        AdvantageError: an advantage of one's own failed; likewise.
        PolicyLossError: a policy loss of one's own failed; likewise, if one process trains, and no model had made an
            optimizer step in the update.
        RolloutError: the generator failed twice. If it failed while it sampled, a checkpoint holds the last complete
            step, unless logits were not finite.
        DivergedError: weights are not finite after a step; the checkpoint before it is the newest.
        WorkerError: workers on a cluster died, again and again; the newest checkpoint is as it was.
        StoreError: ``checkpoint.store`` cannot be read, or did not take the end of the run, which the folder holds.
        HeadLostError: the head of the cluster is gone; a checkpoint holds the last complete step, if the workers lived.
        Interrupted: SIGINT (Ctrl-C), SIGTERM or SIGHUP stopped it; likewise. It is a KeyboardInterrupt.
        KeyboardInterrupt: a second Ctrl-C stopped it at once; the newest checkpoint is as it was.
    """
    world = init_distributed(config.timeout_minutes)
    if world.device.type == "cpu":
        keep_freed_memory()
    with naming_lost_ranks(world):
        require_usable(config, resume=bool(resume))
        require_restartable(resume=resume)
        require_trackers(config.log)
        if replay is not None:
            require_replay(config, replay)
        if config.checkpoint.store is not None:
            store = Store(config.checkpoint.store)
            by_first(world, lambda: _meet_store(store, Path(config.output_dir), resume))
        config = _settled(config, world, resume=bool(resume))
        if resume is True and (summary := _finished(config)) is not None:
            return _same_again(config, summary, world, force=force)
        return Run(_trainer(config, world, replay)).run(resume, force=force)


def require_replay(config: RunConfig, run: Path) -> None:
    """Raises ValueError where the samples of a run cannot be learned from again."""
    if not isinstance(config, Config):
        raise ValueError(f"objective {config.objective} learns from rows, not from samples: leave --replay out")
    if config.cluster is not None:
        raise ValueError("a replay trains in processes of its own: set cluster to null")
    require_replayable(run, config.steps, Path(config.output_dir))


def _meet_store(store: Store, output: Path, resume: bool | str) -> None:
    """Brings what the folder lacks of the run to resume. Refuses a store that holds another run."""
    store.require_own(output, resume=bool(resume))
    if resume:
        store.fetch(output, resume if isinstance(resume, str) else None)


def _settled(config: RunConfig, world: World, *, resume: bool) -> RunConfig:
    """The configuration with the dtypes that the CPUs decide, which are logged."""
    settled = settle_compute_dtype(config, world, resume=resume)
    if settled != config:
        names = [name for name in run_roles(config) if value_at(settled, name) != value_at(config, name)]
        log = RunLog(Path(config.output_dir), config.steps, world.rank)
        log.message(f"computes in bfloat16, as {', '.join(f'{name}.compute_dtype' for name in names)} is auto")
    return settled


def _trainer(config: RunConfig, world: World, replay: Path | None) -> Trainer:
    if isinstance(config, TaughtConfig):
        return RowsTrainer(config, world)
    assert isinstance(config, Config)
    return PPOTrainer(config, world, replay)


def _identity(config: RunConfig) -> Mapping[str, Any]:
    """`Trainer.identity`, without models."""
    if isinstance(config, TaughtConfig):
        return rows_identity(config, RowsData.load(config))
    assert isinstance(config, Config)
    return identity_of(config, *load_data(config, load_tokenizer(config.model)))


def _finished(config: RunConfig) -> dict[str, Any] | None:
    """What the run in ``output_dir`` ended with, if it has done all its steps."""
    try:
        summary = json.loads((Path(config.output_dir) / "summary.json").read_text(encoding="utf-8"))
        return summary if summary["steps"] >= config.steps else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_again(config: RunConfig, summary: dict[str, Any], world: World, *, force: bool) -> dict[str, Any]:
    """Logs that the run is finished and returns its summary. Raises ValueError for the configuration of another run."""
    directory = Path(config.output_dir)
    if not force:
        identity = _identity(config)
        by_first(world, lambda: require_same(directory, identity))
    log = RunLog(directory, config.steps, world.rank)
    log.message(f"the run in {directory} is finished, with {summary['steps']} steps: to go on, raise steps")
    return summary
