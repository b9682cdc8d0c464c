"""`python -m benchmarks.engine.idle_groups`: updates in which groups have equal rewards, with and without their tokens.

A batch of the demo's size: 16 prompts of 30 tokens, 8 answers of 4 to 16 tokens each, as random token ids.
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.support.document import table
from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.demo import smollm2_folder
from rlft_fast.engine import FSDPEngine
from rlft_fast.ops.packing import segment_expand
from rlft_fast.rl import PolicyLoss

NUM_PROMPTS, NUM_SAMPLES, ROUNDS = 16, 8, 5
IDLE = (0, 4, 9, 14)  # groups of equal rewards


def make_batch(num_idle: int) -> Batch:
    """The first groups have advantages of 0."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(100, 40_000, (count,), generator=generator).tolist()

    prompts = [prompt for prompt in (ids(30) for _ in range(NUM_PROMPTS)) for _ in range(NUM_SAMPLES)]
    batch = Batch.from_samples(prompts, [ids(4 + i % 13) for i in range(len(prompts))])
    advantage_B = torch.randn(len(prompts), generator=generator)
    advantage_B[: num_idle * NUM_SAMPLES] = 0.0
    advantage_T = segment_expand(advantage_B, batch.cu_seqlens, num_tokens=batch.num_tokens)
    return batch.replace(advantage_T=advantage_T, old_logprob_T=torch.full_like(advantage_T, -8.0))


def main() -> None:
    engine = FSDPEngine(str(smollm2_folder()), EngineConfig(max_tokens=4096), num_training_steps=1000).initialize()
    losses = {"without": PolicyLoss(), "with": PolicyLoss(every_token=True)}
    rows = []
    for num_idle in IDLE:
        batch = make_batch(num_idle)
        seconds: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(1 + ROUNDS):  # interleaved; the first is for warming up
            for name, loss in losses.items():
                started = time.perf_counter()
                engine.train_step(batch, loss)
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        ratio = statistics.median(a / b for a, b in zip(seconds["without"][1:], seconds["with"][1:], strict=True))
        share = f"{num_idle / NUM_PROMPTS:.0%}"
        rows.append((share, f"{medians['without']:.2f}", f"{medians['with']:.2f}", f"{ratio:.2f}"))
    print(table(("groups of equal rewards", "seconds without", "seconds with", "ratio"), rows))


if __name__ == "__main__":
    main()
