"""``rlft-fast reward CONFIG [--key value ...]``: reward models; ``rlft-fast train`` with ``objective: reward``."""

from rlft_fast.cli import train


def run(arguments: list[str]) -> int:
    return train.run(arguments, "reward")
