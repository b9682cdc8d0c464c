"""What a run reads beside weights: its tokenizer, prompts and reward functions. They are checked as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.cluster import require_own_machine, require_sendable
from rlft_fast.config import Config, EnvironmentConfig, RunConfig, fixed_settings
from rlft_fast.engine import start_checksum
from rlft_fast.errors import Checks
from rlft_fast.models import (
    end_token_ids,
    generation_defaults,
    image_family,
    load_tokenizer,
    model_checksum,
    split_stop,
)
from rlft_fast.ops.logprob import gathered_bytes
from rlft_fast.rollout import why_no_images, with_ties
from rlft_fast.run import dotted, naming_start
from rlft_fast.trainer.collect import Judge, load_functions
from rlft_fast.trainer.episodes import EpisodePlayer, environment_names
from rlft_fast.trainer.learn import Objective, check_teacher, other_tokens
from rlft_fast.trainer.prompts import ImageReader, Prompts, load_held_out, load_training, read_sets
from rlft_fast.world import World


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads, in a state to be used.

    Args:
        objective: of the policy.
        tokenizer: of the policy.
        judge: scores the answers to learn from. Its reward model is not loaded yet.
        evaluation_judge: scores the held-out answers; None: `judge` does.
        prompts: to learn from.
        held_out: the held-out prompts by the name of their set.
        player: plays the episodes of an environment; None: an answer is one message.
    """

    objective: Objective
    tokenizer: PreTrainedTokenizerBase
    judge: Judge
    evaluation_judge: Judge | None
    prompts: Prompts
    held_out: dict[str, Prompts]
    player: EpisodePlayer | None


def load_inputs(config: Config, world: World) -> Inputs:
    """Loads and checks everything but weights. All ranks must call it together.

    Raises:
        ValueError: something cannot be used. The message has everything that was found.
    """
    checks = Checks()
    checks.run(lambda: require_equal_shares(config, world.size))
    checks.run(lambda: require_generator_apart(config, world.size, world.device.type))
    objective = checks.run(lambda: make_objective(config))
    if (cluster := config.cluster) is not None:
        if cluster.address is None:
            checks.run(lambda: require_own_machine(cluster))
        if objective is not None:
            name = f"policy loss {config.algorithm.policy_loss}"
            checks.run(lambda: require_sendable(name, objective.policy_loss.loss))
    evaluation_judge = judge = prompts = held_out = reader = None
    if (tokenizer := checks.run(lambda: load_tokenizer(config.model))) is not None:
        evaluation_judge = checks.run(lambda: Judge.for_evaluation(config, tokenizer, world))
        judge = checks.run(lambda: Judge(config, tokenizer, world))
        reader = checks.run(lambda: ImageReader.of_model(config.model, tokenizer))
        prompts = checks.run(lambda: load_training(config, tokenizer, reader))
        held_out = checks.run(lambda: load_held_out(config, tokenizer, reader))
        checks.run(lambda: _check_same_tokens(config, tokenizer))
        checks.run(lambda: check_teacher(config.teacher, tokenizer))
    else:
        checks.run(lambda: load_functions(config))
        for path in (None, *([] if config.evaluation is None else config.evaluation.sets.values())):
            checks.run(lambda path=path: read_sets(config.data, path))
    if judge is not None and prompts is not None:
        checks.run(lambda: judge.check(prompts, "the training data"))
    if held_out is not None and (own := evaluation_judge or judge) is not None:
        checks.run(lambda: check_held_out(held_out, own))
    if prompts is not None and held_out is not None:
        checks.run(lambda: check_images(config, prompts, *held_out.values()))
    player = None
    if config.environments_by_name and not checks.found:
        assert tokenizer is not None
        assert prompts is not None
        assert held_out is not None
        given = tokenizer, [prompts, *held_out.values()]
        if (found := checks.run(lambda: open_environment(config, *given, reader))) is not None:
            player, (prompts, *sets) = found
            held_out = dict(zip(held_out, sets, strict=True))
    checks.raise_found()
    assert objective is not None
    assert tokenizer is not None
    assert judge is not None
    assert prompts is not None
    assert held_out is not None
    require_agreement(world, "training data", prompts)
    require_agreement(world, "held-out data", *held_out.values())
    return Inputs(
        objective=objective, tokenizer=tokenizer, judge=judge, evaluation_judge=evaluation_judge, prompts=prompts,
        held_out=held_out, player=player,
    )  # fmt: skip


def open_environment(
    config: Config, tokenizer: PreTrainedTokenizerBase, sets: Sequence[Prompts], reader: ImageReader | None = None
) -> tuple[EpisodePlayer, list[Prompts]]:
    """The player of the configuration's environments, and the sets of prompts as its episodes begin.

    Args:
        config: with an environment.
        tokenizer: of the policy.
        sets: prompts with the same columns.
        reader: of images; None: the policy takes none.

    Raises:
        ValueError: an environment cannot be used, a row names none, or a prompt cannot begin an episode.
    """
    configs = config.environments_by_name
    columns = {name: _columns_of(name, configs, sets) for name in configs}
    ends = [
        *end_token_ids(generation_defaults(config.model), tokenizer),
        *split_stop(config.rollout.stop, tokenizer)[0],
    ]
    why_no_images = why_no_images_in_episodes(config)
    in_turn = config.rollout.update != "in-flight"
    player = EpisodePlayer(configs, columns, tokenizer, ends, reader, why_no_images, in_turn=in_turn)
    try:
        return player, [player.prepare(prompts, config.rollout.max_prompt_tokens) for prompts in sets]
    except BaseException:
        player.close()
        raise


def _columns_of(name: str, configs: Mapping[str, EnvironmentConfig], sets: Sequence[Prompts]) -> list[str]:
    """Names of the columns of an environment's rows; beside other environments, of the columns that some row fills."""
    found = {"prompt", *(sets[0].columns if not name else ())}
    for prompts in sets if name else ():
        own = [i for i, other in enumerate(environment_names(configs, prompts)) if other == name]
        found |= {column for column, values in prompts.columns.items() if any(values[i] is not None for i in own)}
    return sorted(found)


def why_no_images_in_episodes(config: Config) -> str:
    """Why nobody may show the policy images in the episodes of a run; empty: they may be shown."""
    if reason := _why_vllm_takes_none(config):
        return reason
    found = _blind_parts(config)
    return f"images do not reach {' and '.join(found)}: leave out {'them' if len(found) > 1 else 'it'}" if found else ""


def make_objective(config: Config) -> Objective:
    """What the updates of a run minimise.

    Raises:
        ValueError: a function of one's own or an option cannot be used.
    """
    with naming_start(Path(config.output_dir)):
        return Objective(
            config.algorithm, config.rollout.max_new_tokens, has_critic=config.critic is not None,
            teacher=config.teacher,
            logs_tokens=config.log_tokens_mib is not None,
            normalize=config.reward.normalize,
        )  # fmt: skip


def check_held_out(held_out: Mapping[str, Prompts], judge: Judge) -> None:
    """Raises ValueError for prompts that the judge cannot score."""
    for prompts in held_out.values():
        judge.check(prompts, "the held-out data")


def require_agreement(world: World, what: str, *given: Prompts) -> None:
    """Raises ValueError for prompts, `what` in messages, that differ between ranks. All ranks must call it together."""
    for prompts in given:
        world.require_agreement(what, dict(dotted(prompts.description)))


def check_tokens(key: str, num_embeddings: int, *given: Prompts) -> None:
    """`Prompts.check_tokens` of all that are given."""
    for prompts in given:
        prompts.check_tokens(key, num_embeddings)


def check_images(config: Config, *given: Prompts) -> None:
    """Raises ValueError for images in a run with a part that would not see them."""
    if (prompts := next((prompts for prompts in given if prompts.images), None)) is None:
        return
    row = f"row {min(prompts.images)} of the data (counted from 0) has images"
    if found := _blind_parts(config):
        raise ValueError(
            f"{row}, which do not reach {' and '.join(found)}: leave out {'them' if len(found) > 1 else 'it'}, or the "
            "rows with images"
        )
    if reason := _why_vllm_takes_none(config):
        raise ValueError(f"{row}, and {reason}")


def _why_vllm_takes_none(config: Config) -> str:
    """Why the run's vLLM is given no images; empty: it takes them, or there is none."""
    vllm, served = config.rollout.vllm, bool(config.rollout.servers)
    if config.rollout.backend != "vllm":
        return ""
    is_shared = vllm.process == "colocated" and vllm.tensor_parallel_size > 1
    return why_no_images(config.model, served=served, shared=is_shared)


def _blind_parts(config: Config) -> list[str]:
    """The parts of a run that see no images."""
    takes_none = {
        "cluster": config.cluster is not None,
        "a reward model": bool(config.reward.model_parts),
    }
    for key in ("critic.model", "teacher.model"):
        if (path := config.model_folders.get(key)) is not None:
            takes_none[key] = image_family(path) is None
    return [key for key, holds in takes_none.items() if holds]


def check_support(config: Config, hidden_size: int, device_type: str) -> None:
    """Refuses a support that exceeds the op's workspace; the op itself would refuse it after the first rollout."""
    top_k, workspace_mib = config.rollout.top_k, config.actor.workspace_mib or 64
    if top_k is None:
        return
    dtype = getattr(torch, config.for_device(device_type).actor.compute_dtype)
    row_bytes = gathered_bytes(with_ties(top_k), hidden_size, dtype)
    if row_bytes > workspace_mib * 2**20:
        raise ValueError(
            f"rollout.top_k is {top_k}: the weight rows of one support may take {row_bytes} bytes, the workspace "
            f"has {workspace_mib} MiB: lower it, or set actor.workspace_mib to {-(-row_bytes // 2**20)}"
        )


def require_equal_shares(config: Config, world_size: int) -> None:
    """Raises ValueError for prompts that so many processes cannot share."""
    if config.rollout.prompts_per_step % world_size:
        raise ValueError(
            f"rollout.prompts_per_step is {config.rollout.prompts_per_step}, which {world_size} processes cannot share "
            "evenly: make it a multiple of the number of processes"
        )


def require_generator_apart(config: Config, world_size: int, device_type: str) -> None:
    """Raises ValueError where ``rollout.max_staleness`` has samples overlap a training that they cannot run beside."""
    if not (staleness := config.rollout.max_staleness):
        return
    if world_size > 1:
        raise ValueError(
            f"rollout.max_staleness is {staleness}, but {world_size} processes train together, which sample together, "
            "too: start one process, or set max_staleness to 0"
        )
    is_beside = not config.has_servers and config.rollout.vllm.transfer in ("auto", "ipc")
    if device_type == "cuda" and is_beside:
        raise ValueError(
            f"rollout.max_staleness is {staleness}, but a separate vLLM that takes weights by ipc has the GPU of the "
            "training: set rollout.vllm.transfer to nccl, for a GPU of its own, or max_staleness to 0"
        )


def _check_same_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """A critic reads the policy's tokens, which another model would read as other texts."""
    path = None if config.critic is None else config.critic.model
    if path is None or not any(Path(path).glob("tokenizer*")):
        return
    if others := other_tokens(path, tokenizer, may_lack=True):
        raise ValueError(
            f"critic.model is {path}, whose tokenizer has other numbers for {len(others)} of the policy's tokens (such "
            f"as {others[0]!r}): take a model of the policy's family"
        )


def identity_of(config: Config, prompts: Prompts, held_out: dict[str, Prompts]) -> dict[str, Any]:
    """What a run has to have in common with the run that it continues."""
    sets = {f"held_out{'_' * bool(name)}{name}": found.description for name, found in held_out.items()}
    data = {"training": prompts.description} | sets
    return {"data": data, "checksum": model_checksums(config), "settings": fixed_settings(config)}


def model_checksums(config: RunConfig) -> dict[str, str | None]:
    """What tells the weights that a run starts from from others, by key; None where there are none."""
    models = {key: None if path is None else model_checksum(path) for key, path in config.model_folders.items()}
    starts = {f"{name}.init_from": role.config.init_from for name, role in config.roles.items() if role.trains}
    return models | {key: None if path is None else start_checksum(path) for key, path in starts.items()}
