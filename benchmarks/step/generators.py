"""`python -m benchmarks.step.generators`: many workers ask many servers; writes benchmarks/results/generators.*.

The workers' scheduler is the real one (rlft_fast.rollout.vllm.scheduling). The servers are simulated in virtual time: a
sample waits for one of the server's places, and then takes the time of a request and the time of its tokens. No model
runs, and nothing is sent. It takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.step.host import Workload, draw_lengths
from benchmarks.support.document import fill, table, write_files
from benchmarks.support.harness import environment, free_memory, fresh_memory, reset_peak, status_bytes
from benchmarks.support.picture import OURS_COLOR, save
from rlft_fast.rollout.vllm.scheduling import ServerError, ServerPool, from_place_of

ROOT = Path(__file__).parents[2]
# A vLLM 0.32 server with SmolLM2-135M on one core of an AMD EPYC, by `--measure`: seconds of a request beside its
# tokens, of a step of the engine, and of each sample in the step.
REQUEST_S, STEP_S, SAMPLE_S = 0.0474, 0.0430, 0.00239


class _VirtualSelector(selectors.DefaultSelector):
    """Where nothing is ready, the time jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if not (ready := super().select(0)) and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that waits in no time."""

    def __init__(self) -> None:
        self.selector = _VirtualSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


@dataclass
class Scenario:
    """Numbers of workers and servers, and the tokens of a rollout."""

    workers: int
    servers: int
    millions: float
    places: int = 64
    lost: int = 0


@dataclass
class Outcome:
    """What a scenario took. The ideal keeps all places of all servers busy from the first moment to the last."""

    scenario: Scenario
    makespan_s: float
    ideal_s: float
    longest_s: float
    worker_cpu_s: float
    worker_bytes: float
    moved: int


class Server:
    """A simulated server, which ends a sample after its time, or is lost."""

    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)
        self.busy = 0
        self.lost_at = float("inf")

    async def sample(self, tokens_left: list[float]) -> None:
        """Samples in slices, so that a sample that moves goes on from its tokens."""
        async with self.places:
            self.busy += 1
            try:
                await asyncio.sleep(REQUEST_S)
                while tokens_left[0] > 0:
                    count = min(tokens_left[0], 512)
                    await asyncio.sleep(count * (STEP_S + SAMPLE_S * self.busy))
                    if asyncio.get_running_loop().time() > self.lost_at:
                        raise ServerError("lost")
                    tokens_left[0] -= count
            finally:
                self.busy -= 1


def simulate(scenario: Scenario) -> Outcome:
    """One rollout of all workers."""
    work = Workload.of_millions(scenario.millions)
    _, lengths = draw_lengths(work)
    moved = [0]

    async def worker(rank: int, servers: Sequence[Server]) -> None:
        pool = ServerPool(from_place_of(rank, scenario.workers, servers), scenario.places, lambda server, error: None)
        per_group, homes = work.group_size, dict[int, Server]()
        mine = range(rank, work.num_samples // per_group, scenario.workers)

        async def complete(row: int, number: int) -> None:
            left, asked = [float(lengths[row * per_group + number])], [0]

            async def ask(server: Server) -> None:
                asked[0] += 1
                await server.sample(left)

            await pool.complete(row, ask, homes)
            moved[0] += asked[0] - 1

        async with asyncio.TaskGroup() as tasks:
            for row in mine:
                for number in range(per_group):
                    tasks.create_task(complete(row, number))

    async def main() -> float:
        servers = [Server(scenario.places) for _ in range(scenario.servers)]
        draw, full = random.Random(0), STEP_S + SAMPLE_S * scenario.places
        for server in draw.sample(servers, scenario.lost):
            server.lost_at = draw.uniform(0, float(np.sum(lengths)) * full / scenario.places / scenario.servers)
        async with asyncio.TaskGroup() as tasks:
            for rank in range(scenario.workers):
                tasks.create_task(worker(rank, servers))
        return asyncio.get_running_loop().time()

    with fresh_memory():
        free_memory()
        reset_peak()
        before, started = status_bytes("VmRSS"), time.process_time()
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            makespan = runner.run(main())
        seconds = time.process_time() - started
        used = status_bytes("VmHWM") - before
    full = STEP_S + SAMPLE_S * min(scenario.places, max(1, len(lengths) // scenario.servers))
    ideal = float(np.sum(lengths)) * full / min(scenario.places * scenario.servers, len(lengths))
    longest = float(np.max(lengths)) * (STEP_S + SAMPLE_S)
    return Outcome(scenario, makespan, ideal, longest, seconds / scenario.workers, used / scenario.workers, moved[0])


def measure() -> None:
    """Prints the three times of a real server at VLLM_URL, whose token is in VLLM_API_KEY."""
    import os

    from rlft_fast.rollout import token_from_environment
    from rlft_fast.rollout.vllm.scheduling import ServerPool
    from rlft_fast.rollout.vllm.server import GENERATE, VLLMServer

    server = VLLMServer(os.environ["VLLM_URL"], token_from_environment())
    server.check({}, 1)

    async def ask(number: int, tokens: int) -> float:
        import aiohttp

        async with aiohttp.ClientSession() as session:

            async def one(server: VLLMServer) -> None:
                sampling = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
                body = {"model": server.model_name, "token_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}
                async with session.post(server.url + GENERATE, json=body, headers=server.headers) as answer:
                    await answer.read()

            pool = ServerPool([server], number, lambda server, error: None)
            started = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(number):
                    tasks.create_task(pool.complete(0, one, {}))
            return time.perf_counter() - started

    def fastest(number: int, tokens: int) -> float:
        return min(asyncio.run(ask(number, tokens)) for _ in range(3))

    one, many = ((fastest(number, 65) - fastest(number, 1)) / 64 for number in (1, 32))
    sample = (many - one) / 31
    print(f"REQUEST_S, STEP_S, SAMPLE_S = {fastest(1, 1):.4f}, {one - sample:.4f}, {sample:.5f}")


METHOD = """\
A rollout of {millions:g} M tokens in samples of log-normal lengths, at most {max_new_tokens} tokens, 8 of each
prompt. At a simulated server, a sample takes {request} s and, for each token, {step} s and {sample} s for each sample
at the server at the time; a real server with a model of 135 M parameters on one CPU core has these times. Every
worker schedules its own prompts and knows its own samples alone. The ideal keeps every place of every server busy
from the first moment to the last. No schedule is faster than the longest sample alone at a server. Seconds and memory
of a worker are those of its part of the scheduler: the whole simulation, divided by the number of workers. Time is
virtual but for them."""


def write_report(outcomes: Sequence[Outcome], output: Path) -> None:
    rows = [
        (
            f"{x.scenario.workers}", f"{x.scenario.servers}", f"{x.scenario.lost}", f"{x.makespan_s:.0f}",
            f"{x.ideal_s:.0f}", f"{x.longest_s:.0f}", f"{x.makespan_s / max(x.ideal_s, x.longest_s):.2f}",
            f"{1000 * x.worker_cpu_s:.1f}", f"{x.worker_bytes / 2**20:.2f}", f"{x.moved}",
        )
        for x in outcomes
    ]  # fmt: skip
    header = (
        "workers", "servers", "lost", "rollout, s", "ideal, s", "longest sample, s", "of the larger of both",
        "CPU ms of a worker", "MiB of a worker", "samples moved",
    )  # fmt: skip
    work = Workload.of_millions(outcomes[0].scenario.millions)
    method = METHOD.format(
        millions=outcomes[0].scenario.millions, max_new_tokens=work.max_new_tokens, request=REQUEST_S, step=STEP_S,
        sample=SAMPLE_S,
    )  # fmt: skip
    facts = environment()
    raw = {"environment": facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    print(write_files(
        output, "generators", "Many workers and many generators", facts,
        [table(header, rows), "## Method", fill(method)], raw, lambda path: save_plot(outcomes, path, facts["cpu"]),
    ))  # fmt: skip


def save_plot(outcomes: Sequence[Outcome], path: Path, subtitle: str) -> None:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    names = [f"{x.scenario.workers} workers, {x.scenario.servers} servers, {x.scenario.lost} lost" for x in outcomes]
    shares = [x.makespan_s / max(x.ideal_s, x.longest_s) for x in outcomes]
    axis.bar_label(axis.barh(names, shares, color=OURS_COLOR), fmt="{:.2f}", padding=4)
    axis.set_xlabel("time of a rollout, over the larger of the ideal and the longest sample")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, subtitle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=64, help="of tokens")
    parser.add_argument("--measure", action="store_true", help="measure the server at VLLM_URL, and end")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.measure:
        measure()
        return 0
    sizes = [(1, 256, 0), (16, 256, 0), (256, 256, 0), (1024, 256, 0), (1024, 256, 16), (1024, 1024, 0), (1024, 64, 0)]
    write_report([simulate(Scenario(w, s, args.millions, lost=lost)) for w, s, lost in sizes], args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
