"""OpenRLHF's policy with log-probabilities and entropies by rlft_fast, for completion tokens only.

    python -m rlft_fast.integrations.openrlhf --actor.model_name_or_path ...   # arguments of openrlhf.cli.train_ppo_ray

OpenRLHF has no setting for another policy head. Instead, Ray calls `enable` in each of its workers. Trainer,
loss, optimizer and checkpoints are OpenRLHF's own. For OpenRLHF 0.11.2.
"""

import runpy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlft_fast.integrations.seams import require_function
from rlft_fast.models import patch_lm_head

__all__ = ["enable", "main", "runtime_env"]

_NAME = "rlft_fast.integrations.openrlhf"  # __name__ may be __main__
_TESTED = "0.11.2"
_PARAMETERS = ("sequences", "action_mask", "attention_mask", "return_output", "return_entropy", "ring_attn_group")


def enable() -> None:
    """Changes OpenRLHF's `Actor` in this process.

    Raises:
        ImportError: this version of OpenRLHF lacks a function that has to be replaced.
    """
    forward = require_function("openrlhf.models:Actor.forward", _PARAMETERS, _TESTED)
    if forward.__module__ == __name__:
        return  # enabled already
    unpad, pad = (
        require_function(f"openrlhf.models.ring_attn_utils:{name}", (), _TESTED)
        for name in ("unpad_and_slice_tensor", "gather_and_pad_tensor")
    )
    from openrlhf.models import Actor

    Actor.__init__, Actor.forward = _patching(Actor.__init__), _fused(forward, unpad, pad)


def runtime_env() -> dict[str, Any]:
    """The environment that Ray has to give to OpenRLHF's workers, with the variables that OpenRLHF sets there."""
    variables = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
    return {"env_vars": variables, "worker_process_setup_hook": f"{_NAME}.enable"}


def _patching(own_init: Callable[..., None]) -> Callable[..., None]:
    def init(self, *args: Any, **options: Any) -> None:
        """Runs Actor's own `__init__`, then the patch. Models with images keep their head.

        Raises:
            ValueError: a model that `patch_lm_head` refuses, or whose router has an auxiliary loss.
        """
        own_init(self, *args, **options)
        if getattr(self, "is_vlm", False):
            return
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if getattr(model.config, "output_router_logits", False):
            raise ValueError(
                f"{type(model).__name__} has a router, and its auxiliary loss would be lost: use OpenRLHF's Actor"
            )
        patch_lm_head(model)

    return init


def _fused(own_forward: Callable[..., Any], unpad: Callable[..., Any], pad: Callable[..., Any]) -> Callable[..., Any]:
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
        if action_mask is None or attention_mask is None or getattr(self, "is_vlm", False):
            own = {"return_output": return_output, "return_entropy": return_entropy, "ring_attn_group": ring_attn_group}
            return own_forward(self, sequences, action_mask, attention_mask, **own, **options)
        actions = action_mask.shape[1]
        labels = torch.full_like(sequences, -100)
        labels[:, -actions:] = sequences[:, -actions:].masked_fill(action_mask == 0, -100)
        if self.packing_samples:
            inputs, positions, _, *padding = unpad(sequences, attention_mask, ring_attn_group)
            targets, mask = unpad(labels, attention_mask, ring_attn_group)[2], None  # rolled by one
        else:
            inputs, targets, mask = sequences, labels.roll(-1, 1), attention_mask
            positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        scored = {"logprob_targets": targets, "temperature": self.temperature, "return_entropy": return_entropy}
        result = self.model(inputs, attention_mask=mask, position_ids=positions, **scored)

        def of_actions(values: Tensor) -> Tensor:
            if self.packing_samples:
                values = pad(values, ring_attn_group, *padding, *sequences.shape)
            return values[:, -actions - 1 : -1]

        output = CausalLMOutputWithPast()
        if return_entropy:
            output.entropy = of_actions(result.entropy)
        return (of_actions(result.logprob), output) if return_output else of_actions(result.logprob)

    return forward


def main() -> None:
    """Runs `openrlhf.cli.train_ppo_ray` with the arguments of this program."""
    import ray

    ray.init(runtime_env=runtime_env())  # else train_ppo_ray does
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    main()
