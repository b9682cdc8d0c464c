"""``rlft-fast sft CONFIG [--key value ...]``: supervised fine-tuning; ``rlft-fast train`` with ``objective: sft``."""

from rlft_fast.cli import train


def run(arguments: list[str]) -> int:
    return train.run(arguments, "sft")
