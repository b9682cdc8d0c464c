"""What generation needs per rank, from the configuration and the policy's config.json."""

import math

import torch

from rlft_fast.config import Config
from rlft_fast.engine.memory.engine import is_wrapped, local_numel
from rlft_fast.engine.weight_sync import BUCKET_BYTES
from rlft_fast.models import PolicyModel

_LOGIT_COPIES = 4  # of the last position's logits in float32: as they come, scaled, as probabilities, as scores


class GeneratorMemory:
    """What generation takes on each rank: vLLM's memory, or what transformers' ``generate`` needs beside the policy.

    Args:
        config: of the run.
        model: the policy.
        world_size: number of ranks.
        memory_bytes: of each rank's device.
        device_type: of the ranks.

    Attributes:
        in_vllm: vLLM generates.
        awake_bytes: bytes that vLLM has on the device while it generates.
        asleep_bytes: bytes that it keeps in between; on CPUs all.
        loading_bytes: bytes that it has while it takes new weights.
        beside_policy_bytes: bytes that ``generate`` takes: gathered weights, key-value cache and logits; 0 with vLLM.
    """

    def __init__(
        self, config: Config, model: PolicyModel, world_size: int, memory_bytes: float, device_type: str
    ) -> None:
        self.rollout, self.evaluation, vllm = config.rollout, config.evaluation, config.rollout.vllm
        self.model, self.world_size = model, world_size
        self.width = getattr(torch, config.actor.compute_dtype).itemsize
        self.whole_weights = self.width * local_numel(model.parameters(), 1)
        self.wrapped = is_wrapped(config.actor, world_size)
        self.in_vllm = self.rollout.backend == "vllm"
        self.on_gpu = device_type == "cuda"
        colocated = vllm.process == "colocated"
        self.vllm_weights = self.whole_weights // (vllm.tensor_parallel if colocated or self.on_gpu else 1)
        self.asleep_bytes = self.awake_bytes = self.loading_bytes = self.beside_policy_bytes = 0
        if not self.in_vllm:
            gathered = self.whole_weights if self.wrapped else 0
            self.beside_policy_bytes = gathered + self._cache_bytes() + self._logits_bytes()
        elif not self.on_gpu:  # where it never sleeps
            self.asleep_bytes = self.awake_bytes = self.loading_bytes = self.vllm_weights + int(
                vllm.cpu_cache_gib * 2**30
            )
        elif colocated or vllm.transfer != "nccl":  # otherwise it has GPUs of its own
            self.awake_bytes, self.loading_bytes = int(vllm.gpu_memory_utilization * memory_bytes), self.vllm_weights

    def refusal(self) -> str:
        """Why vLLM could not start with its share of a GPU: no room for weights and the cache of one sequence."""
        needed = self.vllm_weights + self._sequence_bytes(self._longest) // self.rollout.vllm.tensor_parallel
        if not (self.in_vllm and self.on_gpu and self.awake_bytes) or needed <= self.awake_bytes:
            return ""
        return (
            f"rollout.vllm.gpu_memory_utilization {self.rollout.vllm.gpu_memory_utilization:g} gives vLLM "
            f"{self.awake_bytes / 2**30:.2f} GiB, but its weights and the cache of one sequence take "
            f"{needed / 2**30:.2f}: raise it, or rollout.vllm.tensor_parallel"
        )

    @property
    def _longest(self) -> int:
        answer = self.evaluation.max_new_tokens if self.evaluation is not None else 0
        return self.rollout.max_prompt_tokens + max(self.rollout.max_new_tokens, answer)

    def _cache_bytes(self) -> int:
        """The key-value cache, and one layer's once more: it grows by copies."""
        rows, length = self._rows()
        layers = self.model.backbone.config.get_text_config().num_hidden_layers
        return math.ceil(rows * self._sequence_bytes(length) * (1 + 1 / layers))

    def _rows(self) -> tuple[int, int]:
        """Completions at once, and their length, of the batch that takes most; held-out prompts may be any number."""
        rollout = self.rollout
        prompts = min(
            max(rollout.batch_size // rollout.samples_per_prompt, 1), -(-rollout.prompts_per_step // self.world_size)
        )
        batches = [(prompts * rollout.samples_per_prompt, rollout.max_prompt_tokens + rollout.max_new_tokens)]
        if self.evaluation is not None:
            batches.append((rollout.batch_size, rollout.max_prompt_tokens + self.evaluation.max_new_tokens))
        return max(batches, key=lambda batch: batch[0] * batch[1])

    def _sequence_bytes(self, length: int) -> int:
        """Keys and values of a sequence, by the names that configurations have for their widths."""
        config = self.model.backbone.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        key_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        value_width = getattr(config, "v_head_dim", None) or key_width
        if getattr(config, "qk_nope_head_dim", None):  # DeepSeek, whose heads all have keys of their own in the cache
            heads, key_width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None) or length
        tokens = sum(min(length, window) if kind == "sliding_attention" else length for kind in types)
        return self.width * heads * (key_width + value_width) * tokens

    def _logits_bytes(self) -> int:
        return _LOGIT_COPIES * 4 * self._rows()[0] * self.model.head.weight.shape[0]

    @property
    def bucket_bytes(self) -> int:
        """Through which weights are sent: it, where they are sharded, and the largest weight whole."""
        return BUCKET_BYTES * self.wrapped + self.width * max(p.numel() for p in self.model.parameters())
