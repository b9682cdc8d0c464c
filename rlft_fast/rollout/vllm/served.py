"""A generator of many vLLM servers, on this machine or on others. Needs no vLLM on this machine.

Each training process asks the servers itself. A sample goes to the server that has its prompt's prefix, else to the
server with the fewest of this process's samples. When a server is lost, its samples go on at another server from the
tokens they have; the server takes part again once it has taken new weights.
"""

import asyncio
import contextlib
import hashlib
import resource
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig
from rlft_fast.engine import WeightStream
from rlft_fast.errors import brief
from rlft_fast.models import split_stop
from rlft_fast.rollout.types import Answers, Completion, Request, SampledModel, SamplingParams
from rlft_fast.rollout.vllm.answers import CUT_OFF, AnswerError, Asked, Part, read_part
from rlft_fast.rollout.vllm.images import why_no_images
from rlft_fast.rollout.vllm.nccl_sender import NCCLSender
from rlft_fast.rollout.vllm.requests import answer_fitting, completion_of, request_fields, require_version
from rlft_fast.rollout.vllm.scheduling import Patience, ServerError, ServerPool, from_place_of
from rlft_fast.rollout.vllm.server import GENERATE, VLLMServer, token_from_environment, weight_backend
from rlft_fast.rollout.vllm.weight_sender import send_weights
from rlft_fast.world import DaemonThreads, World

_HEALTH_EVERY_S = 5.0
_SILENT_S = 600.0  # of a server that is asked and sends nothing
_HEALTH_ANSWER_S = 20.0  # an answer may wait for a long step of the engine


class ServedVLLM:
    """A `Generator` of vLLM servers. Servers can be added and taken away before each `load`.

    Args:
        model: the policy, without its weights.
        fingerprint: see `rlft_fast.rollout.vllm.server.model_fingerprint`.
        tokenizer: finds stop texts' tokens.
        config: of the rollout.
        max_sequence_tokens: most tokens of a sequence, prompt and completion.
        urls: of the servers now.
        run: a name of this run, the same on all ranks, by which its weights are told from those of other runs.
        world: the ranks that ask. The first rank sends the weights.

    Raises:
        ValueError: aiohttp or the token is missing, or there is no URL.
        UnsuitableServerError: a server cannot be used.
        ServerError: no server answers.
    """

    name = "vLLM servers"

    def __init__(
        self, model: SampledModel, fingerprint: dict[str, Any], tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig, max_sequence_tokens: int, *, urls: Callable[[], Sequence[str]], run: str, world: World,
    ) -> None:  # fmt: skip
        if find_spec("aiohttp") is None:
            raise ValueError("servers are asked with aiohttp, which is not installed: pip install aiohttp")
        self.model = model
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.config = config
        self.max_sequence_tokens = max_sequence_tokens
        self.urls = urls
        self.token = token_from_environment()
        self.run = run
        self.world = world
        self.weight_version: int | None = None
        self.servers: dict[str, VLLMServer] = {}  # checked
        self.nccl = NCCLSender() if weight_backend(config) == "nccl" else None
        self.live: list[VLLMServer] = []  # have the weights of now
        self.is_checked = False  # so that a server that is added later cannot end the run
        self._named: list[str] = []  # URLs
        self._heard: dict[str, float] = {}  # when a server has sent something last
        _allow_many_connections()
        self._find_servers()

    def load(self, weights: WeightStream | None, version: int) -> None:
        """Sends the weights to all servers that answer, see `Generator.load`."""
        assert weights is not None
        self.live = []
        metadata = weights.metadata() if self.nccl is not None else []  # all ranks together
        if self.world.is_first:
            servers = self._find_servers(renew=True)
            failures: dict[int, ServerError] = {}
            if self.nccl is not None:
                self.nccl.send(weights, metadata, servers, self._label(version))
            else:
                failures = {
                    place: error if isinstance(error, ServerError) else _not_taken(servers[place], error)
                    for place, error in send_weights(weights.pieces(), servers, self._label(version)).items()
                }
            for place, error in failures.items():
                self._lose(servers[place], error)
            if len(failures) == len(servers):
                raise ServerError(f"no server took the weights: {failures[0]}")
        self.weight_version = version

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each request, see `Generator.generate`."""
        version = require_version(self.weight_version)
        end_ids, texts = split_stop(params.stop, self.tokenizer)
        fields = request_fields(params, self.model, end_ids, texts)

        def sample(fitting: list[Request]) -> Iterator[Completion]:
            samples = [_Sample(request, can_continue=not texts) for request in fitting]
            if not self.live:  # since the last load
                self.live = self._having_weights()
            _run_beside(lambda: self._sample_all(samples, fields))
            return (own.completion(version) for own in samples)

        return answer_fitting(
            requests, self.max_sequence_tokens, sample, lambda: why_no_images(self.model.path, served=True)
        )

    def checksums(self) -> dict[str, str]:
        """The checksum of each weight as the servers received it."""
        (first, *others) = [server.checksums() for server in self._having_weights()]
        for other in others:
            if different := [name for name in first if other.get(name) != first[name]]:
                raise RuntimeError(f"{len(different)} weights differ between servers, {different[0]} is one")
        return first

    def sleep(self) -> None:
        """Does nothing: servers have devices of their own."""

    def close(self) -> None:
        """Does nothing: servers outlive the run."""

    def _label(self, version: int) -> str:
        return f"{self.run}:{version}"

    def _find_servers(self, *, renew: bool = False) -> list[VLLMServer]:
        """The servers that answer.

        Args:
            renew: check also the servers that are known: other processes may listen at their URLs by now.
        """
        try:
            self._named = [*self.urls()]
        except ValueError as error:
            if not self._named:
                raise
            warnings.warn(f"{error}; the run goes on with the servers before", stacklevel=2)
        known = {} if renew else self.servers
        with ThreadPoolExecutor(min(32, len(self._named))) as threads:
            tried = list(threads.map(lambda url: known.get(url) or self._meet(url), self._named))
        found = _one_name_each([server for server in tried if isinstance(server, VLLMServer)])
        failures = [error for error in tried if isinstance(error, Exception)]
        self.servers = {server.url: server for server in found}
        if not self.is_checked and (unsuitable := [e for e in failures if not isinstance(e, ServerError)]):
            raise unsuitable[0]
        if not found:
            raise ServerError("; ".join(map(str, failures)))
        for error in failures:
            warnings.warn(f"{error}; the run goes on with {len(found)} other servers", stacklevel=2)
        self.is_checked = True
        return found

    def _meet(self, url: str) -> VLLMServer | Exception:
        """The server at the URL, or why it cannot be used."""
        try:
            server = VLLMServer(url, self.token)
            dtype = str(self.model.dtype).removeprefix("torch.")
            _, texts = split_stop(self.config.stop, self.tokenizer)
            server.check(
                self.fingerprint, self.max_sequence_tokens, backend=weight_backend(self.config), dtype=dtype,
                has_stop_texts=bool(texts),
            )  # fmt: skip
            if self.world.is_first and self.nccl is None:
                server.prepare({"check": self.config.vllm.check_weights})
        except (ServerError, ValueError) as error:
            return error
        return server

    def _having_weights(self) -> list[VLLMServer]:
        """The servers with the weights of now."""
        assert self.weight_version is not None
        found = []
        reason = ""
        for server in self._find_servers():
            try:
                if server.weight_version() == self._label(self.weight_version):
                    found.append(server)
            except ServerError as error:
                self._lose(server, error)
                reason = f": {error}"
        if not found:
            raise ServerError(f"no server has the weights of version {self.weight_version}{reason}")
        return found

    def _lose(self, server: VLLMServer, error: Exception) -> None:
        warnings.warn(f"{error}; the server is lost until the next new weights", stacklevel=2)
        self.servers.pop(server.url, None)
        if server in self.live:
            self.live.remove(server)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def _sample_all(self, samples: list["_Sample"], fields: dict[str, Any]) -> None:
        import aiohttp

        servers = from_place_of(self.world.rank, self.world.size, self.live)
        pool = ServerPool(servers, self.config.batch_size, self._lose)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_HEALTH_ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # vLLM's servers close after 5 s
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            watching = asyncio.create_task(self._watch(session, pool))
            try:
                async with asyncio.TaskGroup() as tasks:
                    for sample in samples:
                        ask = partial(self._ask, session, sample, fields)
                        tasks.create_task(pool.complete(sample.request.row, ask))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                watching.cancel()

    async def _ask(self, session: Any, sample: "_Sample", fields: dict[str, Any], server: VLLMServer) -> None:
        """Samples from the tokens that there are to the end."""
        import aiohttp

        if sample.finish_reason is not None:  # the last server was lost after its last token
            return
        sample.restart_unless_it_can_continue()
        num_before = len(sample.token_ids)
        patience = Patience()
        try:
            while (pause_s := await self._stream(session, sample, fields, server, patience)) is not None:
                await asyncio.sleep(pause_s)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"the server {server.url} broke off: {brief(error)}") from error
        except AnswerError as error:
            sample.cut(num_before)
            raise ServerError(f"the server {server.url} answers wrongly: {error}") from error
        except ServerError as error:
            raise ServerError(f"the server {server.url} failed: {error}") from error

    async def _stream(
        self, session: Any, sample: "_Sample", fields: dict[str, Any], server: VLLMServer, patience: Patience
    ) -> float | None:
        """Asks once. Returns after how many seconds to ask again, if the server is busy."""
        assert self.weight_version is not None
        num_before = len(sample.token_ids)
        rest = {"max_tokens": sample.request.max_new_tokens - num_before, "seed": sample.seed_from_here()}
        asked = Asked(rest["max_tokens"], self.model.vocab_size, fields["logprobs"], self._label(self.weight_version))
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

    async def _watch(self, session: Any, pool: ServerPool[VLLMServer]) -> None:
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
                if pool.is_asked(server) and time.monotonic() - self._heard[server.url] > _SILENT_S:
                    raise ServerError(f"the server {server.url} sent no token for {_SILENT_S:g} s")
            except (aiohttp.ClientError, OSError) as error:
                said = brief(error)
                await pool.lose(server, ServerError(f"the server {server.url} does not answer at /health: {said}"))
            except ServerError as error:
                await pool.lose(server, error)

        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            await asyncio.gather(*map(ask, list(pool.servers)))


@dataclass
class _Sample:
    """A completion that is being sampled."""

    request: Request
    can_continue: bool
    """Whether a server can go on from tokens: a stop text that begins in them would not be seen."""
    token_ids: list[int] = field(default_factory=list)
    likely: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token its id and log-probability, then those of the likeliest tokens where they were asked for."""
    finish_reason: str | None = None

    def add(self, part: Part) -> None:
        """Adds the next tokens of an answer."""
        self.token_ids += [row[0][0] for row in part.likely]
        self.likely += part.likely
        self.finish_reason = part.finish_reason

    def cut(self, num_tokens: int) -> None:
        """Leaves out the tokens of a wrong answer."""
        del self.token_ids[num_tokens:], self.likely[num_tokens:]
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
            self.token_ids, self.likely = [], []

    def completion(self, weight_version: int) -> Completion:
        width = max(map(len, self.likely), default=1)
        rows = [row + [(-1, CUT_OFF)] * (width - len(row)) for row in self.likely]
        logprobs = [-float("inf") if x <= CUT_OFF else x for row in rows for _, x in row]
        flat_logprobs = SimpleNamespace(token_ids=[i for row in rows for i, _ in row], logprobs=logprobs)
        sample = SimpleNamespace(token_ids=self.token_ids, logprobs=flat_logprobs, finish_reason=self.finish_reason)
        return completion_of(sample, weight_version)


def _not_taken(server: VLLMServer, error: Exception) -> ServerError:
    return ServerError(f"the server {server.url} did not take the weights: {brief(error)}")


def _one_name_each(servers: Sequence[VLLMServer]) -> list[VLLMServer]:
    """The servers without further names of the same processes: two updates at once would mix."""
    by_process: dict[str, VLLMServer] = {}
    for server in servers:
        if (first := by_process.setdefault(server.identity, server)) is not server:
            warnings.warn(
                f"{first.url} and {server.url} are one server, which is asked by the first name", stacklevel=3
            )
    return list(by_process.values())


def _run_beside(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine in a thread, since the caller may have an event loop of its own, as notebooks do.

    A signal that raises in the caller ends the coroutine, too.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None] | None]] = Future()

    async def cancellable() -> None:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await main()

    thread = DaemonThreads(1, "servers")
    running = thread.submit(asyncio.run, cancellable())
    try:
        running.result()
    except BaseException:
        if not running.done():
            loop, task = started.result()
            assert task is not None
            loop.call_soon_threadsafe(task.cancel)
            wait([running])
        raise
    finally:
        thread.close()


def _allow_many_connections() -> None:
    """Each sample at a server has a connection, and many systems allow 1,024 open files unless a process asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
