"""How completions are sampled."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlft_fast.config.base import Section, rule
from rlft_fast.config.resume import MayChange
from rlft_fast.config.schema.servers import ServerEntry

SMALLEST_VLLM_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a smaller one is asked for, but reports it only in its log."""
LARGEST_VLLM_RANK = 512
"""Of an adapter that vLLM computes with."""


_OUR_KEYS = {
    "model": "model", "tokenizer": "model", "seed": "seed", "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.cpu_cache_gib", "max_num_seqs": "rollout.batch_size",
    "max_model_len": "rollout.max_prompt_tokens and max_new_tokens",
}  # fmt: skip
_REFUSED = {
    "that says how the weights of the policy arrive, which the run decides": (
        "load_format", "weight_transfer_config", "worker_extension_cls", "worker_cls", "enable_sleep_mode",
        "quantization_config", "enable_lora", "hf_overrides", "model_class_overrides", "revision",
    ),
    "that changes the log-probabilities that the update needs": (
        "logprobs_mode", "max_logprobs", "generation_config", "override_generation_config", "logits_processors",
        "enable_chunked_prefill",
    ),
    "that says which processes compute, which the run decides": (
        "distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port", "device_ids",
    ),
    "and code of a model's folder is not run": ("trust_remote_code",),
    "that says whether texts are made, which rollout.stop decides": ("skip_tokenizer_init",),
}  # fmt: skip
# By which vLLM rounds each new version of the weights itself.
_ONLINE_FLOAT8 = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
# Of speculative decoding, without a draft model.
_DRAFTED_BY_RULE = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class")
_OF_PROCESSES = ("data_parallel", "pipeline_parallel", "prefill_context_parallel", "decode_context_parallel")


def _why_refused(name: str) -> str | None:
    if name.startswith(_OF_PROCESSES):
        return "that says which processes compute, which the run decides"
    return next((why for why, names in _REFUSED.items() if name in names), None)


class VLLMConfig(Section):
    """The generator vLLM."""

    process: MayChange[Literal["colocated", "separate"]] = "colocated"
    """Run vLLM inside each training process, or in a separate process beside it, which receives the weights."""
    transfer: MayChange[Literal["auto", "socket", "ipc", "nccl"]] = "auto"
    """How a separate process or servers receive the weights; auto: a process on GPUs by ipc, all others by socket."""
    tensor_parallel: MayChange[Literal["auto"] | PositiveInt] = "auto"
    """GPUs that share one copy of the generator; auto: the fewest in whose memory it fits."""
    gpu_memory_utilization: MayChange[float] = Field(default=0.4, gt=0, le=1)
    """Share of a GPU's memory for the generator's weights and key-value cache."""
    cpu_cache_gib: MayChange[PositiveFloat] = 1.0
    """Size of the key-value cache in GiB, if the generator runs on the CPU."""
    engine_options: MayChange[dict[str, Any]] = Field(default={})
    """Further options of vLLM's engine (EngineArgs) by their names, such as max_num_batched_tokens: 8192."""
    adapter: MayChange[bool] = False
    """Send the adapters of actor.lora alone, with which vLLM computes, in place of all weights with them merged."""
    check_weights: MayChange[bool] = False
    """Compare checksums of weights after a sync: sent with received (separate), or across processes (colocated)."""

    @rule
    def _options_are_vllms(self) -> Iterator[str]:
        for name, value in self.engine_options.items():
            key = name.replace("-", "_")
            if key == "quantization" and value not in _ONLINE_FLOAT8:
                yield (
                    f"engine_options has {name}: {value}, but new weights arrive as plain numbers, which vLLM rounds "
                    f"itself with {', '.join(_ONLINE_FLOAT8)} alone: name one of these, or leave it out"
                )
            elif key in _OUR_KEYS:
                yield f"engine_options has {name}, which the run sets by {_OUR_KEYS[key]}: set this key"
            elif (why := _why_refused(key)) is not None:
                yield f"engine_options has {name}, {why}: leave it out"

    @rule
    def _no_draft_is_random(self) -> Iterator[str]:
        """vLLM starts without weights. A draft model would start so, too, and no sync brings its weights."""
        options = {name.replace("-", "_"): value for name, value in self.engine_options.items()}
        given = options.get("speculative_config")
        given = given if isinstance(given, dict) else {}
        places = given.get("method"), options.get("spec_method"), given.get("model"), options.get("spec_model")
        method = next((own for own in places if own is not None), None)
        has_weights = self.adapter or "draft_load_config" in given
        if method is not None and method not in _DRAFTED_BY_RULE and not has_weights:
            yield (
                f"engine_options asks for drafts by {method}, a model that no sync brings weights to, and whose drafts "
                "would be random: take method ngram or suffix, or, for servers, add draft_load_config: {load_format: "
                "auto} to speculative_config"
            )

    @property
    def tensor_parallel_size(self) -> int:
        """`tensor_parallel`; 1 for "auto", which `rlft_fast.engine.memory.choose` replaces where memory is short."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel


class RolloutConfig(Section):
    """Sampling of completions."""

    backend: MayChange[Literal["hf", "vllm"]] = "hf"
    """Generator: transformers with the policy itself, or vLLM with a copy of the weights."""
    vllm: VLLMConfig = VLLMConfig()
    """Settings of backend vllm."""
    dtype: MayChange[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Dtype in which completions are sampled; auto: actor.compute_dtype, which is measured on CPUs.

    With another dtype, the sampler's probabilities differ from training, see algorithm.rollout_correction. Backend hf
    takes no wider dtype than actor.compute_dtype."""
    servers: MayChange[tuple[ServerEntry, ...]] = ()
    """vLLM servers that generate, as URLs, or as files with one URL per line, read before each sync. Backend vllm."""
    prompts_per_step: PositiveInt = 8
    """Prompts sampled per step, over all processes."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt. GRPO calls them a group."""
    max_prompt_tokens: MayChange[PositiveInt] = 512
    """Most tokens of a prompt. For longer prompts see data.overlong."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of a completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Log-probabilities in training use it, too."""
    top_k: PositiveInt | None = None
    """Sample only among the k most likely tokens. Log-probabilities in training are over the same tokens; null: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample only tokens with this share of the most likely token's probability. Needs a top_k."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of the tokens left, sample only among the likeliest whose probabilities add up to this. Needs a top_k."""
    stop: tuple[str, ...] = ()
    """Texts, or names of special tokens, that end a completion as an end token does."""
    structured: dict[Literal["regex", "json_schema", "grammar"], str | dict[str, Any]] = Field(default={})
    """One of regex, json_schema and grammar (EBNF), which each completion obeys. Needs top_k, and a colocated vLLM."""
    batch_size: MayChange[PositiveInt] = 64
    """Most completions generated at once on each process."""
    max_staleness: Annotated[NonNegativeInt, Field(le=1000)] = 0
    """Most updates between the weights that sample a step and its own update. Above 0, sampling overlaps training."""
    update: Literal["drain", "in-flight"] = "drain"
    """When weights come, with max_staleness. drain: between steps; in-flight: after each update, within answers."""

    def dtype_beside(self, compute_dtype: str) -> str:
        """The dtype in which completions of a policy are sampled, for the dtype that the policy computes in."""
        return compute_dtype if self.dtype == "auto" else self.dtype

    @rule
    def _structure_has_a_support(self) -> Iterator[str]:
        if not self.structured:
            return
        if len(self.structured) > 1 or not all(
            isinstance(value, str) or name == "json_schema" for name, value in self.structured.items()
        ):
            yield "structured has one of regex (a text), json_schema (a text or a mapping) and grammar (a text)"
        if self.backend != "vllm" or self.vllm.process != "colocated" or self.servers:
            yield (
                "structured is for a vLLM in the processes that train: set backend: vllm, with vllm.process: colocated"
            )
        if self.top_k is None:
            yield (
                "structured is given without a top_k, but training stores the candidates of each token: bound their "
                "number, for example by top_k: 100"
            )

    @rule
    def _adapters_go_to_a_vllm_on_this_machine(self) -> Iterator[str]:
        if self.vllm.adapter and (self.backend != "vllm" or self.servers):
            yield (
                "vllm.adapter is for a vLLM in the processes that train or beside them: set backend: vllm and leave "
                "servers out, or leave vllm.adapter out"
            )
        if self.vllm.adapter and "quantization" in self.vllm.engine_options:
            yield "vllm.adapter has not run beside quantized weights: leave engine_options.quantization or adapter out"

    @rule
    def _updates_in_flight_what_is_stale(self) -> Iterator[str]:
        if self.update == "in-flight" and not self.max_staleness:
            yield "update is in-flight, but max_staleness is 0: raise max_staleness to at least 1, or leave update out"

    @rule
    def _bounded(self) -> Iterator[str]:
        if self.servers and self.backend != "vllm":
            yield "servers are vLLM's, and backend is hf: set backend to vllm, or leave servers out"
        for name, value, cuts in (("min_p", self.min_p, self.min_p > 0), ("top_p", self.top_p, self.top_p < 1)):
            if cuts and self.top_k is None:
                yield (
                    f"{name} is {value} without a top_k, but training stores the candidates of each "
                    "token: bound their number, for example by top_k: 100"
                )
