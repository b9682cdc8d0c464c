"""OpenRLHF's policy with log-probabilities and entropies by rlft_fast, for completion tokens only.

    python -m examples.openrlhf_fused --actor.model_name_or_path ...    # the arguments of openrlhf.cli.train_ppo_ray

OpenRLHF has no setting for another policy head. Instead, Ray calls `use_rlft_fast` in each of its workers, and each
worker has to find this module as `examples.openrlhf_fused`. Trainer, loss, optimizer and checkpoints are OpenRLHF's
own. For OpenRLHF 0.11.2.
"""

import runpy
from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlft_fast import patch_lm_head

actor_init, actor_forward = Actor.__init__, Actor.forward


def use_rlft_fast() -> None:
    Actor.__init__, Actor.forward = init, forward


def init(self, *args: Any, **options: Any) -> None:
    """Runs Actor's own `__init__`, then the patch. Models with images keep their head.

    Raises:
        ValueError: a model that `patch_lm_head` refuses, or whose router has an auxiliary loss.
    """
    actor_init(self, *args, **options)
    if getattr(self, "is_vlm", False):
        return
    model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} has a router, and its auxiliary loss would be lost: use OpenRLHF's Actor"
        )
    patch_lm_head(model)


def forward(
    self,
    sequences: Tensor,
    action_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    return_output: bool = False,
    return_entropy: bool = False,
    ring_attn_group: Any = None,
    **options: Any,
) -> Any:
    """Answers calls that ask for log-probabilities of actions; all other calls go to Actor's own forward."""
    if action_mask is None or getattr(self, "is_vlm", False):
        own = {"return_output": return_output, "return_entropy": return_entropy, "ring_attn_group": ring_attn_group}
        return actor_forward(self, sequences, action_mask, attention_mask, **own, **options)
    actions = action_mask.shape[1]
    labels = torch.full_like(sequences, -100)
    labels[:, -actions:] = sequences[:, -actions:].masked_fill(action_mask == 0, -100)
    if self.packing_samples:
        inputs, positions, _, *padding = unpad_and_slice_tensor(sequences, attention_mask, ring_attn_group)
        targets, mask = unpad_and_slice_tensor(labels, attention_mask, ring_attn_group)[2], None  # rolled by one
    else:
        inputs, targets, mask = sequences, labels.roll(-1, 1), attention_mask
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    scored = {"logprob_targets": targets, "temperature": self.temperature, "return_entropy": return_entropy}
    result = self.model(inputs, attention_mask=mask, position_ids=positions, **scored)

    def of_actions(values: Tensor) -> Tensor:
        if self.packing_samples:
            values = gather_and_pad_tensor(values, ring_attn_group, *padding, *sequences.shape)
        return values[:, -actions - 1 : -1]

    output = CausalLMOutputWithPast()
    if return_entropy:
        output.entropy = of_actions(result.entropy)
    return (of_actions(result.logprob), output) if return_output else of_actions(result.logprob)


if __name__ == "__main__":
    import ray

    variables = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
    hook = "examples.openrlhf_fused.use_rlft_fast"
    ray.init(runtime_env={"env_vars": variables, "worker_process_setup_hook": hook})  # else train_ppo_ray does
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
