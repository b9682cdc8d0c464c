"""Samples on servers that come to their end or are lost: every sample is completed once, and no server has too many."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.rollout.vllm.scheduling import ServerError, ServerPool, from_place_of


def run(num_servers: int, num_prompts: int, per_prompt: int, limit: int, losses: int, seed: int) -> tuple:
    """Completes samples of a few steps each, while servers are lost; returns what was completed, and where."""
    draw, busy, most = random.Random(seed), Counter(), Counter()
    steps_of: Counter = Counter()
    completed: Counter = Counter()
    where: dict[int, set[int]] = {}
    lost: list[int] = []
    pool = ServerPool(range(num_servers), limit, lambda server, error: lost.append(server))
    homes: dict[int, int] = {}
    doomed = {server: draw.randint(1, 30) for server in draw.sample(range(num_servers), losses)}

    async def ask(sample: tuple[int, int], server: int) -> None:
        busy[server] += 1
        most[server] = max(most[server], busy[server])
        where.setdefault(sample[0], set()).add(server)
        try:
            while steps_of[sample] < 3:  # goes on from the steps that are done
                await asyncio.sleep(0)
                steps_of[sample] += 1
                if server in doomed and (left := doomed[server] - 1) >= 0:
                    doomed[server] = left
                    if left == 0:
                        raise ServerError("gone")
            completed[sample] += 1
        finally:
            busy[server] -= 1

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for row in range(num_prompts):
                for number in range(per_prompt):
                    sample = (row, number)
                    tasks.create_task(pool.complete(row, lambda server, s=sample: ask(s, server), homes))

    asyncio.run(main())
    return completed, where, most, lost


@given(
    st.integers(1, 5), st.integers(0, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 4), st.integers(0, 99)
)
def test_every_sample_is_completed_once(num_servers, num_prompts, per_prompt, limit, losses, seed):
    losses = min(losses, num_servers - 1)
    completed, _, most, lost = run(num_servers, num_prompts, per_prompt, limit, losses, seed)
    assert completed == {(row, number): 1 for row in range(num_prompts) for number in range(per_prompt)}
    assert max(most.values(), default=0) <= limit
    assert len(lost) == len({*lost}) <= losses


def test_a_prompt_stays_where_its_prefix_is():
    _, where, _, _ = run(num_servers=4, num_prompts=12, per_prompt=4, limit=16, losses=0, seed=0)
    assert all(len(servers) == 1 for servers in where.values())
    assert Counter(next(iter(servers)) for servers in where.values()) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_all_servers_lost():
    with pytest.raises(ExceptionGroup) as caught:
        run(num_servers=2, num_prompts=20, per_prompt=2, limit=3, losses=2, seed=0)
    assert "no server is left: gone" in str(caught.value.exceptions[0])


def test_ranks_begin_at_different_servers():
    firsts = Counter(from_place_of(rank, 1024, range(256))[0] for rank in range(1024))
    assert firsts == dict.fromkeys(range(256), 4)
    assert from_place_of(1, 2, range(5)) == [2, 3, 4, 0, 1]
