"""Random batches."""

import numpy as np

from rlft_fast.data import Batch


def make_batch(num_sequences: int, seed: int = 0) -> Batch:
    """Sequences with prompts and completions of 1 to 8 tokens, and rewards."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 9, (num_sequences, 2))
    prompts = [draw.integers(1, 50, size).tolist() for size, _ in sizes]
    completions = [draw.integers(1, 50, size).tolist() for _, size in sizes]
    return Batch.from_samples(prompts, completions, rewards=draw.random(num_sequences).tolist())
