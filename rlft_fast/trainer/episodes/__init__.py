"""Episodes: turns of a policy and an environment, in the tokens that were sampled.

Names are imported on first use: styles of conversations need no models.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.trainer.episodes.episode import STOP
    from rlft_fast.trainer.episodes.forms import THINKING
    from rlft_fast.trainer.episodes.player import EpisodePlayer, environment_names
    from rlft_fast.trainer.episodes.styles import Style, find_styles

__all__ = ["STOP", "THINKING", "EpisodePlayer", "Style", "environment_names", "find_styles"]

__getattr__ = names_on_first_use(__name__)
