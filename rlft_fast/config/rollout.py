"""How completions are sampled."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlft_fast.config.base import Section


class VLLMConfig(Section):
    """vLLM as the generator."""

    process: Literal["colocated", "separate"] = "colocated"
    """In the training processes themselves, or in a process beside each, which weights are sent to."""
    transfer: Literal["auto", "shared_memory", "ipc", "nccl"] = "auto"
    """How weights are sent to a separate process; auto: ipc on GPUs, shared_memory on CPUs."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one copy of the generator."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Share of a GPU's memory for the generator's weights and key-value cache."""
    cpu_cache_gib: PositiveFloat = 1.0
    """Memory of the key-value cache where the generator runs on the CPU."""
    check_weights: bool = False
    """Compare checksums of all weights after a sync: separate, as sent and received; colocated, between processes."""


class RolloutConfig(Section):
    """Sampling of completions."""

    backend: Literal["hf", "vllm"] = "hf"
    """What generates: transformers with the policy itself, or vLLM with a copy of its weights."""
    vllm: VLLMConfig = VLLMConfig()
    """Settings of backend vllm."""
    prompts_per_step: PositiveInt = 8
    """Prompts sampled per step, over all processes."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt: the group of GRPO."""
    max_prompt_tokens: PositiveInt = 512
    """A longer prompt is an error that names its row."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of a completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities of training use it too."""
    top_k: PositiveInt | None = None
    """Sample among so many most likely tokens only; log-probabilities of training are over those, too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of these, sample among the most likely that together have this probability. Needs a top_k."""
    stop: tuple[str, ...] = ()
    """Texts, or special tokens by name, that end a completion, as an end token does."""
    batch_size: PositiveInt = 64
    """Completions generated at once on each process."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.top_p < 1 and self.top_k is None:
            raise ValueError(
                f"top_p is {self.top_p} without a top_k, but training keeps the ids that each token was sampled among: "
                "bound their number, for example by top_k: 100"
            )
        return self
