"""The models of a run, and where they live: in this process and those beside it, or in workers on a Ray cluster."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rlft_fast.cluster import (
    ColocatedWorker,
    CriticWorker,
    Generators,
    ReferenceWorker,
    RemoteCheckpoints,
    RemoteEngine,
    RemoteRollout,
    ResourcePool,
    RewardModelWorker,
    RolloutBeside,
    TaughtWorker,
    TeacherWorker,
    TotalUsage,
    Worker,
    WorkerGroup,
    connect,
    num_cpus,
    parts_of,
    require_connected,
    shared_part,
)
from rlft_fast.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    GroupName,
    RunConfig,
    SFTConfig,
    TaughtConfig,
    VLLMConfig,
    run_roles,
    server_urls,
)
from rlft_fast.data import Batch
from rlft_fast.engine import (
    CheckpointManager,
    Engine,
    export_hf,
    results,
    role_engine,
)
from rlft_fast.models import name_some
from rlft_fast.rollout import Rollout, build_rollout, token_from_environment
from rlft_fast.world import World

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)

_WORKERS: dict[GroupName, type[Worker]] = {
    "critic": CriticWorker, "reference": ReferenceWorker, "teacher": TeacherWorker,
    "reward": RewardModelWorker,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that a trainer drives.

    Args:
        engines: by their roles, see `rlft_fast.config.run_roles`.
        trained: the engines that train.
        checkpoints: makes the manager of the checkpoints in a folder.
        export: writes the policy to a folder, as transformers loads it.
        close: ends what lives elsewhere.
        num_devices: on which models train.
        take_usage: what calls took of the workers of models that live elsewhere, since this was last called.
    """

    engines: Mapping[str, Engine]
    trained: Mapping[str, Any]
    checkpoints: Callable[[Path], CheckpointManager | RemoteCheckpoints]
    export: Callable[[Path], None]
    close: Callable[[], None]
    num_devices: int
    take_usage: Callable[[], TotalUsage] = TotalUsage

    @property
    def actor(self) -> Engine:
        """The policy."""
        return self.engines["actor"]

    def divergence(self, name: str) -> str:
        """Says that the engine has diverged, and which settings to lower."""
        return divergence(name, self.trained[name].config)


@dataclass(frozen=True, kw_only=True)
class SamplingModels(Models):
    """The models of reinforcement learning.

    Args:
        rollout: samples from the policy.
    """

    rollout: Rollout | RemoteRollout


def divergence(name: str, config: EngineConfig) -> str:
    """Says that an engine with this configuration has diverged, and which settings to lower."""
    return (
        f"the run has diverged. Lower {name}.optimizer.learning_rate ({config.optimizer.learning_rate:g}) or "
        f"{name}.optimizer.max_grad_norm ({config.optimizer.max_grad_norm})"
    )


def notes_on(engines: Mapping[str, Engine], trained: Mapping[str, Any]) -> Iterator[str]:
    """How the models run, for the start of a run.

    Args:
        engines: by their roles.
        trained: the engines that train.
    """
    whys = {name: engine.facts.padded_because for name, engine in engines.items()}
    for why in dict.fromkeys(filter(None, whys.values())):
        yield (
            f"{', '.join(name for name in whys if whys[name] == why)}: the model {why}, so sequences are padded to "
            "similar lengths instead of packed: equal prefixes do not run once, and blocks are not compiled"
        )
    for name, engine in trained.items():
        if engine.facts.units:
            yield f"{name}: units of sharding\n{engine.facts.units}"


def build_models(
    config: Config, tokenizer: PreTrainedTokenizerBase, world: World, num_training_steps: int
) -> SamplingModels:  # fmt: skip
    """The models that the configuration names, and what samples from the policy.

    Args:
        config: of the run.
        tokenizer: of the policy.
        world: of this process.
        num_training_steps: optimizer steps of the whole run, for the schedules.

    Raises:
        ValueError: a model cannot be used, or the cluster lacks what the configuration asks for.
    """
    if config.cluster is not None:
        return _remote_sampling(config, tokenizer, world, num_training_steps)
    engines = {name: role_engine(config, name, world, num_training_steps) for name in run_roles(config)}
    actor = engines["actor"]
    rollout = build_rollout(actor, tokenizer, config.rollout, config.longest_sequence)
    return SamplingModels(
        engines=engines, trained=_trained(config, engines), rollout=rollout, checkpoints=_checkpoints(config, world),
        export=lambda folder: export_hf(actor, folder, stop=config.rollout.stop, overwrite=True), close=rollout.close,
        num_devices=world.size,
    )  # fmt: skip


def build_taught(config: TaughtConfig, world: World) -> Models:
    """The models of a run that learns from rows. Arguments and errors are those of `build_models`."""
    if config.cluster is not None:
        return _remote_taught(config, world)
    engines = {name: role_engine(config, name, world, config.steps) for name in run_roles(config)}
    return Models(
        engines=engines, trained=_trained(config, engines), checkpoints=_checkpoints(config, world),
        export=lambda folder: export_hf(engines["actor"], folder, overwrite=True), close=lambda: None,
        num_devices=world.size,
    )  # fmt: skip


def without_generator(config: Config) -> Config:
    """The configuration of a replay's models, which is valid: the policy samples, for evaluations alone.

    Raises:
        ValueError: the run has evaluated completions that obey a structure, which vLLM alone forces them to.
    """
    if config.rollout.structured and config.evaluation is not None:
        raise ValueError(
            "a replay evaluates with transformers, whose completions do not obey rollout.structured: leave out the "
            "evaluation section"
        )
    by_policy = {
        "backend": "hf", "servers": (), "dtype": "auto", "structured": {}, "vllm": VLLMConfig(), "max_staleness": 0,
        "update": "drain",
    }  # fmt: skip
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=by_policy)})


def _checkpoints(config: RunConfig, world: World) -> Callable[[Path], CheckpointManager]:
    kept = config.checkpoint
    return lambda folder: CheckpointManager(folder, kept.max_num, kept.max_mem, world)


def _trained(config: RunConfig, engines: Mapping[str, Any]) -> dict[str, Any]:
    return {name: engines[name] for name, role in run_roles(config).items() if role.trains}


def _remote_taught(config: TaughtConfig, world: World) -> Models:
    config = _on_cluster(config, world)
    with contextlib.ExitStack() as stack:
        groups = stack.enter_context(_groups(config, TaughtWorker))
        return _started(config, groups, TaughtWorker, config.steps, stack.pop_all())


def _remote_sampling(
    config: Config, tokenizer: PreTrainedTokenizerBase, world: World, num_training_steps: int
) -> SamplingModels:
    config, cluster = _on_cluster(config, world), config.cluster
    assert cluster is not None
    with contextlib.ExitStack() as stack:
        servers = None
        if cluster.generators is not None:
            generators = Generators(config)
            stack.callback(generators.close)
            servers = lambda: (generators.urls(), generators.token)  # noqa: E731
        elif config.rollout.servers:
            servers = lambda: (server_urls(config.rollout.servers), token_from_environment())  # noqa: E731
        groups = stack.enter_context(_groups(config, ColocatedWorker))
        group = groups["actor"]
        if servers is not None:
            group.use_servers(*servers())
        models = _started(config, groups, ColocatedWorker, num_training_steps, stack.pop_all())
        stack.callback(models.close)
        remote = RemoteRollout(group, servers)
        rollout: Rollout | RemoteRollout = remote
        if config.rollout.max_staleness:
            rollout = RolloutBeside(remote, tokenizer, config)
            stack.callback(rollout.close)  # before the workers: servers of others outlive them
        close = stack.pop_all().close
    return SamplingModels(**vars(replace(models, close=close)), rollout=rollout)


def _on_cluster(config: AnyConfig, world: World) -> AnyConfig:
    """The configuration as workers get it, after this process has joined the cluster."""
    assert config.cluster is not None
    if world.size > 1:
        raise ValueError(
            f"the run has a cluster section, and torchrun started {world.size} processes: take one of both"
        )
    config, cluster = _with_absolute_paths(config).for_device(world.device.type), config.cluster
    parts = parts_of(cluster)
    connect(cluster.address, None if cluster.address else num_cpus(parts))
    require_connected(parts)
    return config


def _started(
    config: RunConfig, groups: Mapping[GroupName, Any], actor_class: type[Worker], num_training_steps: int,
    opened: contextlib.ExitStack,
) -> Models:  # fmt: skip
    """The models of the groups, which load them. ``opened`` has what closes with the models, at once if that fails."""
    cluster, group, engines = config.cluster, groups["actor"], dict[str, RemoteEngine]()
    assert cluster is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(opened)
        _load(groups, num_training_steps, together=not cluster.sharing_gpus)
        for kind, holder in groups.items():
            worker_class = actor_class if kind == "actor" else _WORKERS[kind]
            configs, facts = worker_class.engine_configs(config), holder.facts()
            engines |= {name: RemoteEngine(holder, name, configs[name], facts[name]) for name in facts}
        close = stack.pop_all().close
    return Models(
        engines=engines, trained=_trained(config, engines),
        checkpoints=lambda folder: RemoteCheckpoints(group, groups.get("critic"), folder.absolute()),
        export=lambda folder: group.export(str(folder.absolute())), close=close,
        num_devices=_num_training(cluster),
        take_usage=lambda: TotalUsage.of_groups(group.take_usage() for group in groups.values()),
    )  # fmt: skip


def _num_training(cluster: ClusterConfig) -> int:
    """Devices of the groups that train; a device that they share counts once."""
    places = {
        "shared" if name in cluster.sharing_gpus else name: workers.num_workers
        for name, workers in cluster.groups.items()
        if name in ("actor", "critic")
    }
    return sum(places.values())


@contextlib.contextmanager
def _groups(config: RunConfig, actor_class: type[Worker]) -> Iterator[dict[GroupName, Any]]:
    """The groups of workers by name, the actor's first. Those that share GPUs are in one pool."""
    cluster = config.cluster
    assert cluster is not None
    with contextlib.ExitStack() as stack:
        pools: dict[str, ResourcePool] = {}
        for name, part in shared_part(cluster).items():
            pool = ResourcePool(name, part.number, gpus=part.gpus, cpus=part.cpus, processes=part.processes)
            pools |= dict.fromkeys(cluster.sharing_gpus, stack.enter_context(pool))
        groups: dict[GroupName, Any] = {}
        for name, workers in cluster.groups.items():
            kind = actor_class if name == "actor" else _WORKERS[name]
            group = WorkerGroup(
                kind, config, workers.num_workers, gpus=workers.gpus, cpus=workers.cpus, pool=pools.get(name)
            )
            groups[name] = stack.enter_context(group)
        yield groups


def _load(groups: Mapping[GroupName, Any], num_training_steps: int, *, together: bool) -> None:
    """Loads the models. The actor's workers come last where vLLM, which starts in them, measures a shared GPU's memory.

    Args:
        groups: of workers.
        num_training_steps: optimizer steps of the whole run.
        together: whether all groups load at the same time.
    """
    begun: dict[str, Any] = {
        name: group.init_model.submit(*[num_training_steps] if name == "critic" else [])
        for name, group in groups.items()
        if name != "actor"
    }
    if not together:
        results(begun)
    results({"actor": groups["actor"].init_model.submit(num_training_steps), **begun})


def _with_absolute_paths(config: AnyConfig) -> AnyConfig:
    """Workers may run in another folder than the driver."""
    own: dict[str, Any] = {"model": _absolute(config.model), "actor": _started_from(config.actor)}
    teacher = config.teacher if isinstance(config, (Config, SFTConfig)) else None
    if teacher is not None:
        own["teacher"] = teacher.model_copy(update={"model": _absolute(teacher.model)})
    return config.model_copy(update=own | (_paths_of_rl(config) if isinstance(config, Config) else {}))


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _started_from(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"init_from": _absolute(config.init_from)})


def _paths_of_rl(config: Config) -> dict[str, Any]:
    models = {
        name: own.model_copy(update={"model": _absolute(own.model)}) for name, own in config.reward.models.items()
    }
    reward = config.reward.model_copy(update={"model": _absolute(config.reward.model), "models": models})
    critic = config.critic
    if critic is not None:
        critic = _started_from(critic).model_copy(update={"model": _absolute(critic.model)})
    return {"reward": reward, "critic": critic}


def with_known_tokens(batch: Batch, engine: Engine) -> Batch:
    """The batch as a critic or a reward model reads it, which may have fewer embeddings than the policy.

    The policy may sample a row that pads its embeddings, and stands for no text. The model then reads its own last row:
    the look-up of a missing one would end the process on a GPU.
    """
    last = engine.facts.num_embeddings - 1
    is_known = bool((batch.input_ids_T <= last).all())
    return batch if is_known else batch.replace(input_ids_T=batch.input_ids_T.clamp(max=last))


def check_finite(key: str, engine: Engine) -> None:
    """Raises ValueError for weights that are not finite: nothing that a run makes of them is worth saving."""
    if bad := engine.non_finite_weights():
        raise ValueError(
            f"{key} is {engine.facts.path}, whose weights are not finite ({name_some(bad)}): save or download it again"
        )
