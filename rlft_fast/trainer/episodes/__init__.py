"""Episodes: turns of a policy and an environment, in the tokens that were sampled."""

from rlft_fast.trainer.episodes.player import EpisodePlayer

__all__ = ["EpisodePlayer"]
