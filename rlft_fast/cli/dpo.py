"""``rlft-fast dpo CONFIG [--key value ...]``: preferences; ``rlft-fast train`` with ``objective: dpo``."""

from rlft_fast.cli import train


def run(arguments: list[str]) -> int:
    return train.run(arguments, "dpo")
