"""Loads a reward function by its name in the configuration."""

from rlft_fast.plugins import load_function
from rlft_fast.rewards.scoring import RewardFunction


def load_reward(spec: str) -> RewardFunction:
    """Loads a reward function.

    Args:
        spec: "module:function" for an importable module (`rlft_fast.rewards:last_number`), or
            "path/to/file.py:function" for a file, relative to the working directory.

    Raises:
        ValueError: there is no such function; see `rlft_fast.plugins.load_function`.
    """
    return load_function("reward", spec)
