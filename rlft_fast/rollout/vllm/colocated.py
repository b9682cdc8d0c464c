"""Generators by vLLM, with a copy of the policy's weights.

colocated: one vLLM inside each training process. It takes whole weights from the policy's stream.
separate: one vLLM in a process beside each training process. It takes weights by vLLM's weight-transfer interface.
servers: see `rlft_fast.rollout.vllm.served`.

A vLLM inside the training process changes settings of the process when it starts: the number of threads, and torch's
random state. They are restored after the start.
"""

import contextlib
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig
from rlft_fast.engine import WeightStream, checksum
from rlft_fast.models import image_family
from rlft_fast.rollout.types import Answers, Completion, Request, SampledModel, SamplingParams, Span
from rlft_fast.rollout.vllm.adapter import adapter_options, load_adapter
from rlft_fast.rollout.vllm.images import why_no_images
from rlft_fast.rollout.vllm.reload import Reload, renew_packed_weights
from rlft_fast.rollout.vllm.requests import (
    answer_fitting,
    completion_of,
    device_options,
    outputs_of,
    plain_weights,
    require_version,
    vllm_requests,
)
from rlft_fast.world import World, ensure_process_group, forked_rng

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1"}


def set_environment() -> None:
    """Sets environment variables that vLLM reads on import. Variables that the user has set stay."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


class VLLMGenerator:
    """The common part of vLLM in this process and vLLM in another: sampling, and a sleep that new weights end.

    The prefix cache is emptied with every change of the weights.

    Args:
        model: the policy, without its weights.
        tokenizer: finds stop texts' tokens.
        config: of the rollout.
        max_sequence_tokens: most tokens of a sequence, prompt and completion.

    Attributes:
        llm: vLLM's own ``LLM``, which subclasses start.
    """

    name = "vLLM"
    llm: Any

    def __init__(
        self, model: SampledModel, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.check_weights = config.vllm.check_weights
        self.max_sequence_tokens = max_sequence_tokens
        self.sleeps = model.device.type == "cuda"
        self.asleep = False
        self.weight_version: int | None = None
        self.handed_over: dict[str, str] = {}  # checksums
        self._adapter: Any = None  # that requests name
        self._is_renewed = False  # since the last request

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        """Samples a completion for each request, see `Generator.generate`."""
        version = require_version(self.weight_version)

        def sample(fitting: list[Request]) -> Iterator[Completion]:
            self._begin()
            asked = vllm_requests(fitting, params, self.model, self.tokenizer, version)
            samples = [output.outputs[0] for output in self._outputs_of(*asked)]
            return (completion_of(own, self._spans(own, version)) for own in samples)

        return answer_fitting(
            requests, self.max_sequence_tokens, sample, lambda: why_no_images(self.model.path, served=False)
        )

    def _outputs_of(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        return outputs_of(self.llm, prompts, params, self._adapter)

    def _spans(self, sample: Any, version: int) -> tuple[Span, ...]:
        """Versions of the weights of vLLM's sample, which was asked for when this version was there."""
        return (Span(len(sample.token_ids), version),)

    def load(self, weights: WeightStream | None, version: int) -> None:
        """Takes over the policy's weights. Memory for the key-value cache comes with the next request.

        By then the policy may have made room, see `FSDPEngine.eval_mode`.
        """
        assert weights is not None
        if self.asleep:
            self._wake("weights")
        if self.model.adapter is None:
            self._load(weights, version)
        else:
            self._adapter, tensors = load_adapter(self.llm, weights, self.model.adapter)
            if self.check_weights:
                self.handed_over = {name: checksum(tensor) for name, tensor in tensors.items()}
        self.weight_version = version
        self._is_renewed = True

    def _load(self, weights: WeightStream, version: int) -> None:
        raise NotImplementedError

    def checksums(self) -> dict[str, str]:
        """The checksum of each weight as vLLM was handed it."""
        return self.handed_over

    def _begin(self) -> None:
        """Before the first request under new weights."""
        if not self._is_renewed:
            return
        if self.asleep:
            self._wake("kv_cache")
            self.asleep = False
        self.llm.reset_prefix_cache()
        self._is_renewed = False

    def sleep(self) -> None:
        if self.sleeps:
            # The weights are dropped, too: the next load brings new ones. Beside adapters, they are kept on the CPU.
            self.llm.sleep(level=2 if self.model.adapter is None else 1)
            self.asleep = True

    def _wake(self, part: str) -> None:
        """vLLM allocates from the device itself, so torch's cache is emptied before."""
        torch.cuda.empty_cache()
        self.llm.wake_up([part])


class ColocatedVLLM(VLLMGenerator):
    """vLLM in this process, see `VLLMGenerator`."""

    def __init__(
        self, model: SampledModel, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int,
        world: World,
    ) -> None:  # fmt: skip
        super().__init__(model, tokenizer, config, max_sequence_tokens)
        ensure_process_group()
        os.environ.setdefault("RANK", str(world.rank))
        os.environ.setdefault("LOCAL_RANK", str(model.device.index or 0))
        with _undisturbed(), environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):  # as vLLM itself sets it, for good
            self.llm = start_llm(
                model, config, max_sequence_tokens,
                distributed_executor_backend="external_launcher", enable_sleep_mode=self.sleeps,
            )  # fmt: skip
        self.llm.llm_engine.engine_core._finalizer.detach()  # it would end the training's process group

    def _load(self, weights: WeightStream, version: int) -> None:
        self.handed_over = {}
        tensors = weights.tensors()
        with _nothing_left_out():
            stream = _noting_checksums(tensors, self.handed_over) if self.check_weights else tensors
            (reload,) = self.llm.apply_model(partial(Reload, is_first=self.weight_version is None))
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": reload.weights(stream)})
            reload.write_sinks()
            self.llm.apply_model(renew_packed_weights)
            reload.require_all()

    def close(self) -> None:
        """Ends vLLM, but for its process groups: the next one takes them over, since all live in this process's."""
        llm, self.llm = self.llm, None
        if llm is None:  # closed before
            return
        core = llm.llm_engine.engine_core.engine_core
        with contextlib.suppress(Exception):  # it may be closed because it is broken
            core.model_executor.shutdown()
        del llm, core
        gc.unfreeze()  # vLLM freezes all that is there when it starts
        gc.collect()
        if self.sleeps:
            torch.cuda.empty_cache()


def _forget_left_groups() -> None:
    """Drops the groups that vLLM keeps in globals, once this process has left the process group of an earlier vLLM."""
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    if world is not None and world.cpu_group not in dist.distributed_c10d._world.pg_map:
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, parallel_state.GroupCoordinator):
                setattr(parallel_state, name, None)


def start_llm(model: SampledModel, config: RolloutConfig, max_sequence_tokens: int, **options: Any) -> Any:
    set_environment()
    from vllm import LLM, envs

    envs.disable_envs_cache()  # of the environment that an earlier vLLM in this process had
    _forget_left_groups()
    # Without adapters, the first sync brings the weights; a missing weight would show at once.
    own = {"load_format": "dummy"} | plain_weights(model.path, config.vllm)
    if model.adapter is not None:
        own = adapter_options(model.adapter)
    return LLM(
        model.path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=max_sequence_tokens,
        max_num_seqs=config.batch_size,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: after temperature and top-k
        max_logprobs=-1,  # as many as top-k keeps
        generation_config="vllm",  # not the model's own sampling defaults
        # vLLM's processor of images, which it tries at its start, needs the tokenizer, too.
        skip_tokenizer_init=not (config.stop or config.structured) and image_family(model.path) is None,
        **{"enable_prefix_caching": True} | device_options(config.vllm, model.device.type == "cpu"),
        **options | own,
    )


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Inside, these environment variables are set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the number of threads and the random states, which vLLM changes on its start."""
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    with forked_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _nothing_left_out() -> Iterator[None]:
    """Raises if vLLM warns of weights that it was not given."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload")
    handler = _Warnings(logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    if handler.messages:
        raise RuntimeError(f"vLLM did not get all weights of its model: {handler.messages[0]}")


class _Warnings(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "not loaded" in record.msg:
            self.messages.append(record.getMessage())


def _noting_checksums(weights: Iterator[Any], received: dict[str, str]) -> Iterator[Any]:
    for name, weight in weights:
        received[name] = checksum(weight)
        yield name, weight
