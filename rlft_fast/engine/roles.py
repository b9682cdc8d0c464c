"""The engines of a run by their roles, as the configuration of the run describes them."""

from rlft_fast.config import Config, EngineConfig
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.world import World


def actor_engine(config: Config, world: World, num_training_steps: int) -> FSDPEngine:
    """The policy.

    Args:
        config: of the run.
        world: the processes that share the model.
        num_training_steps: optimizer steps of the whole run, for the schedule.
    """
    temperature = config.rollout.temperature
    return FSDPEngine(
        config.model, config.actor, num_training_steps=num_training_steps, temperature=temperature, world=world
    ).initialize()


def critic_engine(config: Config, world: World, num_training_steps: int) -> FSDPEngine | None:
    """The critic, see `actor_engine`; None where the run has none."""
    critic = config.critic
    if critic is None:
        return None
    return FSDPEngine(
        critic.model or config.model, critic, head="value", num_training_steps=num_training_steps, world=world
    ).initialize()


def reference_engine(config: Config, world: World) -> FSDPEngine | None:
    """The reference; None where nothing reads it, or where it is the policy without adapters."""
    if not config.algorithm.kl_coef or config.actor.lora is not None:
        return None
    frozen = config.actor if config.reference is None else EngineConfig(**config.reference.model_dump())
    return FSDPEngine(config.model, frozen, temperature=config.rollout.temperature, world=world).initialize()


def reward_engine(path: str, config: EngineConfig, world: World) -> FSDPEngine:
    """A reward model, which runs as the policy does, without adapters.

    Args:
        path: folder of the reward model.
        config: of the policy's engine.
        world: the processes that share the model.
    """
    return FSDPEngine(path, config.model_copy(update={"lora": None}), head="score", world=world).initialize()
