"""What ranks do together around their generators: shared requests, refusals, failures."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rlft_fast.engine import WeightStream
from rlft_fast.rollout import Completion, RequestError, Rollout, RolloutError, SamplingParams
from rlft_fast.rollout.together import gather_requests
from rlft_fast.rollout.vllm_requests import check_request
from rlft_fast.world import World
from tests.support.distributed import run_distributed


def shared(rank: int) -> None:
    world = World.current()
    prompts, seeds = [[[1], [2, 3]], []][rank], [[[4, 6], [5, 7]], []][rank]
    assert gather_requests(prompts, seeds, 2, world) == ([[1], [2, 3]], [[4, 6], [5, 7]], [0, 2][rank])
    prompts, seeds = [[[1]], [[2, 2], [3]]][rank], [[[7]], [[8], [9]]][rank]
    assert gather_requests(prompts, seeds, 2, world) == ([[1], [2, 2], [3]], [[7], [8], [9]], [0, 1][rank])
    assert gather_requests(prompts, seeds, 1, world) == (prompts, seeds, 0)
    check_refusals(rank, world)
    check_failures(rank, world)


class Refusing:
    """Refuses as vLLM's generators do, and samples nothing."""

    name = "vLLM"

    def generate(self, prompts: list[list[int]], params: SamplingParams, seeds: object) -> list:
        check_request(prompts, params.max_new_tokens, 16, has_weights=True)
        return [[] for _ in prompts]


def check_refusals(rank: int, world: World) -> None:
    """If one rank must refuse a request, all ranks refuse it without a restart, and then all go on together."""
    rollout, params = Rollout(Refusing, world), SamplingParams(max_new_tokens=6)
    fitting, long = [[1] * 10], [[1] * 11]
    assert rollout.generate([fitting, []][rank], params) == [[[]], []][rank]
    with pytest.raises(RequestError, match=f"^{'rank 1: ' * (rank == 0)}.*may have 17 tokens, vLLM was started for 16"):
        rollout.generate([fitting, long][rank], params)
    assert rollout.generate(fitting, params) == [[]]
    with pytest.raises(RequestError, match="call sync"):
        check_request(fitting, 6, 16, has_weights=False)


class Failing:
    """The first and the third that are started fail with the prompt [7]."""

    name = "a generator"
    starts = 0

    def __init__(self) -> None:
        Failing.starts += 1
        self.fails = Failing.starts in (1, 3)
        self.versions: list[int] = []

    def load(self, weights: WeightStream | None, version: int) -> None:
        self.versions.append(version)

    def generate(self, prompts: list[list[int]], params: SamplingParams, seeds: object) -> list:
        if [7] in prompts and self.fails:
            raise MemoryError("no room")
        return [[Completion([1], [-1.0], "stop")] for _ in prompts]

    def close(self) -> None:
        pass


@contextmanager
def no_weights() -> Iterator[WeightStream]:
    yield WeightStream(lambda: iter(()), {}, 1024, torch.device("cpu"))


def check_failures(rank: int, world: World) -> None:
    """One rank's generator fails: all know, and go on together with new generators, or all raise the error."""
    copies = Rollout(Failing, world, weights=no_weights)
    copies.sync()
    assert len(copies.generate([[[7]], [[8]]][rank], SamplingParams())) == 1
    assert (Failing.starts, copies.generator.versions) == (2, [1])
    alone = Rollout(Failing, world)
    alone.sync()
    with pytest.raises(RolloutError, match=f"a generator failed: {'rank 0: ' * (rank == 1)}no room"):
        alone.generate([[[7]], [[8]]][rank], SamplingParams())
    assert Failing.starts == 3


@pytest.mark.dist
def test_ranks_share_prompts_refusals_and_failures():
    run_distributed(shared, 2)
