"""The engines of a run by their roles."""

from rlft_fast.config import Config, Role, RunConfig, run_roles
from rlft_fast.engine.checkpoint import find_start, load_start
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.engine.optimizer import named_parameters, parameter_groups
from rlft_fast.engine.sharding import build_model
from rlft_fast.models import require_positions
from rlft_fast.world import World


def role_engine(config: RunConfig, name: str, world: World, num_training_steps: int | None = None) -> FSDPEngine:
    """The engine of a role that the run has, see `rlft_fast.config.run_roles`.

    Args:
        config: of the run.
        name: of the role.
        world: the processes that share the model.
        num_training_steps: optimizer steps of the whole run, for the schedule of a role that trains. The policy makes
            none while the critic learns alone.

    Raises:
        ValueError: see `FSDPEngine.initialize`, the model has no positions for the longest sequence, or the weights of
            ``init_from`` cannot be used.
    """
    role = run_roles(config)[name]
    if num_training_steps is not None and name == "actor" and isinstance(config, Config):
        idle = config.frozen_steps * config.algorithm.epochs * config.algorithm.mini_batches
        num_training_steps = max(num_training_steps - idle, 1)
    if (start := role.config.init_from) is not None:
        world.together(lambda: find_start(start), ValueError)
    engine = FSDPEngine(
        role.path, role.config, head=role.head, num_training_steps=num_training_steps if role.trains else None,
        temperature=role.temperature, top_k=role.top_k, world=world,
    ).initialize()  # fmt: skip
    if isinstance(config, Config):  # a run that learns from rows knows their lengths
        require_positions(engine.model.backbone, config.longest_scored if role.part else config.longest_taught)
    if start is not None:
        load_start(engine, name, start)
    return engine


def check_names(role: Role) -> None:
    """Looks for the parameters that the settings of a role that trains name. No weights are read.

    Raises:
        ValueError: a pattern of ``freeze`` or of `optimizer.groups`, or the target of an adapter, fits none.
    """
    config = role.config.model_copy(update={"compile": False})
    model = build_model(role.path, config, role.head, trains=True)
    parameter_groups(named_parameters(model), config.optimizer)
