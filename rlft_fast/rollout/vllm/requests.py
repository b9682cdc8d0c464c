"""vLLM's form of requests, and completions from vLLM's outputs."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import SMALLEST_VLLM_TEMPERATURE, VLLMConfig
from rlft_fast.errors import brief
from rlft_fast.models import is_quantized, split_stop
from rlft_fast.rollout.types import (
    Answers,
    Completion,
    Request,
    RequestError,
    SampledModel,
    SamplingParams,
    Span,
    with_ties,
)
from rlft_fast.rollout.vllm.images import prompt_with_images


def vllm_requests(
    requests: Sequence[Request], params: SamplingParams, model: SampledModel, tokenizer: PreTrainedTokenizerBase,
    version: int = 0,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """The requests as prompts of vLLM's engine, and vLLM's sampling parameters.

    Requests of one prompt share its blocks of the prefix cache.

    Args:
        requests: to be answered.
        params: how to sample.
        model: that is sampled from.
        tokenizer: finds stop texts' tokens.
        version: of the weights.
    """
    import vllm

    fields = request_fields(params, model, *split_stop(params.stop, tokenizer))
    if params.structured:
        fields["structured_outputs"] = structured_outputs(params.structured)
    prompts = [
        {"prompt_token_ids": [*request.token_ids]}
        if request.images is None
        else prompt_with_images(request, model, version)
        for request in requests
    ]
    return prompts, [
        vllm.SamplingParams(**fields, max_tokens=request.max_new_tokens, seed=request.seed, flat_logprobs=True)
        for request in requests
    ]


def outputs_of(llm: Any, prompts: Sequence[Any], params: Sequence[Any], adapter: Any = None) -> list[Any]:
    """vLLM's outputs in the order of the prompts.

    Args:
        llm: vLLM's ``LLM``.
        prompts: of `vllm_requests`.
        params: of each prompt.
        adapter: vLLM's request for adapters; None: without.
    """
    if not any("type" in prompt for prompt in prompts):
        return llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
    # `generate` would leave out the images of a prompt that is processed already. The engine takes it.
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    engine, outputs = llm.llm_engine, {}
    names = [str(next(llm.request_counter)) for _ in prompts]
    try:
        for name, prompt, own in zip(names, prompts, params, strict=True):
            own.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(name, prompt if "type" in prompt else tokens_input(**prompt), own)
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    except BaseException:
        engine.abort_request(names)
        raise
    return [outputs[name] for name in names]


def structured_outputs(structured: Mapping[Any, Any]) -> Any:
    """vLLM's form of what texts obey. vLLM masks the logits before its sampler cuts them by top-k, min-p and top-p."""
    from vllm.sampling_params import StructuredOutputsParams

    names = {"json_schema": "json"}
    return StructuredOutputsParams(**{names.get(name, name): value for name, value in structured.items()})


def check_structured(structured: Mapping[Any, Any]) -> None:
    """Refuses what vLLM cannot read, before anything is started.

    Raises:
        ValueError: a pattern, schema or grammar that is wrong, or that xgrammar does not know.
    """
    if not structured:
        return
    from vllm import SamplingParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=structured_outputs(structured)))
    except Exception as error:  # xgrammar's and vLLM's own
        raise ValueError(f"rollout.structured cannot be used: {brief(error)}") from error


def request_fields(
    params: SamplingParams, model: SampledModel, end_ids: Sequence[int], stop: Sequence[str]
) -> dict[str, Any]:
    """The fields of vLLM's sampling parameters that all samples share.

    Args:
        params: how to sample.
        model: that is sampled from.
        end_ids: tokens that end a completion, beside the model's own.
        stop: texts that end a completion.

    Raises:
        ValueError: vLLM would sample at another temperature.
    """
    if 0 < params.temperature < SMALLEST_VLLM_TEMPERATURE:
        raise ValueError(
            f"temperature is {params.temperature}, but vLLM would sample at {SMALLEST_VLLM_TEMPERATURE}: raise it, or "
            "give 0 for the most likely tokens"
        )
    num_logprobs = 0  # besides the sampled token's
    if params.support_size is not None:
        num_logprobs = min(with_ties(params.support_size), model.vocab_size)  # of all tokens that are kept
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "min_p": params.min_p,
        "top_p": params.top_p,
        "logprobs": num_logprobs,
        "stop_token_ids": [*model.eos_token_ids, *end_ids],
        "stop": list(stop),
        "detokenize": bool(stop),
    }


def device_options(config: VLLMConfig, on_cpu: bool) -> dict[str, Any]:
    """The options that vLLM is started with on a CPU or a GPU.

    Args:
        config: of vLLM.
        on_cpu: whether vLLM computes on the CPU.
    """
    # Published folders of Mistral models have files of another format, too, which vLLM would prefer.
    as_transformers = {"config_format": "hf", "tokenizer_mode": "hf"}
    if not on_cpu:
        return {"gpu_memory_utilization": config.gpu_memory_utilization, **as_transformers, **config.engine_options}
    return {
        "kv_cache_memory_bytes": int(config.cpu_cache_gib * 2**30),
        "enforce_eager": True,  # compiling takes minutes
        # Samples share the full blocks of their prompt. 32 tokens are vLLM's smallest block there; its default is 128.
        "block_size": 32,
        # vLLM 0.32 rewinds the generator of a request whose prompt it has run in part. A CPU's generator cannot rewind.
        "enable_chunked_prefill": False,
        **as_transformers,
        **config.engine_options,
    }


def plain_weights(path: str, config: VLLMConfig) -> dict[str, Any]:
    """The options by which vLLM has plain weights of a model whose folder has quantized ones.

    The policy's weights are dequantized, and each sync brings plain ones. vLLM would round them into the layers of the
    folder's kind of quantization, beside scales that no sync brings.

    Args:
        path: folder of the model.
        config: of vLLM.
    """
    if not is_quantized(path):
        return {}
    # vLLM (0.32) asks the entry of a gpt-oss for its method, and rounds no weights itself where there is an entry.
    entry = None if "quantization" in config.engine_options else {"quant_method": ""}
    return {"hf_overrides": {"quantization_config": entry}}


def answer_fitting(
    requests: Sequence[Request], max_sequence_tokens: int, sample: Callable[[list[Request]], Iterable[Completion]],
    why_no_images: Callable[[], str] = str,
) -> Answers:  # fmt: skip
    """Has vLLM sample the requests that it can answer, and refuses the others.

    Args:
        requests: to be answered.
        max_sequence_tokens: most tokens of a sequence that vLLM was started for.
        sample: samples a completion for each request.
        why_no_images: tells why requests with images are refused; empty: they are answered.
    """
    refused = why_no_images() if any(request.images is not None for request in requests) else ""
    refusals = [_refusal(request, max_sequence_tokens, refused) for request in requests]
    fitting = [request for request, refusal in zip(requests, refusals, strict=True) if refusal is None]
    completions = iter(sample(fitting) if fitting else ())
    return [next(completions) if refusal is None else refusal for refusal in refusals]


def _refusal(request: Request, max_sequence_tokens: int, why_no_images: str) -> RequestError | None:
    if request.images is not None and why_no_images:
        return RequestError(why_no_images)
    longest = len(request.token_ids) + request.max_new_tokens
    if longest <= max_sequence_tokens:
        return None
    return RequestError(
        f"a prompt and its completion may have {longest} tokens, vLLM was started for {max_sequence_tokens}: raise "
        "rollout.max_prompt_tokens or rollout.max_new_tokens"
    )


def require_version(weight_version: int | None) -> int:
    """The version of vLLM's weights.

    Raises:
        RequestError: there are no weights.
    """
    if weight_version is None:
        raise RequestError("vLLM has no weights yet: call sync() before generate()")
    return weight_version


def completion_of(sample: Any, spans: tuple[Span, ...]) -> Completion:
    """Converts a sample of vLLM, whose tokens have these versions of the weights, to a completion.

    For each token vLLM returns the id and log-probability of the sampled token. If the most likely tokens were
    requested, their ids and log-probabilities follow. Tokens that the sampler has cut off have log-probability -inf.
    """
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave up a sample: {sample.finish_reason}")
    tokens = list(sample.token_ids)
    shape = (len(tokens), -1 if tokens else 1)
    ids = torch.tensor(sample.logprobs.token_ids, dtype=torch.int32).view(shape)
    logprobs = torch.tensor(sample.logprobs.logprobs, dtype=torch.float64).view(shape)
    support = _support(ids, logprobs) if ids.shape[1] > 1 else None
    return Completion(tokens, logprobs[:, 0].tolist(), sample.finish_reason, spans, support)


def _support(ids: Tensor, logprobs: Tensor) -> Tensor:
    """The ids that the sampler has kept. The sampled id, from the first column, is among them exactly once."""
    kept = ids.where(logprobs > -torch.inf, -1)
    sampled, likely = kept[:, :1], kept[:, 1:]
    is_known = (likely == sampled).any(1, keepdim=True)
    support = torch.cat([likely, sampled.masked_fill(is_known, -1)], dim=1)
    share = logprobs.roll(-1, 1).exp().where(support >= 0, 0).sum(1).min()
    if share < 0.999:
        warnings.warn(
            f"vLLM sampled a token among more equally likely tokens than it returned: the returned tokens have "
            f"a probability of {share:.4f} together, and the token's log-probability is taken over these",
            stacklevel=2,
        )
    return support
