"""Asks servers for samples: the requests of all threads, in one loop of events.

New weights may come to a server while it samples. It names the version of each token at the end of its answer.
"""

import asyncio
import concurrent.futures
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from rlft_fast.errors import brief
from rlft_fast.rollout.types import Completion, Request, SampledModel, Span
from rlft_fast.rollout.vllm.answers import CUT_OFF, AnswerError, Asked, Part, read_part
from rlft_fast.rollout.vllm.requests import completion_of
from rlft_fast.rollout.vllm.scheduling import Patience, ServerError, ServerPool
from rlft_fast.rollout.vllm.server import GENERATE, VLLMServer
from rlft_fast.world import DaemonThreads

T = TypeVar("T")
_HEALTH_EVERY_S = 5.0
_SILENT_S = 600.0  # of a server that is asked and sends nothing
_HEALTH_ANSWER_S = 20.0  # an answer may wait for a long step of the engine


class Asking:
    """Asks servers for the samples of any number of threads at once.

    Args:
        model: that is sampled from.
        limit: most samples of this process at a server at once.
        on_loss: is told of each server that is lost.

    Attributes:
        version: of the weights that each of the servers has had at least; None: there are none.
    """

    def __init__(self, model: SampledModel, limit: int, on_loss: Callable[[VLLMServer, Exception], None]) -> None:
        self.model = model
        self.version: int | None = None
        self.pool = ServerPool[VLLMServer]([], limit, on_loss)
        self._versions: dict[str, int] = {}  # of the weights that were sent, by their names
        self._newest: int | None = None
        self._heard: dict[str, float] = {}  # when a server has sent something last
        self._num_calls = 0
        self._session: Any = None  # of HTTP, while there are calls
        self._watching: asyncio.Task[None] | None = None
        self._closing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = DaemonThreads(1, "servers")
        self._thread.submit(self._work)

    def expect(self, name: str, version: int) -> None:
        """Before the servers get weights: tokens may have their version from now on."""
        self._versions[name] = self._newest = version

    def use(self, servers: Sequence[VLLMServer]) -> None:
        """From now on these servers are asked. Samples at other servers go on at these."""
        self._run(self.pool.use(servers))

    def answer(self, requests: Sequence[Request], fields: dict[str, Any], *, can_continue: bool) -> list[Completion]:
        """Samples a completion for each request.

        Args:
            requests: to be answered.
            fields: see `rlft_fast.rollout.vllm.requests.request_fields`.
            can_continue: whether a server can go on from the tokens of another.

        Raises:
            ServerError: all servers are lost.
        """
        samples = [_Sample(request, can_continue=can_continue) for request in requests]
        self._run(self._sample_all(samples, fields))
        return [own.completion() for own in samples]

    def close(self) -> None:
        """Ends the calls under way, with a `ServerError`."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine, which runs in the loop. A signal that raises here ends the coroutine, too."""
        with self._closing:
            if self._is_closed:
                work.close()
                raise ServerError("the generator is closed")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise ServerError("the generator was closed") from None
        except BaseException:
            running.cancel()
            raise

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    async def _sample_all(self, samples: Sequence["_Sample"], fields: dict[str, Any]) -> None:
        homes: dict[int, VLLMServer] = {}
        async with self._connected() as session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for sample in samples:
                        ask = partial(self._ask, session, sample, fields)
                        tasks.create_task(self.pool.complete(sample.request.row, ask, homes))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """The session of HTTP, which all calls share. Inside, the servers are watched."""
        import aiohttp

        if not self._num_calls:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_HEALTH_ANSWER_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # vLLM's servers close after 5 s
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
            self._watching = asyncio.create_task(self._watch(self._session))
        self._num_calls += 1
        session, watching = self._session, self._watching
        try:
            yield session
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                assert watching is not None
                watching.cancel()
                await session.close()

    async def _ask(self, session: Any, sample: "_Sample", fields: dict[str, Any], server: VLLMServer) -> None:
        """Samples from the tokens that there are to the end."""
        import aiohttp

        if sample.finish_reason is not None:  # the last server was lost after its last token
            return
        sample.restart_unless_it_can_continue()
        before, oldest = sample.size, self.version
        assert oldest is not None
        patience = Patience()
        try:
            while (pause_s := await self._stream(session, sample, fields, server, patience, oldest)) is not None:
                await asyncio.sleep(pause_s)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"the server {server.url} broke off: {brief(error)}") from error
        except AnswerError as error:
            sample.cut(before)
            raise ServerError(f"the server {server.url} answers wrongly: {error}") from error
        except ServerError as error:
            raise ServerError(f"the server {server.url} failed: {error}") from error
        finally:
            if sample.finish_reason is None:
                if self._newest == oldest:
                    sample.name(oldest)
                else:  # nobody knows which of the tokens had which weights
                    sample.cut(before)

    async def _stream(
        self, session: Any, sample: "_Sample", fields: dict[str, Any], server: VLLMServer, patience: Patience,
        oldest: int,
    ) -> float | None:  # fmt: skip
        """Asks once. Returns after how many seconds to ask again, if the server is busy."""
        num_before = len(sample.token_ids)
        rest = {"max_tokens": sample.request.max_new_tokens - num_before, "seed": sample.seed_from_here()}
        asked = Asked(rest["max_tokens"], self.model.vocab_size, fields["logprobs"], self._versions, oldest)
        body = {
            "model": server.model_name,
            "token_ids": [*sample.request.token_ids, *sample.token_ids],
            "stream": True,
            "sampling_params": fields | rest,
        }
        self._heard[server.url] = time.monotonic()
        request = session.post(
            f"{server.url}{GENERATE}", json=body, headers=server.headers, allow_redirects=False, ssl=server.tls or True
        )
        async with request as answer:
            if (pause_s := patience.pause_s(answer.status, answer.headers.get("Retry-After"))) is not None:
                return pause_s
            if answer.status != 200:
                said = (await answer.content.read(500)).decode(errors="replace")
                raise ServerError(f"status {answer.status}: {said}")
            async for event in _events(answer.content, asked.max_event_bytes):
                part = read_part(event, asked, len(sample.token_ids) - num_before)
                if sample.finish_reason is not None:
                    raise AnswerError("an event after the end")
                if part.likely:
                    self._heard[server.url] = time.monotonic()
                sample.add(part)
        if sample.finish_reason is None:
            raise ServerError("it ended an answer before its end")
        return None

    async def _watch(self, session: Any) -> None:
        """Finds servers that keep their connections open and do nothing more."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_HEALTH_ANSWER_S)

        async def ask(server: VLLMServer) -> None:
            try:
                request = session.get(
                    f"{server.url}/health", headers=server.headers, timeout=timeout, ssl=server.tls or True
                )
                async with request as answer:
                    if answer.status not in (200, 429):
                        raise ServerError(f"the server {server.url} says {answer.status} at /health")
                if self.pool.is_asked(server) and time.monotonic() - self._heard.get(server.url, math.inf) > _SILENT_S:
                    raise ServerError(f"the server {server.url} sent no token for {_SILENT_S:g} s")
            except (aiohttp.ClientError, OSError) as error:
                said = brief(error)
                await self.pool.lose(server, ServerError(f"the server {server.url} does not answer at /health: {said}"))
            except ServerError as error:
                await self.pool.lose(server, error)

        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            await asyncio.gather(*map(ask, list(self.pool.servers)))


@dataclass
class _Sample:
    """A completion that is being sampled."""

    request: Request
    can_continue: bool
    """Whether a server can go on from tokens: a stop text that begins in them would not be seen."""
    token_ids: list[int] = field(default_factory=list)
    likely: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token its id and log-probability, then those of the likeliest tokens where they were asked for."""
    spans: list[Span] = field(default_factory=list)
    """Of the tokens whose weights are known."""
    finish_reason: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of tokens and of spans."""
        return len(self.token_ids), len(self.spans)

    def add(self, part: Part) -> None:
        """Adds the next tokens of an answer."""
        self.token_ids += [row[0][0] for row in part.likely]
        self.likely += part.likely
        self.spans += part.spans
        self.finish_reason = part.finish_reason

    def name(self, version: int) -> None:
        """Notes the weights of the tokens of an answer that broke off."""
        if num_tokens := len(self.token_ids) - sum(span.num_tokens for span in self.spans):
            self.spans.append(Span(num_tokens, version))

    def cut(self, size: tuple[int, int]) -> None:
        """Leaves out the tokens of an answer."""
        del self.token_ids[size[0] :], self.likely[size[0] :], self.spans[size[1] :]
        self.finish_reason = None

    def seed_from_here(self) -> int:
        """The sample's own seed, or where tokens are there already, a function of it and of their number."""
        if not self.token_ids:
            return self.request.seed
        digest = hashlib.sha256(f"{self.request.seed}:{len(self.token_ids)}".encode()).digest()
        return int.from_bytes(digest[:8]) >> 1

    def restart_unless_it_can_continue(self) -> None:
        """Before another server is asked."""
        if not self.can_continue:
            self.cut((0, 0))

    def completion(self) -> Completion:
        width = max(map(len, self.likely), default=1)
        rows = [row + [(-1, CUT_OFF)] * (width - len(row)) for row in self.likely]
        logprobs = [-float("inf") if x <= CUT_OFF else x for row in rows for _, x in row]
        flat_logprobs = SimpleNamespace(token_ids=[i for row in rows for i, _ in row], logprobs=logprobs)
        sample = SimpleNamespace(token_ids=self.token_ids, logprobs=flat_logprobs, finish_reason=self.finish_reason)
        return completion_of(sample, tuple(self.spans))


async def _events(content: Any, max_bytes: int) -> AsyncIterator[bytes]:
    """The JSON of each event of a stream. Lines may be longer than aiohttp's own limit."""
    rest = b""
    async for chunk in content.iter_any():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                raise AnswerError(f"no event of a stream, but {event[:80]!r}")
            data = event.removeprefix(b"data: ")
            if data.strip() == b"[DONE]":
                return
            yield data
        if len(rest) > max_bytes:
            raise AnswerError(f"an event of more than {max_bytes} bytes")
    if rest:
        raise AnswerError(f"no event of a stream, but {rest[:80]!r}")
