"""The memory that generation needs per rank, from the configuration and the policy's config.json."""

import math
from typing import Any

import torch

from rlft_fast.config import Config
from rlft_fast.engine.memory.engine import local_numel
from rlft_fast.engine.sharding import is_wrapped
from rlft_fast.engine.weight_sync import BUCKET_BYTES
from rlft_fast.models import PolicyModel, layer_configs

_LOGIT_COPIES = 3  # float32 copies of the last position's logits: raw, scaled, probabilities


class GeneratorMemory:
    """Bytes of generation on each rank: vLLM's memory, or the memory of transformers' ``generate``.

    Args:
        config: configuration of the run.
        model: the policy.
        world_size: number of ranks.
        memory_bytes: memory of each rank's device.
        device_type: ``"cuda"`` or ``"cpu"``.

    Attributes:
        in_vllm: whether vLLM generates.
        awake_bytes: vLLM's bytes on the device while it generates.
        asleep_bytes: vLLM's bytes between rollouts. On CPUs it never sleeps and keeps all.
        loading_bytes: vLLM's bytes while it takes new weights.
        beside_policy_bytes: bytes of ``generate``: gathered or narrow weights, key-value cache and logits; 0 with vLLM.
    """

    def __init__(
        self, config: Config, model: PolicyModel, world_size: int, memory_bytes: float, device_type: str
    ) -> None:
        config = config.for_device(device_type)
        self.config, self.rollout, vllm = config, config.rollout, config.rollout.vllm
        self.model, self.world_size = model, world_size
        dtype, numel = config.rollout.dtype_beside(config.actor.compute_dtype), local_numel(model.parameters(), 1)
        self.width = getattr(torch, dtype).itemsize
        self.whole_weights = self.width * numel
        self.wrapped = is_wrapped(config.actor, world_size)
        self.in_vllm = self.rollout.backend == "vllm"
        self.on_gpu = device_type == "cuda"
        colocated = vllm.process == "colocated"
        self.vllm_weights = self.whole_weights // (vllm.tensor_parallel_size if colocated or self.on_gpu else 1)
        self.asleep_bytes = self.awake_bytes = self.loading_bytes = self.beside_policy_bytes = 0
        if not self.in_vllm:
            gathered = self.wrapped * numel * getattr(torch, config.actor.compute_dtype).itemsize
            held = config.actor.compute_dtype if self.wrapped else config.actor.param_dtype
            copies = gathered + (dtype != held) * self.whole_weights
            self.beside_policy_bytes = copies + self._cache_bytes() + self._logits_bytes()
        elif config.has_servers:  # none of it is this process's
            pass
        elif not self.on_gpu:  # vLLM never sleeps on a CPU
            self.asleep_bytes = self.awake_bytes = self.loading_bytes = self.vllm_weights + int(
                vllm.cpu_cache_gib * 2**30
            )
        elif colocated or vllm.transfer != "nccl":  # with nccl vLLM has GPUs of its own
            self.awake_bytes, self.loading_bytes = int(vllm.gpu_memory_utilization * memory_bytes), self.vllm_weights

    def refusal(self) -> str:
        """Why vLLM could not start, if its share of a GPU cannot hold weights and one sequence's cache; else empty."""
        needed = (
            self.vllm_weights
            + self._sequence_bytes(self.config.longest_sequence) // self.rollout.vllm.tensor_parallel_size
        )
        if not (self.in_vllm and self.on_gpu and self.awake_bytes) or needed <= self.awake_bytes:
            return ""
        enough = math.ceil(needed * self.rollout.vllm.tensor_parallel_size / self.awake_bytes)
        return (
            f"rollout.vllm.gpu_memory_utilization {self.rollout.vllm.gpu_memory_utilization:g} gives vLLM "
            f"{self.awake_bytes / 2**30:.2f} GiB, but its weights and the cache of one sequence take "
            f"{needed / 2**30:.2f}: raise it, or rollout.vllm.tensor_parallel to at least {enough}, on as many GPUs"
        )

    def _cache_bytes(self) -> int:
        """The key-value cache, and one layer of it a second time: the cache grows by copying a layer.

        The turns of as many episodes are kept beside it for the next turn of each.
        """
        rows, length = self._rows()
        layers = self.model.backbone.config.get_text_config().num_hidden_layers
        copies = 1 + self._has_turns + 1 / layers
        return math.ceil(rows * self._sequence_bytes(length, windows=not self._has_turns) * copies)

    @property
    def _has_turns(self) -> bool:
        environments = self.config.environments_by_name.values()
        return any(each.max_turns > 1 for each in environments) and self.model.decodes_in_place

    def _rows(self) -> tuple[int, int]:
        """Number and length of the completions generated at once, for the batch that needs the largest cache."""
        rollout = self.rollout
        prompts = -(-rollout.prompts_per_step // self.world_size)
        if self._has_turns:  # which differ, so that each is a prompt
            rows = min(prompts * rollout.samples_per_prompt, rollout.batch_size)
        else:
            samples = min(rollout.samples_per_prompt, rollout.batch_size)
            rows = samples * min(max(rollout.batch_size // rollout.samples_per_prompt, 1), prompts)
        batches = [(rows, rollout.max_prompt_tokens + rollout.max_new_tokens)]
        if self.config.evaluation is not None:
            batches.append((rollout.batch_size, rollout.max_prompt_tokens + self.config.max_evaluation_tokens))
        return max(batches, key=lambda batch: batch[0] * batch[1])

    def _sequence_bytes(self, length: int, *, windows: bool = True) -> int:
        """Bytes of the keys and values of one sequence, in layers with a window of the window alone, or of all."""
        config = self.model.backbone.config.get_text_config()
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        window = (getattr(config, "sliding_window", None) if windows else None) or length
        layers = zip(map(_cached_width, layer_configs(config)), types, strict=True)
        return self.width * sum(
            width * (min(length, window) if kind == "sliding_attention" else length) for width, kind in layers
        )

    def _logits_bytes(self) -> int:
        return _LOGIT_COPIES * 4 * self._rows()[0] * self.model.head.weight.shape[0]

    @property
    def bucket_bytes(self) -> int:
        """Bytes for sending weights to vLLM: the bucket, if weights are sharded, and the largest weight whole."""
        return BUCKET_BYTES * self.wrapped + self.width * max(p.numel() for p in self.model.parameters())


def _cached_width(config: Any) -> int:
    """Numbers that the cache of a layer has for each token."""
    if not getattr(config, "num_attention_heads", None):  # its states are small, and do not grow
        return 0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    key_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    value_width = getattr(config, "v_head_dim", None) or key_width
    if getattr(config, "qk_nope_head_dim", None):  # DeepSeek: the cache has separate keys for every head
        heads, key_width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    return heads * (key_width + value_width)
