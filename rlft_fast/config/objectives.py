"""The objectives of runs. The key ``objective`` of a configuration says which it is, and so which keys it has."""

import reprlib
from pathlib import Path
from typing import Any

import yaml

from rlft_fast.config.base import ConfigError
from rlft_fast.config.reader import read_file
from rlft_fast.config.schema import Config, DPOConfig, RewardModelConfig, RunConfig, SFTConfig
from rlft_fast.files import read_text

OBJECTIVES: dict[str, type[RunConfig]] = {
    "rl": Config, "sft": SFTConfig, "dpo": DPOConfig, "reward": RewardModelConfig,
}  # fmt: skip
"""Class of the configuration by objective. A file without an objective is of the first."""


def load_config(path: str | Path, overrides: dict[str, str] | None = None, objective: str | None = None) -> RunConfig:
    """Reads a YAML file by the class of its objective, see `RunConfig.load`.

    Args:
        path: the YAML file.
        overrides: values by dotted key.
        objective: the only one that the file may have, or leave out; None: any, and rl where it is left out.

    Raises:
        ConfigError: see `RunConfig.load`, or the objective is unknown or another one.
    """
    named = (overrides or {}).get("objective") or _objective_in(path)
    found = objective or "rl" if named is None else named
    if not isinstance(found, str) or found not in OBJECTIVES:
        raise ConfigError(f"objective is {reprlib.repr(found)}, expected one of {', '.join(OBJECTIVES)}")
    if objective is not None and found != objective:
        raise ConfigError(f"{path} has objective: {found}, expected {objective}: run it with rlft-fast train")
    return OBJECTIVES[found].load(path, overrides)


def _objective_in(path: str | Path) -> Any:
    """The value of the key, of any type; None also where the file cannot be read, which `RunConfig.load` tells."""
    try:
        values = read_file(read_text(Path(path)), Config)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return values.get("objective") if isinstance(values, dict) else None
