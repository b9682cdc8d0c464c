"""`Rollout`: a generator on every rank, with the coordination of the ranks around it."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from rlft_fast.data import Images, Samples, cat_lists
from rlft_fast.engine import WeightStream, checksum
from rlft_fast.errors import RunError, StepError
from rlft_fast.rollout.columns import to_samples
from rlft_fast.rollout.joined import JoinedRequests
from rlft_fast.rollout.types import (
    Answers,
    Completion,
    Generator,
    Request,
    RequestError,
    SamplingParams,
    Seeds,
    draw_seeds,
    make_requests,
    without_refusals,
)
from rlft_fast.world import SPANS, STOP, World

T = TypeVar("T")


class RolloutError(StepError, RunError):
    """The generator failed: it died again after a restart, or the policy's logits are not finite."""

    part = "generator"


class NonFiniteLogitsError(RolloutError):
    """The policy gives no distribution to sample from."""

    is_divergence = True


class Rollout:
    """Samples from the policy as it was at the last `sync`. All ranks must call every method together.

    A generator with a copy of the weights that has died is started again once, with the current weights, and samples
    again with the same seeds: nothing is lost and nothing changes.

    Args:
        start: starts the generator of this rank.
        world: the ranks that call the methods together.
        weights: a context with the stream of the policy's weights, which a generator loads; None: the generator samples
            from the policy itself. Such a generator is not started again.
        sampling: a context in which the generator samples; the ranks enter it together.
        check_weights: whether to compare, after each `sync`, the weights sent with the weights received.
        group_size: number of neighbouring ranks that form a group. The generators of a group answer the requests of
            the whole group together.
        is_concurrent: whether the generator answers several threads at once, and takes weights meanwhile.

    Attributes:
        weight_version: version of the weights to sample from; every `sync` adds 1.
        restarts: whether `answer` may start a failed generator again now, with the policy's weights. Where they are
            trained meanwhile, the next `sync` starts it again.
        seconds: time in which this rank's generator worked on the last requests [s].
        sync_bytes: of the weights that the generator got in the last `sync`.
        joined: several threads of a process that trains alone may call `answer`, and `sync` between their calls. A
            concurrent generator does not need it.
    """

    def __init__(
        self,
        start: Callable[[], Generator],
        world: World,
        *,
        weights: Callable[[], AbstractContextManager[WeightStream]] | None = None,
        sampling: Callable[[], AbstractContextManager[object]] = nullcontext,
        check_weights: bool = False,
        group_size: int = 1,
        is_concurrent: bool = False,
    ) -> None:
        self.start = start
        self.world = world
        self.weights = weights
        self.sampling = sampling
        self.check_weights = check_weights
        self.group_size = group_size
        self.is_concurrent = is_concurrent
        self.weight_version = 0
        self.restarts = True
        self._failure: Exception | None = None  # of a generator that `sync` has to start again
        self.seconds = 0.0
        self.sync_bytes = 0
        self.joined = JoinedRequests(self._answer_all)
        self.generator = start()

    def sync(self) -> None:
        """Gives the generator the policy's weights as they are now.

        Raises:
            RolloutError: the generator did not take all of them, twice, or (``check_weights``) not as they were sent.
        """
        with nullcontext() if self.is_concurrent else self.joined.alone():
            self._sync()

    def _sync(self) -> None:
        self.weight_version += 1
        failure, self._failure = self._failure, None
        if failure is None:
            _, failure = self._together(self._load)
        if failure is None:
            self._check_weights()
        else:
            self._restart(failure)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Seeds | None = None,
        images: Sequence[Images | None] = (),
    ) -> list[list[Completion]]:  # fmt: skip
        """Samples ``params.n`` completions of each of this rank's prompts. All ranks must call it together.

        Args:
            prompts: token ids.
            params: how to sample.
            seeds: each sample is drawn from its own seed; None: torch's random state gives seeds.
            images: of each prompt, None where it has none; empty: no prompt has.

        Raises:
            RequestError: the generator of a rank refuses a prompt; raised on all ranks.
            RolloutError: see `answer`.
        """
        seeds = draw_seeds(len(prompts), params.n) if seeds is None else seeds
        answers = self.answer(make_requests(prompts, params, seeds, images), params)
        completions = iter(self.world.together(partial(without_refusals, answers), RequestError))
        return [[*islice(completions, params.n)] for _ in prompts]

    def answer(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each of this rank's requests, see `Generator.generate`.

        All ranks must call it together.

        Raises:
            RequestError: the generator of a rank can take no request; raised on all ranks.
            RolloutError: the generator failed (a generator with its own weights: twice), or the policy's logits are not
                finite; raised on all ranks.
        """
        return self._answer_all(requests, params) if self.is_concurrent else self.joined.answer(requests, params)

    def _answer_all(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        sample, generator = partial(self._answer, requests, params), self.generator
        answers, failure = self._together_or_leave(sample)
        if failure is not None and not isinstance(failure, RequestError):
            if not self.restarts:
                if self.generator is generator:
                    self._failure = failure
                raise RolloutError(f"{self.generator.name} failed: {failure}") from failure
            self._restart(failure)
            answers, failure = self._together_or_leave(sample)
            if failure is not None:
                raise RolloutError(
                    f"{self.generator.name} failed, was started again, and failed again: {failure}"
                ) from failure
        if failure is not None:
            raise failure
        assert answers is not None
        self._require_finite(answers)
        return answers

    def samples(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Seeds | None = None,
        images: Sequence[Images | None] = (),
    ) -> Samples:  # fmt: skip
        """The completions of `generate` as columns; ``row_B`` counts this rank's prompts."""
        groups = self.generate(prompts, params, seeds, images)
        return to_samples([(row, completion) for row, group in enumerate(groups) for completion in group])

    def sleep(self) -> None:
        """Frees device memory for the training until the next `sync`."""
        self.generator.sleep()

    def close(self) -> None:
        """Ends the generator for good."""
        self.generator.close()

    def _load(self) -> None:
        if self.weights is None:
            self.generator.load(None, self.weight_version)
            return
        with self.weights() as stream:
            try:
                self.generator.load(stream, self.weight_version)
            finally:
                stream.finish()
                self.sync_bytes = stream.num_bytes

    def _restart(self, failure: Exception) -> None:
        """Starts the generators of all ranks again, with the weights of now, where they have weights of their own."""
        if self.weights is None:
            raise RolloutError(f"{self.generator.name} failed: {failure}") from failure
        self.generator.close()
        for part in (self._start_again, self._load):
            _, failure_again = self._together(part)
            if failure_again is not None:
                raise RolloutError(
                    f"{self.generator.name} failed, and again when it was started again: {failure_again}"
                ) from failure_again
        self._check_weights()

    def _start_again(self) -> None:
        self.generator = self.start()
        self._failure = None  # requests that were under way have failed with the generator before

    def _check_weights(self) -> None:
        """Raises RolloutError if a generator has other weights than were sent to it, or than another rank's has."""
        if not self.check_weights or self.weights is None:
            return
        with self.weights() as stream:
            sent = {name: checksum(weight) for name, weight in stream.tensors()}
        received, failure = self._together(lambda: self._received(sent))
        if failure is not None:
            raise RolloutError(
                f"{self.generator.name} has other weights than version {self.weight_version}: {failure}"
            ) from failure
        assert received is not None
        self.world.require_agreement(f"weights of version {self.weight_version}", received)

    def _received(self, sent: dict[str, str]) -> dict[str, str]:
        received = self.generator.checksums()
        if different := [name for name in sent if received.get(name) != sent[name]]:
            raise RuntimeError(f"{len(different)} weights were not received as they were sent, {different[0]} is one")
        return received

    def _answer(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        shared, start = gather_requests(requests, self.group_size, self.world)
        with self.sampling(), STOP.alone() if self.group_size == 1 else nullcontext():
            started = time.perf_counter()
            with SPANS.noted("generate"):
                answers = self.generator.generate(shared, params)
            self.seconds = time.perf_counter() - started
        return answers[start : start + len(requests)]

    def _require_finite(self, answers: Answers) -> None:
        completions = (answer for answer in answers if isinstance(answer, Completion))
        finite = all(math.isfinite(x) for completion in completions for x in completion.logprobs)
        if self.world.any_rank(not finite):  # on all, in the same words
            raise NonFiniteLogitsError("the policy's logits are not finite")

    def _together_or_leave(self, sample: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """`_together`, unless a signal ended it, which also ends the process of a generator that the signal reaches."""
        outcome = self._together(sample)
        STOP.leave_together(self.world)
        return outcome

    def _together(self, function: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Calls the function on all ranks; returns its result, or an error if it raised on any rank."""
        try:
            return self.world.together(function, RequestError, Exception), None
        except Exception as failure:
            return None, failure


def gather_requests(requests: Sequence[Request], group_size: int, world: World) -> tuple[Sequence[Request], int]:
    """The requests of this rank's group, in rank order, and the place of this rank's own. All ranks must call it.

    Args:
        requests: this rank's own. `Request.row` counts the rows of the group afterwards.
        group_size: neighbouring ranks that share requests; 1: none.
        world: all ranks.

    Raises:
        RequestError: a request has images, which ranks do not exchange; raised on all ranks.
    """
    if group_size == 1:
        return requests, 0
    if world.any_rank(any(request.images for request in requests)):
        raise RequestError("ranks that share requests do not exchange images: use a group of one rank")
    every_prompt = _gather_lists([request.token_ids for request in requests], world)
    numbers = [(request.row, request.seed, request.max_new_tokens) for request in requests]
    every_number = _gather_lists(numbers, world)
    first = world.rank // group_size * group_size
    shared: list[Request] = []
    start = num_rows = 0
    for rank in range(first, first + group_size):
        if rank == world.rank:
            start = len(shared)
        before = num_rows
        for token_ids, (row, seed, max_new_tokens) in zip(every_prompt[rank], every_number[rank], strict=True):
            num_rows = max(num_rows, before + row + 1)
            shared.append(Request(row=before + row, token_ids=token_ids, seed=seed, max_new_tokens=max_new_tokens))
    return shared, start


def _gather_lists(own: Sequence[Sequence[int]], world: World) -> list[list[list[int]]]:
    """The lists of every rank."""
    values = world.all_gather_ragged(cat_lists(own, np.int64))
    lengths = world.all_gather_ragged(torch.tensor([*map(len, own)], dtype=torch.int64))
    return [[part.tolist() for part in x.split(n.tolist())] for x, n in zip(values, lengths, strict=True)]
