"""Builds the rollout that a configuration names."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig, server_urls
from rlft_fast.engine import FSDPEngine, WeightStream, adapter_config, adapter_stream
from rlft_fast.engine.sharding import CudaRecorder
from rlft_fast.models import PolicyModel, end_token_ids, require_positions, rope_limits, split_stop
from rlft_fast.rollout.graphs import DecodeGraphs, can_step
from rlft_fast.rollout.hf import HFGenerator, gathered_policy
from rlft_fast.rollout.together import Rollout, RolloutError
from rlft_fast.rollout.types import Generator, SampledModel
from rlft_fast.rollout.vllm import (
    ColocatedVLLM,
    SeparateVLLM,
    ServedVLLM,
    ServerError,
    check_adapter,
    check_structured,
    check_transfer,
    check_vllm,
    model_fingerprint,
    transfer_backend,
    weight_backend,
)


def build_rollout(
    engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int,
    urls: Callable[[], Sequence[str]] | None = None,
) -> Rollout:  # fmt: skip
    """Builds the rollout that ``config.backend`` names.

    Args:
        engine: the policy.
        tokenizer: names the end tokens.
        config: settings of the rollout.
        max_sequence_tokens: most tokens of a prompt and its completion together.
        urls: of vLLM servers that generate, asked before each sync; None: ``config.servers``.

    Raises:
        ValueError: a stop text is wrong, vLLM is missing, vLLM lacks a needed interface, the settings do not fit the
            device, hf is to sample in a wider dtype than the policy computes in, or the model's rotary embeddings
            change below `max_sequence_tokens`.
        RolloutError: vLLM could not start: it does not know the model, or memory does not suffice, for instance; or no
            server answers.
    """
    split_stop(config.stop, tokenizer)  # refuses wrong stop texts before anything runs
    # vLLM rotates all sequences as the longest that it is started for. A model that is not trained may be sampled so.
    if engine.trains or config.backend == "hf":
        require_positions(engine.model.backbone, max_sequence_tokens)
    if urls is not None or config.servers:
        return _served_rollout(engine, tokenizer, config, max_sequence_tokens, urls)
    if config.backend == "vllm":
        return _vllm_rollout(engine, tokenizer, config, max_sequence_tokens)
    model, dtype = engine.model, _dtype(engine, config)
    assert isinstance(model, PolicyModel)
    if dtype.itemsize > getattr(torch, engine.config.compute_dtype).itemsize:
        raise ValueError(
            f"rollout.dtype is {config.dtype}, but hf samples with the policy's weights in its compute_dtype, "
            f"{engine.config.compute_dtype}: leave rollout.dtype out, or set rollout.backend to vllm"
        )

    sampling = partial(gathered_policy, engine, dtype)
    graphs = DecodeGraphs(model, CudaRecorder()) if engine.config.cuda_graphs and can_step(model) else None
    return Rollout(lambda: HFGenerator(model, tokenizer, config.batch_size, graphs), engine.world, sampling=sampling)


def _vllm_rollout(
    engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int
) -> Rollout:
    check_vllm(config.vllm, engine.world)
    check_structured(config.structured)
    model = _sampled_model(engine, tokenizer, config)
    if model.adapter is not None:
        check_adapter(model)
    is_colocated = config.vllm.process == "colocated"
    if not is_colocated and model.adapter is None:
        check_transfer(_model_type(engine), transfer_backend(config.vllm, model.device))
    kind = ColocatedVLLM if is_colocated else SeparateVLLM

    def start() -> Generator:
        try:
            return kind(model, tokenizer, config, max_sequence_tokens, engine.world)
        except Exception as error:  # pydantic's, torch's and vLLM's own
            raise RolloutError(
                f"vLLM could not start with {model.path}: {error}\n"
                "If memory is short: lower rollout.batch_size or rollout.vllm.cpu_cache_gib on a CPU; on a GPU lower "
                "rollout.vllm.gpu_memory_utilization or set actor.offload_between_phases\n"
                "If the key-value cache is too small for one sequence: raise rollout.vllm.cpu_cache_gib on a CPU, "
                "rollout.vllm.gpu_memory_utilization on a GPU, or lower rollout.max_prompt_tokens and max_new_tokens"
            ) from error

    return Rollout(
        start,
        engine.world,
        weights=partial(_weights, engine, model),
        check_weights=config.vllm.check_weights,
        group_size=config.vllm.tensor_parallel_size if is_colocated else 1,
        is_concurrent=not is_colocated and model.adapter is None,
    )


def _served_rollout(
    engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int,
    urls: Callable[[], Sequence[str]] | None,
) -> Rollout:  # fmt: skip
    """All ranks gather the weights, and the first rank sends them."""
    world = engine.world
    if weight_backend(config) == "nccl" and (world.device.type != "cuda" or config.vllm.check_weights):
        raise ValueError(
            "rollout.vllm.transfer nccl needs GPUs, and shows no weights to rollout.vllm.check_weights: leave it out, "
            "for sockets"
        )
    check_transfer(_model_type(engine), weight_backend(config))
    model = _sampled_model(engine, tokenizer, config)
    own = torch.tensor(float(secrets.randbits(24)) if world.is_first else 0.0)  # float32 has as many bits
    run = f"{int(world.all_reduce({'run': own})['run'].item()):06x}"

    def start() -> Generator:
        try:
            return ServedVLLM(
                model, model_fingerprint(engine.model.pretrained.config), tokenizer, config, max_sequence_tokens,
                urls=urls or partial(server_urls, config.servers), run=run, world=world,
            )  # fmt: skip
        except ServerError as error:
            raise RolloutError(str(error)) from error

    weights = partial(_weights, engine, model)
    return Rollout(start, world, weights=weights, check_weights=config.vllm.check_weights, is_concurrent=True)


@contextmanager
def _weights(engine: FSDPEngine, model: SampledModel) -> Iterator[WeightStream]:
    with engine.eval_mode():
        yield engine.weight_stream(model.dtype) if model.adapter is None else adapter_stream(engine, model.dtype)


def _sampled_model(engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> SampledModel:
    assert isinstance(engine.model, PolicyModel)
    return SampledModel(
        path=engine.path,
        dtype=_dtype(engine, config),
        device=engine.device,
        vocab_size=engine.model.model.config.get_text_config().vocab_size,
        eos_token_ids=end_token_ids(engine.model.model.generation_config, tokenizer),
        adapter=adapter_config(engine) if config.vllm.adapter else None,
        rope_limit=rope_limits(engine.model.backbone).get("longrope") if engine.trains else None,
    )


def _model_type(engine: FSDPEngine) -> str:
    return engine.model.pretrained.config.model_type


def _dtype(engine: FSDPEngine, config: RolloutConfig) -> torch.dtype:
    return getattr(torch, config.dtype_beside(engine.config.compute_dtype))
