"""Which models of a run compute in bfloat16 on CPUs, decided once per run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from rlft_fast.config import ModelConfig, RunConfig, run_roles, value_at
from rlft_fast.engine.memory import changed
from rlft_fast.models import hidden_size
from rlft_fast.ops import has_fast_bfloat16
from rlft_fast.run import is_run, settings_of
from rlft_fast.world import World

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)

_LEAST_HIDDEN_SIZE = 256  # of narrower models, products gain less than casts cost


def settle_compute_dtype(config: AnyConfig, world: World, *, resume: bool = False) -> AnyConfig:
    """Names bfloat16 for each model with ``compute_dtype: auto`` that is faster in it on the CPUs of all ranks.

    Every other "auto" stays, and means the same as before (`ModelConfig.for_device`): on GPUs, on CPUs without fast
    bfloat16, for models with a hidden size below 256, and with a cluster, whose CPUs this process does not see. A run
    that continues computes in the dtype that it began in, whatever it continues on. All ranks must call it together.

    Args:
        config: of the run.
        world: the processes that train together.
        resume: whether the run continues the run in its folder, if there is one.
    """
    output = Path(config.output_dir)
    continues = resume and is_run(output)
    own, *others = world.all_gather_json(_begun_in(config, output) if continues else _fastest_in(config, world))
    taken = [name for name in own if all(name in other for other in others)]
    return changed(config, {f"{name}.compute_dtype": "bfloat16" for name in taken}) if taken else config


def _open(config: RunConfig) -> dict[str, str]:
    """Folders of the models whose dtype is open, by the section of each."""
    return {
        name: role.path
        for name, role in run_roles(config).items()
        if isinstance(section := value_at(config, name), ModelConfig) and section.compute_dtype == "auto"
    }


def _begun_in(config: RunConfig, output: Path) -> list[str]:
    """The models that the run in the folder runs in bfloat16."""
    sections = {name: value_at(settings_of(output), name) for name in _open(config)}
    return [name for name, x in sections.items() if isinstance(x, Mapping) and x.get("compute_dtype") == "bfloat16"]


def _fastest_in(config: RunConfig, world: World) -> list[str]:
    """The models that this process runs faster in bfloat16."""
    if world.device.type != "cpu" or config.cluster is not None:
        return []
    wide = [name for name, path in _open(config).items() if _is_wide(path)]
    return wide if wide and has_fast_bfloat16() else []


def _is_wide(path: str) -> bool:
    try:
        return hidden_size(path) >= _LEAST_HIDDEN_SIZE
    except ValueError:  # the folder cannot be used, which the run's own checks say
        return False
