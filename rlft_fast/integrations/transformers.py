"""HF `Trainer` whose language model loss never holds all logits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Trainer

from rlft_fast.integrations.seams import require_function
from rlft_fast.models import (
    LogprobHead,
    added_keywords,
    patch_lm_head,
    require_next_token_loss,
    unpatch_lm_head,
)

__all__ = ["FusedLossTrainer"]

_WITH_VIRTUAL_ROWS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING")  # the others put them into the cache

require_function("transformers:Trainer.compute_loss", ("num_items_in_batch",), "5.19.0")


class FusedLossTrainer(Trainer):
    """`transformers.Trainer` for causal language models, with the cross-entropy of labels in three GEMMs.

    It takes the place of `Trainer`, with the same arguments, and patches the model (:func:`rlft_fast.patch_lm_head`).
    The loss is that of the model: labels are shifted by one, and -100 is left out. The sum over tokens is divided by
    the number of labels in all micro-batches of the step (`num_items_in_batch`), or in the batch if the trainer does
    not count them. Evaluation without `compute_metrics` computes the same. With `compute_metrics`, and where sequences
    are sharded over processes, the model computes its own loss and logits. PEFT's virtual tokens have no labels.

    Raises:
        ValueError: the model cannot be patched (an adapter on the head, for example), or its own loss is another one
            (labels that are not shifted, a z-loss). Or an option needs another loss: `compute_loss_func`,
            `label_smoothing_factor`, `fp16`, `use_liger_kernel`, several GPUs in one process, PEFT's CPT, or the
            auxiliary loss of ShadowPEFT.
    """

    def __init__(self, model: Any = None, *args: Any, **options: Any) -> None:
        super().__init__(model if model is None else _patched(model), *args, **options)
        for unfit, what, advice in (
            (self.compute_loss_func is not None, "compute_loss_func", "leave it out"),
            (self.label_smoother is not None, "label_smoothing_factor", "leave it out"),
            (self.args.fp16, "fp16, whose loss scale comes after the gradients of the head", "use bf16"),
            (self.args.use_liger_kernel, "use_liger_kernel, which replaces the patched forward", "leave it out"),
            (self.args.n_gpu > 1, "several GPUs in one process", "launch it by torchrun"),
            (_prompt_learning(self.model) == "CPT", "CPT, which has a loss of its own", "use PromptTuningConfig"),
            (_auxiliary_weight(self.model) > 0, "the loss that ShadowPEFT adds", "set auxiliary_loss_weight to 0"),
        ):
            if unfit:
                raise ValueError(f"FusedLossTrainer does not know {what}: {advice}, or use transformers.Trainer")

    def call_model_init(self, trial: Any = None) -> nn.Module:
        return _patched(super().call_model_init(trial))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """The mean cross-entropy of the labels, () float32. With `return_outputs` it is `Trainer`'s own method."""
        if return_outputs or inputs.get("labels") is None or self._shards_sequences():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels, targets = inputs.pop("labels"), inputs.pop("shift_labels", None)
        if _prompt_learning(self.accelerator.unwrap_model(model)) in _WITH_VIRTUAL_ROWS:
            targets = pad(labels, (0, 1), value=-100)  # the last virtual token predicts the first token
            inputs["logits_to_keep"] = targets.shape[1]
        if targets is None:
            targets = pad(labels[:, 1:], (0, 1), value=-100)
        num_items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        # The model divides, because PEFT's AdaLoRA adds a term to its loss. FSDP2 does not round integers on their way.
        num_items = torch.as_tensor(num_items, device=targets.device)
        per_token = (num_items.expand_as(targets),)
        loss = model(**inputs, logprob_targets=targets, loss_fn=_cross_entropy, per_token=per_token).loss
        loss = loss + 0 / num_items  # nan without labels, as of the model
        if num_items_in_batch is None or not self.args.average_tokens_across_devices:
            return loss
        return loss * (self.accelerator.num_processes // self.get_tp_size())

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        """As `Trainer`'s, which asks for logits even if only the loss is needed."""
        if not prediction_loss_only or inputs.get("labels") is None or self._shards_sequences():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        num_items = self._get_num_items_in_batch([inputs], self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs, num_items_in_batch=num_items).detach(), None, None

    def _set_signature_columns_if_needed(self) -> None:
        """As `Trainer`'s. Keywords that the model has from the patch alone are no columns."""
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            added = added_keywords(_base(self.model))
            self._signature_columns = [name for name in self._signature_columns or () if name not in added]

    def _shards_sequences(self) -> bool:
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return parallelism is not None and (parallelism.sp_enabled or parallelism.cp_enabled)


def _patched(model: nn.Module) -> nn.Module:
    """The model, patched in place unless it is patched already."""
    base = _base(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    is_new = head is None or not any(isinstance(module, LogprobHead) for module in head.modules())
    if is_new:
        for module in model.modules():
            if module is not base and getattr(vars(module).get("forward"), "__self__", None) is base:
                raise ValueError(
                    f"{type(module).__name__} keeps the forward that it has found in {type(base).__name__}: call "
                    "patch_lm_head(model) before get_peft_model"
                )
        patch_lm_head(base)
    try:
        require_next_token_loss(base)
    except ValueError as error:
        if is_new:
            unpatch_lm_head(base)
        has_router = getattr(base.config.get_text_config(), "output_router_logits", False)
        advice = "set output_router_logits of its configuration to False, or " if has_router else ""
        raise ValueError(f"{error}: {advice}use transformers.Trainer itself") from error
    return model


def _base(model: Any) -> Any:
    """The model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _prompt_learning(model: Any) -> str | None:
    """PEFT's name of the prompt learning method of a model; None: it has none."""
    config: Any = getattr(model, "active_peft_config", None)
    return str(config.peft_type.value) if getattr(config, "is_prompt_learning", False) else None


def _auxiliary_weight(model: Any) -> float:
    """Of a second loss, which PEFT computes of labels and adds to the model's."""
    return getattr(getattr(model, "active_peft_config", None), "auxiliary_loss_weight", 0.0)


def _cross_entropy(logprob: Tensor, entropy: Tensor | None, num_items: Tensor) -> Tensor:
    return -logprob / num_items
