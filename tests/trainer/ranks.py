"""A run in one of several processes."""

from rlft_fast.config import RunConfig
from rlft_fast.trainer import train
from tests.support.runs.curves import without_matplotlib


def train_in_process(rank: int, config: RunConfig) -> None:
    """The run draws no curve."""
    with without_matplotlib():
        train(config)
