"""The models of a run: what each is, and in which phases of a step it works."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlft_fast.config.model import EngineConfig

if TYPE_CHECKING:
    from rlft_fast.config.run import Config

HeadKind = Literal["logprob", "value", "score"]
StepPhase = Literal["generate", "score", "infer", "update", "sync"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A model of a run.

    Attributes:
        path: folder of the model.
        config: of its engine.
        head: "logprob" of a policy or a reference, "value" of a critic, "score" of a reward model.
        trains: whether it has an optimizer.
        phases: the phases of a step in which it works.
    """

    path: str
    config: EngineConfig
    head: HeadKind
    trains: bool
    phases: tuple[StepPhase, ...]


def run_roles(config: "Config") -> dict[str, Role]:
    """The models of a run by name, in the order in which they infer; they update in the reverse order.

    The reference is a model of its own where the algorithm has a penalty on the divergence and the policy has no
    adapters. Without its adapters the policy is the reference.
    """
    actor, critic, reward = config.actor, config.critic, config.reward.model
    generates: tuple[StepPhase, ...] = ("generate", "infer", "update", "sync")
    roles = {"actor": Role(path=config.model, config=actor, head="logprob", trains=True, phases=generates)}
    if config.algorithm.kl_coef and actor.lora is None:
        frozen = actor if config.reference is None else EngineConfig(**config.reference.model_dump())
        roles["reference"] = Role(path=config.model, config=frozen, head="logprob", trains=False, phases=("infer",))
    if critic is not None:
        path = critic.model or config.model
        roles["critic"] = Role(path=path, config=critic, head="value", trains=True, phases=("infer", "update"))
    if reward is not None:  # it runs as the policy does
        plain = actor.model_copy(update={"lora": None})
        roles["reward"] = Role(path=reward, config=plain, head="score", trains=False, phases=("score",))
    return roles
