"""verl's policy with log-probabilities and entropies by rlft_fast, by settings of verl's own.

    python -m verl.trainer.main_ppo ... \
        actor_rollout_ref.model.external_lib=examples.verl_fused \
        actor_rollout_ref.model.use_fused_kernels=True \
        actor_rollout_ref.actor.optim.optimizer_impl=rlft_fast.ops \
        actor_rollout_ref.actor.optim.optimizer=FusedAdamW

verl imports `external_lib` in each of its workers, so Python has to find `examples.verl_fused` there. Engine, loss,
weights and checkpoints are verl's own. Without the last two lines, so is the optimizer. For verl 0.9.1 with FSDP.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from verl.models.transformers import monkey_patch

from rlft_fast import patch_lm_head


@dataclass
class Scores(ModelOutput):
    """The output that verl reads from a model with fused kernels, in the shape of `input_ids`."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def patch_forward(model: PreTrainedModel, use_fused_kernels: bool = False, **options: Any) -> None:
    """Replaces verl's `patch_forward`; `options` name one of verl's kernels and are ignored.

    Raises:
        ValueError: `patch_lm_head` refuses the model.
    """
    if not use_fused_kernels:
        return
    patch_lm_head(model)
    patched = type(model)

    def forward(
        self, input_ids: Tensor, temperature: float = 1.0, shift_labels: Tensor | None = None,
        return_dict: bool = True, **inputs: Any,
    ) -> Scores:  # fmt: skip
        targets = input_ids.roll(-1, -1) if shift_labels is None else shift_labels  # those of packed rows verl rolls
        scored = {"logprob_targets": targets, "temperature": temperature, "return_entropy": True}
        result = patched.forward(self, input_ids=input_ids, **inputs, **scored)
        return Scores(result.logprob, result.entropy)

    model.__class__ = type(patched.__name__, (patched,), {"forward": forward, "__module__": patched.__module__})


monkey_patch.patch_forward_with_backends = patch_forward
