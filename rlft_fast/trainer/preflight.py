"""Checks a run without loading weights: its folder, models, data, reward functions and trackers."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from rlft_fast.cluster import require_own_machine
from rlft_fast.config import Config, EngineConfig, RunConfig, SFTConfig, TaughtConfig, run_roles
from rlft_fast.engine import CheckpointManager, Schedule, check_names, find_start, require_trainable, step_of
from rlft_fast.errors import Checks
from rlft_fast.models import (
    RLModel,
    build_critic,
    build_policy,
    build_reward_model,
    check_loadable,
    check_routers,
    position_limit,
    require_positions,
)
from rlft_fast.rewards import weighted_sum
from rlft_fast.run import Store, require_restartable, require_same, require_trackers, require_usable
from rlft_fast.trainer.inputs import (
    Inputs,
    check_support,
    check_tokens,
    identity_of,
    load_inputs,
    require_equal_shares,
    require_generator_apart,
)
from rlft_fast.trainer.learn import check_embeddings
from rlft_fast.trainer.prompts import Prompts, named_sets
from rlft_fast.trainer.supervised import RowsData, check_row_lengths, check_row_tokens, rows_identity
from rlft_fast.world import World

_BUILDERS = {"critic.model": build_critic, "reward": build_reward_model}


def check_folder(
    config: RunConfig, checks: Checks, config_path: str | Path | None = None, *, resume: bool | str
) -> str:
    """Checks that a run can write its folder.

    Args:
        config: of the run.
        checks: gets what is found.
        config_path: see `require_usable`.
        resume: see `train`.

    Returns:
        What the run does with the folder.
    """
    output = Path(config.output_dir)
    checks.run(lambda: require_usable(config, config_path=config_path, resume=bool(resume)))
    checks.run(lambda: require_restartable(resume=resume))
    checks.run(lambda: require_trackers(config.log))
    address, stored = config.checkpoint.store, []
    if address is not None and (store := checks.run(lambda: Store(address))) is not None:
        checks.run(lambda: store.require_own(output, resume=bool(resume)))
        stored = (checks.run(store.checkpoints) if isinstance(resume, str) else None) or []
    manager = CheckpointManager(output / "checkpoints")
    checkpoint = manager.latest()
    if checkpoint is not None and not resume:
        error = ValueError(
            f"{output} holds a run with the checkpoint {checkpoint.name}: continue it with --resume, or set another "
            "output_dir, or delete the folder"
        )
        checks.found.append(error)
    if isinstance(resume, str):
        step = checks.run(lambda: step_of(resume, manager.directory, stored))
        checkpoint = checkpoint if step is None else Path(f"step_{step:08d}")
    return f"{output} can be written" + ("" if checkpoint is None else f"; the run continues after {checkpoint.name}")


def check_inputs(config: RunConfig, checks: Checks, *, resume: bool | str = False, force: bool = False) -> list[str]:
    """Checks everything that a run reads. The process must not have joined a process group.

    Args:
        config: of the run.
        checks: gets what is found.
        resume: see `train`.
        force: see `train`.

    Returns:
        A line on each part that can be used.
    """
    for path in config.start_folders.values():
        checks.run(partial(find_start, path))
    for role in run_roles(config).values():
        if role.trains and isinstance(role.config, EngineConfig):
            checks.run(partial(Schedule, role.config.optimizer, 1))
            if role.config.optimizer.name != "adamw":
                checks.run(partial(require_trainable, role.config.optimizer))
            checks.run(partial(check_names, role))
    if isinstance(config, TaughtConfig):
        return _check_rows(config, checks, resume=bool(resume) and not force)
    assert isinstance(config, Config)
    world = World.current()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    checks.run(lambda: require_equal_shares(config, world_size))
    checks.run(lambda: require_generator_apart(config, world_size, world.device.type))
    inputs = checks.run(lambda: load_inputs(config, world))
    lines, sizes = [], dict[str, int]()
    for key, path in config.model_folders.items():
        model = None if path is None else checks.run(partial(_buildable, key, path))
        if model is not None:
            lines.append(_described_model(key, model))
            sizes[key] = _num_embeddings(model)
            checks.run(partial(_check_fit, key, model, config, inputs, world))
            if key == "model":
                checks.run(partial(_check_experts, model, config))
    checks.run(partial(_check_teacher, config, sizes))
    if inputs is None:
        return lines
    if resume and not force:
        checks.run(lambda: _require_same(config, identity_of(config, inputs.prompts, inputs.held_out)))
    lines += [f"{name}: {_described(x)}" for name, x in named_sets(inputs.prompts, inputs.held_out).items()]
    reward = checks.run(lambda: _reward_of_first(inputs))
    return lines if reward is None else [*lines, f"reward: {reward}"]


def _check_rows(config: TaughtConfig, checks: Checks, *, resume: bool) -> list[str]:
    """`check_inputs` of a run that learns from rows."""
    if (cluster := config.cluster) is not None and cluster.address is None:
        checks.run(lambda: require_own_machine(cluster))
    lines, kind, teacher = [], "reward.model" if config.head == "score" else "model", None
    data, model = checks.run(lambda: RowsData.load(config)), checks.run(partial(_buildable, kind, config.model))
    if model is not None:
        lines.append(_described_model("model", model))
        checks.run(partial(_check_experts, model, config))
    if isinstance(config, SFTConfig) and config.teacher is not None:
        teacher = checks.run(partial(_buildable, "teacher.model", config.teacher.model))
        lines += [] if teacher is None else [_described_model("teacher.model", teacher)]
        found = {"model": model, "teacher.model": teacher}
        sizes = {key: _num_embeddings(own) for key, own in found.items() if own is not None}
        checks.run(partial(_check_teacher, config, sizes))
    if data is None:
        return lines
    if model is not None:
        checks.run(lambda: check_row_tokens(_num_embeddings(model), data))
    for key, own in (("model", model), ("teacher.model", teacher)):
        if own is not None:
            checks.run(partial(check_row_lengths, key, position_limit(own.backbone), data))
    if resume:
        checks.run(lambda: _require_same(config, rows_identity(config, data)))
    return lines + [f"{name}: {rows}" for name, rows in data.named.items()]


def _require_same(config: RunConfig, identity: Mapping[str, Any]) -> None:
    """Raises ValueError for the configuration of another run than the run that it would continue."""
    output = Path(config.output_dir)
    if CheckpointManager(output / "checkpoints").latest() is not None:
        require_same(output, identity)


def _described_model(key: str, model: RLModel) -> str:
    number = sum(parameter.numel() for parameter in model.pretrained.parameters())
    return f"{key}: {type(model.pretrained).__name__} with {number:,} parameters"


def _buildable(key: str, path: str) -> RLModel:
    """The model at a key. All models of ``reward`` score, and models without a builder of their own are policies."""
    build = _BUILDERS.get(key) or _BUILDERS.get(key.partition(".")[0], build_policy)
    model = build(path)
    check_loadable(path, model)
    return model


def _check_fit(key: str, model: RLModel, config: Config, inputs: Inputs | None, world: World) -> None:
    """Raises ValueError for a model that does not go with the prompts, or with the sampling."""
    longest = config.longest_scored if key.startswith("reward.") else config.longest_taught
    require_positions(model.backbone, config.longest_sequence if key == "model" else longest)
    if key == "model":
        check_support(config, model.backbone.config.get_text_config().hidden_size, world.device.type)
    if inputs is not None and not key.startswith("reward."):  # which may have a tokenizer of its own
        check_tokens(key, _num_embeddings(model), inputs.prompts, *inputs.held_out.values())


def _num_embeddings(model: RLModel) -> int:
    return cast(nn.Embedding, model.pretrained.get_input_embeddings()).num_embeddings


def _check_teacher(config: Config | SFTConfig, sizes: Mapping[str, int]) -> None:
    """Raises ValueError for a teacher with fewer tokens than the model that learns, or than it is to name.

    Args:
        config: of the run.
        sizes: number of embeddings of each model that can be used, by key.
    """
    if config.teacher is not None and {"model", "teacher.model"} <= sizes.keys():
        check_embeddings(sizes["model"], sizes["teacher.model"], config.teacher)


def _check_experts(model: RLModel, config: RunConfig) -> None:
    """Raises ValueError where the run asks for more of the model's routers than they can do."""
    has_loss = bool(config.actor.router_aux_loss_coef)
    if has_loss or (isinstance(config, Config) and config.algorithm.routing_replay):
        check_routers(model.backbone, auxiliary_loss=has_loss)


def _described(prompts: Prompts) -> str:
    lengths = [len(ids) for ids in prompts.token_ids]
    overlong = f"; {prompts.overlong}" if prompts.overlong else ""
    part = f" (the first {len(lengths)})" if len(lengths) < len(prompts) else ""
    return f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens{part}{overlong}"


def _reward_of_first(inputs: Inputs) -> str:
    """What the functions give for one answer, the text of the first prompt."""
    functions, first = inputs.judge.functions, inputs.prompts.select([0])
    try:
        (parts,) = functions.score(*inputs.judge.answered(first, first.texts), first.token_ids, first.columns)
    finally:
        inputs.judge.close()
    if not parts:
        givers = ["reward models"] * bool(inputs.judge.roles) + ["environments"] * (inputs.player is not None)
        return f"{' and '.join(givers)} alone" if givers else "none"
    reward = weighted_sum(parts, functions.weights)
    shown = "no reward" if reward is None or reward != reward else f"{reward:g}"
    return f"{', '.join(parts)}: {shown} for the first prompt's own text as an answer"
