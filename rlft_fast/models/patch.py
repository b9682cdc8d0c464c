"""Log-probabilities from any transformers causal language model, inside any trainer.

The patched model runs its own forward, whose head keeps the hidden states instead of multiplying them; the head is then
called with the targets. So whatever the model does before its head stays as it is, and FSDP2's hooks see a module call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft_fast.models.heads import LogprobHead, logit_transform
from rlft_fast.ops import LinearLogprob, LinearLogprobLoss
from rlft_fast.ops.reference import LossFunction

# In place of logits, so that what the model does to its logits shows. Far enough out that a soft-cap bends them.
_SAMPLE_LOGITS = (-40.0, -1.0, 0.5, 40.0)


def patch_lm_head(model: PreTrainedModel, *, workspace_mib: int | None = None) -> PreTrainedModel:
    """Lets a causal language model answer with log-probabilities, in place; without targets it stays as it was.

    Afterwards ``model(input_ids=..., attention_mask=..., logprob_targets=...)`` returns a ``LinearLogprob`` and never
    holds the logits; the model's other keywords stay, and these are new:

        logprob_targets: (B, L) int64, the token to score at each position: ``input_ids`` one to the left. -100 where
            none is; such positions give 0, and their head costs nothing. With ``logits_to_keep=K`` (B, K).
        temperature: sampling temperature, one number or a tensor in the shape of ``logprob_targets``.
        return_entropy: also the entropy of each position.
        loss_fn, per_token: a per-token loss and a tuple of the tensors that it reads, in the same shape, see
            :func:`rlft_fast.ops.linear_logprob_loss`; the model then returns a ``LinearLogprobLoss``.

    Soft-capping, logit scale and bias are those of the model; if its forward does anything else to the logits, the
    first call with targets raises. Parameters, their names, ties and ``generate`` do not change. Patch after resizing
    the vocabulary and before anything wraps the model: PEFT, accelerate, DDP, ``fully_shard``, ``torch.compile``.

    Args:
        model: causal language model with a linear head, on any device.
        workspace_mib: most memory for logits at any time, see :func:`rlft_fast.ops.linear_logprob` and, for losses,
            :func:`rlft_fast.ops.linear_logprob_loss`.

    Returns:
        The same model.

    Raises:
        TypeError: not a transformers model.
        ValueError: an encoder-decoder; no head, or none that is plainly linear (adapter, quantized, sharded); a model
            that is patched or wrapped already.
    """
    head = _plain_head(model)
    softcap, logit_scale = logit_transform(model.config)
    weight = cast(nn.Parameter, head.weight)
    model.set_output_embeddings(_PatchedHead(weight, head.bias, softcap, logit_scale, workspace_mib))
    model.__class__ = _patched_class(type(model))
    return model


def _plain_head(model: PreTrainedModel) -> nn.Linear:
    """The model's head, if it can be replaced."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a transformers PreTrainedModel, got {name}: patch the model before wrapping it")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: patch_lm_head takes causal language models only")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} has no lm_head: load a causal language model (...ForCausalLM)")
    head_name = f"{type(head).__module__}.{type(head).__name__}"
    if isinstance(head, LogprobHead):
        raise ValueError(f"{name} is patched already: call patch_lm_head once")
    if hasattr(head, "base_layer"):
        raise ValueError(f"the head of {name} has an adapter ({head_name}): leave it out of the adapter's targets")
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        raise ValueError(
            f"the head of {name} is a {head_name} with a {type(head.weight).__name__} weight, expected a "
            "torch.nn.Linear with a plain parameter: leave it out of quantization, and patch before sharding"
        )
    if "forward" in vars(model) or "forward" in vars(head):
        raise ValueError(f"the forward of {name} was replaced already: patch the model before accelerate or others do")
    return head


class _PatchedHead(LogprobHead):
    """A head that can also keep the hidden states which it is called with."""

    kept: list[Tensor] | None = None
    transform_is_known = False

    def forward(self, hidden: Tensor, target: Tensor | None = None, **options: Any) -> Any:
        if self.kept is None or target is not None:
            return super().forward(hidden, target, **options)
        self.kept.append(hidden)
        return hidden.new_tensor(_SAMPLE_LOGITS, dtype=torch.float32).repeat(*hidden.shape[:-1], 1)

    def final_hidden(self, name: str, forward: Callable[[], Any]) -> Tensor:
        """What the model's ``forward`` calls its head with."""
        self.kept = []
        try:
            outputs = forward()
            kept = self.kept
        finally:
            self.kept = None
        if len(kept) != 1:
            raise ValueError(f"{name} called its head {len(kept)} times, expected once: it cannot be patched")
        (hidden,) = kept
        if getattr(outputs, "aux_loss", None) is not None:
            raise ValueError(f"the auxiliary loss of {name}'s router would be lost: pass output_router_logits=False")
        if not self.transform_is_known and hidden.numel():
            self._check_transform(name, outputs[0][0, 0])
        return hidden

    def _check_transform(self, name: str, actual: Tensor) -> None:
        softcap, scale = self.options["softcap"], self.options["logit_scale"]
        expected = scale * actual.new_tensor(_SAMPLE_LOGITS)
        if softcap is not None:
            expected = softcap * torch.tanh(expected / softcap)
        if not torch.allclose(actual, expected, rtol=1e-2):
            raise ValueError(
                f"{name} turns raw logits {list(_SAMPLE_LOGITS)} into {actual.tolist()}, but its configuration says "
                f"softcap={softcap} and logit_scale={scale}: patch_lm_head does not know what it does"
            )
        self.transform_is_known = True


@functools.cache
def _patched_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of the same name. Not an attribute of the instance, which would make a deep copy call the original."""

    def forward(
        self,
        *args: Any,
        logprob_targets: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        return_entropy: bool = False,
        loss_fn: LossFunction | None = None,
        per_token: tuple[Tensor, ...] = (),
        **inputs: Any,
    ) -> Any | LinearLogprob | LinearLogprobLoss:
        if logprob_targets is None:
            if loss_fn is not None:
                raise ValueError("loss_fn needs logprob_targets, the tokens whose log-probabilities it is a loss of")
            options = {"temperature": temperature, "return_entropy": return_entropy, "per_token": per_token}
            return model_class.forward(self, *args, **inputs, **{name: options[name] for name in shared & set(options)})
        if inputs.get("labels") is not None:
            raise ValueError("got labels and logprob_targets: leave out one of them; a loss is computed by loss_fn")
        head = self.get_output_embeddings()
        hidden = head.final_hidden(model_class.__name__, lambda: model_class.forward(self, *args, **inputs))
        options = {"temperature": temperature, "return_entropy": return_entropy}
        return head(hidden, logprob_targets, loss_fn=loss_fn, per_token=per_token, **options)

    def reduce_ex(self, protocol: Any) -> Any:
        reduced = model_class.__reduce_ex__(self, protocol)
        if type(self) is not _patched_class(model_class):  # but one that FSDP2 or others made of it: theirs to do
            return reduced
        return _empty_patched, (model_class,), *reduced[2:]

    # generate() and transformers' Trainer read from the signature which keywords the model takes.
    own, new = (inspect.signature(function).parameters for function in (model_class.forward, forward))
    added = {name: parameter for name, parameter in new.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    shared = own.keys() & added.keys()  # verl's forwards of models with images have a temperature of their own
    signature = inspect.Signature(sorted((own | added).values(), key=lambda parameter: parameter.kind))
    names = {"forward": forward, "__reduce_ex__": reduce_ex, "__doc__": model_class.__doc__}
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(model_class.__name__, (model_class,), names | {"__module__": model_class.__module__})


def _empty_patched(model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """What unpickling fills: the patched class itself has the name of its original, and cannot be found by it."""
    patched = _patched_class(model_class)
    return patched.__new__(patched)
