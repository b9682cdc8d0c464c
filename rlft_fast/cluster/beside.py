"""Servers that the driver asks itself, while the workers of the policy train."""

import os
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlft_fast.cluster.remote import RemoteRollout
from rlft_fast.config import TOKEN_VARIABLE, Config
from rlft_fast.engine import WeightStream
from rlft_fast.rollout import Rollout, RolloutError, ServedVLLM, ServerError
from rlft_fast.world import World


class RolloutBeside(Rollout):
    """A rollout whose samples go on while the workers train: the workers send weights, and nothing else.

    Threads ask the servers. The workers are called by the main thread alone.

    Args:
        remote: of the workers, after they have begun to know the servers.
        tokenizer: of the policy.
        config: of the run.
    """

    def __init__(self, remote: RemoteRollout, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self.remote = remote
        os.environ[TOKEN_VARIABLE] = remote.use_servers()
        super().__init__(partial(_started, remote, tokenizer, config), World(), is_concurrent=True)

    def _sync(self) -> None:
        self.weight_version += 1
        self._failure = None
        try:
            self._load()
        except ServerError as error:
            self._restart(error)

    def _restart(self, failure: Exception) -> None:
        """New servers take the places of dead servers."""
        try:
            self._load()
        except ServerError as error:
            raise RolloutError(str(error)) from error

    def _load(self) -> None:
        self.generator.load(None, self.weight_version)
        self.sync_bytes = self.remote.sync_bytes


def _started(remote: RemoteRollout, tokenizer: PreTrainedTokenizerBase, config: Config) -> "_Servers":
    try:
        return _Servers(remote, tokenizer, config)
    except ServerError as error:
        raise RolloutError(str(error)) from error


class _Servers(ServedVLLM):
    """Servers with the weights that workers send them."""

    def __init__(self, remote: RemoteRollout, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self.remote = remote
        model, fingerprint, run = remote.group.served()
        super().__init__(
            model, fingerprint, tokenizer, config.rollout, config.longest_sequence, urls=lambda: remote.urls, run=run,
            world=World(),
        )  # fmt: skip

    def _send(self, weights: WeightStream | None, version: int) -> None:
        self.remote.weight_version = version - 1
        self.remote.sync()
