"""A generator of many vLLM servers, on this machine or on others. Needs no vLLM on this machine.

Each training process asks the servers itself. A sample goes to the server that has its prompt's prefix, else to the
server with the fewest of this process's samples. When a server is lost, its samples go on at another server from the
tokens they have; the server takes part again once it has taken new weights.

Several threads may call `generate` at once, and `load` meanwhile: the servers pause the requests that are under way,
take the weights, and go on.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig
from rlft_fast.engine import WeightStream
from rlft_fast.errors import brief
from rlft_fast.files import allow_many_open_files
from rlft_fast.models import split_stop
from rlft_fast.rollout.types import Answers, Completion, Request, SampledModel, SamplingParams
from rlft_fast.rollout.vllm.asking import Asking
from rlft_fast.rollout.vllm.images import why_no_images
from rlft_fast.rollout.vllm.nccl_sender import NCCLSender
from rlft_fast.rollout.vllm.requests import answer_fitting, request_fields, require_version
from rlft_fast.rollout.vllm.scheduling import ServerError, from_place_of
from rlft_fast.rollout.vllm.server import VLLMServer, token_from_environment, weight_backend
from rlft_fast.rollout.vllm.weight_sender import send_weights
from rlft_fast.world import World


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
        self.servers: dict[str, VLLMServer] = {}  # checked
        self.nccl = NCCLSender() if weight_backend(config) == "nccl" else None
        self._changing = threading.RLock()
        self._has_changed = False  # which servers have the weights of now
        self.is_checked = False  # so that a server that is added later cannot end the run
        self._named: list[str] = []  # URLs
        allow_many_open_files()  # each sample at a server has a connection
        self._find_servers()
        self.asking = Asking(model, config.batch_size, self._lose)

    def load(self, weights: WeightStream | None, version: int) -> None:
        """Sends the weights to all servers that answer, see `Generator.load`."""
        with self._changing:
            self.asking.expect(self._label(version), version)
            self._send(weights, version)
            self.asking.version = version
            self._has_changed = True
            if self.world.is_first:  # the other ranks do not know yet that the servers have the weights
                self._use_servers()

    def _send(self, weights: WeightStream | None, version: int) -> None:
        assert weights is not None
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

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each request, see `Generator.generate`."""
        require_version(self.asking.version)
        end_ids, texts = split_stop(params.stop, self.tokenizer)
        fields = request_fields(params, self.model, end_ids, texts)

        def sample(fitting: list[Request]) -> list[Completion]:
            if self._has_changed:
                self._use_servers()
            return self.asking.answer(fitting, fields, can_continue=not texts)

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
        """Ends the requests under way. The servers outlive the run."""
        self.asking.close()

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
        found = _one_name_each([self._as_known(server) for server in tried if isinstance(server, VLLMServer)])
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
                has_stop_texts=bool(texts), rope_limit=self.model.rope_limit,
            )  # fmt: skip
            if self.world.is_first and self.nccl is None:
                server.prepare({"check": self.config.vllm.check_weights})
        except (ServerError, ValueError) as error:
            return error
        return server

    def _as_known(self, server: VLLMServer) -> VLLMServer:
        """The server that requests are under way at, if it is the same process."""
        known = self.servers.get(server.url)
        return known if known is not None and known.identity == server.identity else server

    def _use_servers(self) -> None:
        """Has the servers asked that have the weights of now."""
        with self._changing:
            if self._has_changed:
                self.asking.use(from_place_of(self.world.rank, self.world.size, self._having_weights()))
                self._has_changed = False

    def _having_weights(self) -> list[VLLMServer]:
        """The servers with the weights of now."""
        version = require_version(self.asking.version)
        found = []
        reason = ""
        for server in self._find_servers():
            try:
                if server.weight_version() == self._label(version):
                    found.append(server)
            except ServerError as error:
                self._lose(server, error)
                reason = f": {error}"
        if not found:
            raise ServerError(f"no server has the weights of version {version}{reason}")
        return found

    def _lose(self, server: VLLMServer, error: Exception) -> None:
        warnings.warn(f"{error}; the server is lost until the next new weights", stacklevel=2)
        self.servers.pop(server.url, None)


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
