"""verl's FSDP engine with log-probabilities and entropies by rlft_fast, by one line of verl's configuration.

    python -m verl.trainer.main_ppo ... actor_rollout_ref.model.external_lib=rlft_fast.integrations.verl

verl imports `external_lib` in each of its Ray workers, and the import changes verl there. Engine, loss, weights and
checkpoints are verl's own. So is the optimizer without two more lines:

    actor_rollout_ref.actor.optim.optimizer_impl=rlft_fast.ops actor_rollout_ref.actor.optim.optimizer=FusedAdamW

For verl 0.9.1 with `fsdp` or `fsdp2`.
"""

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from rlft_fast.integrations.seams import require_function
from rlft_fast.models import patch_lm_head

__all__ = ["Scores", "enable", "patch_forward"]

_TESTED = "0.9.1"


@dataclass
class Scores(ModelOutput):
    """The output that verl reads from a model with fused kernels, in the shape of `input_ids`."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def enable() -> None:
    """Changes verl in this process. The import of this module calls it where verl is installed.

    Models whose configuration names this module as `external_lib` are patched, whatever their `use_fused_kernels` says.

    Raises:
        ImportError: this version of verl lacks a function that has to be replaced.
    """
    require_function(
        "verl.models.transformers.monkey_patch:patch_forward_with_backends", ("model", "use_fused_kernels"), _TESTED
    )
    own_init = require_function(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.__init__",
        ("model_config", "engine_config"),
        _TESTED,
    )
    if own_init.__module__ == __name__:
        return  # enabled already
    from verl.models.transformers import monkey_patch
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkey_patch.patch_forward_with_backends = patch_forward
    FSDPEngineWithLMHead.__init__ = _with_fused_kernels(own_init)


def patch_forward(model: PreTrainedModel, use_fused_kernels: bool = False, **options: Any) -> None:
    """Replaces verl's `patch_forward_with_backends`; `options` name one of verl's kernels and are ignored.

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
        # For packed rows verl passes labels that it has shifted itself.
        targets = input_ids.roll(-1, -1) if shift_labels is None else shift_labels
        scored = {"logprob_targets": targets, "temperature": temperature, "return_entropy": True}
        result = patched.forward(self, input_ids=input_ids, **inputs, **scored)
        return Scores(result.logprob, result.entropy)

    model.__class__ = type(patched.__name__, (patched,), {"forward": forward, "__module__": patched.__module__})


def _with_fused_kernels(own_init: Any) -> Any:
    """The engine's `__init__`, which turns verl's `use_fused_kernels` on for models that name this module."""

    @functools.wraps(own_init, assigned=("__name__", "__qualname__", "__doc__"))
    def init(self, model_config: Any, engine_config: Any, *args: Any, **options: Any) -> None:
        named = model_config.external_lib
        if __name__ in ([named] if isinstance(named, str) else named or []):
            for config in (model_config, engine_config):  # verl freezes its configurations
                object.__setattr__(config, "use_fused_kernels", True)
        own_init(self, model_config, engine_config, *args, **options)

    return init


if find_spec("verl"):
    enable()
