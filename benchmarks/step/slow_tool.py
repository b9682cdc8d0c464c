"""An environment whose answers take time, as a sandbox's do: most a second, now and then many."""

import math
import multiprocessing
import random
import time
from typing import Any

MEDIAN_S, P99_S = 1.0, 15.0
_SIGMA = math.log(P99_S / MEDIAN_S) / 2.326348  # the standard normal's 99th percentile


_EPISODES = multiprocessing.Array("q", 100_000)  # of each row, begun so far; the processes of episodes share it


def draw_of(seed: int, number: int) -> random.Random:
    """What draws the latencies of an episode of a row, by its number among those of the row."""
    return random.Random(f"{seed} {number}")


def latency_s(draw: random.Random) -> float:
    """Seconds of an answer."""
    return draw.lognormvariate(math.log(MEDIAN_S), _SIGMA)


class SlowTool:
    """Answers a number of replies, each after a log-normal latency, and ends the episode with the reply after them.

    A row's seed and the number of its episode decide the latencies. The reward is the share of even bytes of the last
    reply.

    Args:
        calls: answers of an episode.
    """

    def __init__(self, calls: int) -> None:
        self.calls = self.left = calls

    def reset(self, seed: int, **row: Any) -> str:
        with _EPISODES.get_lock():
            self.draw = draw_of(seed, _EPISODES[seed])
            _EPISODES[seed] += 1
        return " Go."

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        said, self.left = message["content"].encode(), self.left - 1
        if self.left < 0:
            return [], sum(byte % 2 == 0 for byte in said) / max(len(said), 1), True
        time.sleep(latency_s(self.draw))
        return [{"role": "user", "content": "Done."}], 0.0, False
