"""What ranks do together around their generators: shared requests, refusals, failures."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rlft_fast.engine import WeightStream
from rlft_fast.rollout import Answers, Completion, Request, RequestError, Rollout, RolloutError, SamplingParams
from rlft_fast.rollout.together import gather_requests
from rlft_fast.rollout.vllm.requests import answer_fitting, require_version
from rlft_fast.world import World
from tests.support.machine.distributed import run_distributed


def requests_of(token_ids: list[list[int]], rows: list[int], seeds: list[int], max_new_tokens: int) -> list[Request]:
    columns = zip(token_ids, rows, seeds, strict=True)
    return [Request(token_ids=ids, row=row, seed=seed, max_new_tokens=max_new_tokens) for ids, row, seed in columns]


def shared(rank: int) -> None:
    """Groups of two ranks: each rank's own requests, and those of both, whose rows count through the group."""
    world = World.current()
    whole = requests_of([[1], [1], [2, 3]], [0, 0, 1], [4, 6, 5], 7)
    assert gather_requests([whole, []][rank], 2, world) == (whole, [0, 3][rank])
    own = [requests_of([[1]], [0], [7], 3), requests_of([[2, 2], [3]], [0, 1], [8, 9], 4)][rank]
    together = [*requests_of([[1]], [0], [7], 3), *requests_of([[2, 2], [3]], [1, 2], [8, 9], 4)]
    assert gather_requests(own, 2, world) == (together, [0, 1][rank])
    assert gather_requests(own, 1, world) == (own, 0)
    check_refusals(rank, world)
    check_failures(rank, world)


class Refusing:
    """Refuses as vLLM's generators do, and samples the token 5."""

    name = "vLLM"

    def generate(self, requests: list[Request], params: SamplingParams) -> Answers:
        return answer_fitting(requests, 16, lambda fitting: [Completion([5], [-1.0], "stop") for _ in fitting])


def check_refusals(rank: int, world: World) -> None:
    """A long request is refused alone, and fails the prompts of all ranks without a restart; then all go on."""
    rollout, params = Rollout(Refusing, world), SamplingParams(max_new_tokens=6)
    fitting, long = [[1] * 10], [[1] * 11]
    sampled = [[Completion([5], [-1.0], "stop")]]
    assert rollout.generate([fitting, []][rank], params) == [sampled, []][rank]
    answers = rollout.answer(requests_of([*fitting, *long, *fitting], [0, 1, 2], [0, 0, 0], 6), params)
    assert [answers[0], answers[2]] == sampled[0] * 2
    assert isinstance(answers[1], RequestError)
    with pytest.raises(RequestError, match=f"^{'rank 1: ' * (rank == 0)}.*may have 17 tokens, vLLM was started for 16"):
        rollout.generate([fitting, long][rank], params)
    assert rollout.generate(fitting, params) == sampled
    with pytest.raises(RequestError, match="call sync"):
        require_version(None)


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

    def generate(self, requests: list[Request], params: SamplingParams) -> Answers:
        if self.fails and any(request.token_ids == [7] for request in requests):
            raise MemoryError("no room")
        return [Completion([1], [-1.0], "stop") for _ in requests]

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
