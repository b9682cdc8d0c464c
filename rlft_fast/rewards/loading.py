"""Loads a reward function by its name in the configuration."""

from rlft_fast.foreign import ForeignCode
from rlft_fast.plugins import load_function
from rlft_fast.rewards.scoring import RewardFunction


def load_reward(spec: str) -> RewardFunction:
    """Loads a reward function.

    What the file changes of the process while it is loaded is put back, apart from the recursion limit and the filters
    of warnings.

    Args:
        spec: "module:function" for an importable module (`rlft_fast.rewards:last_number`), or
            "path/to/file.py:function" for a file, relative to the working directory.

    Raises:
        ValueError: there is no such function; see `rlft_fast.plugins.load_function`.
    """
    with ForeignCode(f"the file of the reward {spec}", keeps=("recursion limit", "warnings filters")):
        return load_function("reward", spec)
