"""Episodes: turns of a policy and an environment, in the tokens that were sampled."""

from rlft_fast.trainer.episodes.episode import STOP
from rlft_fast.trainer.episodes.player import EpisodePlayer, environment_names
from rlft_fast.trainer.episodes.styles import Style, find_styles

__all__ = ["STOP", "EpisodePlayer", "Style", "environment_names", "find_styles"]
