"""Completions of a generator, without the ranks around it."""

from itertools import islice

from rlft_fast.rollout import Completion, Generator, SamplingParams, Seeds, draw_seeds, make_requests


def completions_of(
    generator: Generator, prompts: list[list[int]], params: SamplingParams, seeds: Seeds | None = None
) -> list[list[Completion]]:
    """For each prompt its completions; no request may be refused."""
    seeds = draw_seeds(len(prompts), params.n) if seeds is None else seeds
    answers = generator.generate(make_requests(prompts, params, seeds), params)
    assert all(isinstance(answer, Completion) for answer in answers)
    rest = iter(answers)
    return [[*islice(rest, params.n)] for _ in prompts]
