"""LightRFT's FSDPV2Strategy with the fused head, packed sequences, one gradient norm and FusedAdamW.

    from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy
    from rlft_fast.integrations.lightrft import action_logprobs, enable

    enable(FSDPV2Strategy, max_norm=1.0)    # before get_strategy

The strategy's units, meshes, accumulation, offloading and checkpoints stay LightRFT's. LightRFT's actors turn logits
into log-probabilities in their own forward, which has to ask for them instead:

    logprob_BA, entropy_BA = action_logprobs(self.model, sequences, attention_mask, action_mask)

Shapes: B sequences, L columns, A columns of actions, T packed tokens.
"""

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad as widen
from transformers import PreTrainedModel

from rlft_fast.models import PACKED_ATTENTION, needs_more_than_boundaries, patch_lm_head, require_packed_attention
from rlft_fast.ops import (
    FusedAdamW,
    clip_coefficient,
    grad_norm,
    masked_tokens,
    next_token_targets,
    pad,
    position_ids,
    unpad,
)

__all__ = ["action_logprobs", "enable"]

_METHODS = {
    "prepare_model": ("model",),
    "create_optimizer": (),
    "optimizer_step": ("optimizer", "model", "scheduler", "name"),
}


def enable(strategy_class: type, *, max_norm: float | None) -> None:
    """Changes a strategy class in place.

    ``prepare_model`` first patches causal language models (:func:`rlft_fast.patch_lm_head`) and makes their attention
    packed. Critics and reward models stay as they are. ``create_optimizer`` makes a :class:`rlft_fast.ops.FusedAdamW`
    of the parameter groups that LightRFT chose. ``optimizer_step`` clips by the norm of all gradients of the optimizer
    together, and returns the norm: 0-d float32, or None where more micro-batches follow. A step whose norm is not
    finite is skipped without a host sync. A second call of this function changes max_norm alone.

    Args:
        strategy_class: ``lightrft.strategy.fsdp.fsdpv2.FSDPV2Strategy``, or a class with its interface.
        max_norm: largest norm allowed, in place of the strategy's own. None, 0 and inf measure only.

    Raises:
        TypeError: the class lacks a method or a parameter.
        ValueError: max_norm is negative. Later, by ``prepare_model``: the model cannot be patched or packed, or the
            units have split a tied weight. By ``create_optimizer``: the strategy made another optimizer than AdamW.
    """
    clip_coefficient(torch.zeros(()), max_norm)  # refuses a bad max_norm now
    for name, parameters in _METHODS.items():
        _require_method(strategy_class, name, parameters)
    methods: Any = strategy_class
    if methods.optimizer_step.__module__ != __name__:
        methods.prepare_model = _patching(methods.prepare_model)
        methods.create_optimizer = _fused(methods.create_optimizer)
    methods.optimizer_step = _clipping(max_norm)


def action_logprobs(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of actions, by a packed forward whose head runs for actions only.

    Args:
        model: a causal language model that an enabled strategy has prepared.
        sequences: (B, L) int64, padded on any side.
        attention_mask: (B, L), nonzero at tokens.
        action_mask: (B, A) of the last A < L columns, nonzero at actions.
        temperature: of the sampler.

    Returns:
        Two (B, A) float32 tensors: log p(action | tokens before it), and the entropy of that distribution. Both are 0
        at columns that are no actions.

    Raises:
        ValueError: shapes do not fit together, or the model was not prepared by an enabled strategy.
    """
    columns, actions = sequences.shape[1], action_mask.shape[1]
    if attention_mask.shape != sequences.shape or not 0 < actions < columns or len(action_mask) != len(sequences):
        raise ValueError(
            f"sequences, attention_mask and action_mask have shapes {tuple(sequences.shape)}, "
            f"{tuple(attention_mask.shape)} and {tuple(action_mask.shape)}, expected (B, L), (B, L) and (B, A) with "
            "0 < A < L: pass the masks of these sequences"
        )
    if cast(Any, model).config._attn_implementation != PACKED_ATTENTION:
        raise ValueError(
            f"{type(model).__name__} attends by {cast(Any, model).config._attn_implementation}, expected "
            f"{PACKED_ATTENTION}: call enable(FSDPV2Strategy, ...) before the strategy prepares the model"
        )
    tokens = masked_tokens(attention_mask)
    is_action = widen(action_mask != 0, (columns - actions, 0))
    packed = unpad({"ids": sequences, "is_action": is_action}, *tokens)
    target_T = next_token_targets(packed["ids"], tokens.cu_seqlens)
    result = model(
        input_ids=packed["ids"][None],
        position_ids=position_ids(tokens.cu_seqlens, len(target_T))[None],
        cu_seq_lens_q=tokens.cu_seqlens, cu_seq_lens_k=tokens.cu_seqlens, max_length_q=columns, max_length_k=columns,
        logprob_targets=target_T.where(packed["is_action"].roll(-1), -100)[None],  # a sequence's last target is -100
        temperature=temperature, return_entropy=True, use_cache=False,
    )  # fmt: skip
    scores = {"logprob": result.logprob[0], "entropy": result.entropy[0]}
    padded = pad(scores, tokens.cu_seqlens, columns, tokens.column_T)
    return padded["logprob"][:, -actions - 1 : -1], padded["entropy"][:, -actions - 1 : -1]


def _require_method(strategy_class: type, name: str, parameters: tuple[str, ...]) -> None:
    method = getattr(strategy_class, name, None)
    takes = [] if method is None else [*inspect.signature(method).parameters]
    missing = [each for each in parameters if each not in takes]
    if method is None or missing:
        got = f"takes ({', '.join(takes)})" if method else "is missing"
        raise TypeError(
            f"{strategy_class.__name__}.{name} {got}, expected {name}({', '.join(parameters)}, ...): pass "
            "FSDPV2Strategy of LightRFT 0.1"
        )


def _patching(own: Any) -> Any:
    @functools.wraps(own)
    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        policy = _causal_language_model(model)
        name, tied = type(policy).__name__, False
        if policy is not None:
            require_packed_attention(policy)
            if needs_more_than_boundaries(policy.config):
                raise ValueError(
                    f"{name} attends within chunks or scales queries by positions, which action_logprobs cannot pack: "
                    "use examples/lightrft_strategy.py, which keeps the actor's own forward, or another model"
                )
            patch_lm_head(policy)
            policy.set_attn_implementation(PACKED_ATTENTION)
            tied = _is_tied(policy)
        prepared = own(self, model, *args, **options)
        if policy is not None and tied and not _is_tied(policy):
            raise ValueError(
                f"{type(self).__name__} has split the weight that embedding and head of {name} share, "
                "expected one unit for both: give the head a weight of its own (tie_word_embeddings=False)"
            )
        return prepared

    return prepare_model


def _causal_language_model(model: nn.Module) -> PreTrainedModel | None:
    """The model itself, or the model that an actor has as `model`, without PEFT's wrapper; None for critics."""
    if not isinstance(model, PreTrainedModel):
        model = getattr(model, "model", model)
    if hasattr(model, "get_base_model"):
        model = cast(Any, model).get_base_model()
    return model if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None else None


def _is_tied(policy: PreTrainedModel) -> bool:
    return policy.get_input_embeddings().weight is cast(Any, policy.get_output_embeddings()).weight


def _fused(own: Any) -> Any:
    @functools.wraps(own)
    def create_optimizer(self, *args: Any, **options: Any) -> FusedAdamW:
        made = own(self, *args, **options)
        if not isinstance(made, torch.optim.AdamW):
            raise ValueError(
                f"{type(self).__name__} made a {type(made).__name__}, expected AdamW: turn LightRFT's mixed-precision "
                "optimizer off, since FusedAdamW itself keeps float32 masters of bfloat16 parameters"
            )
        return FusedAdamW(made.param_groups)

    return create_optimizer


def _clipping(max_norm: float | None) -> Any:
    def optimizer_step(
        self, optimizer: FusedAdamW, model: nn.Module, scheduler: Any, name: str = "model", **options: Any
    ) -> Tensor | None:
        self.cur_step[name] += 1
        if self.cur_step[name] % self.accumulated_gradient:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = grad_norm(parameters)
        # The norm is where ranks communicate, and FSDP2 may have offloaded the parameters.
        optimizer.step(**clip_coefficient(norm.to(parameters[0].device), max_norm)._asdict())
        optimizer.zero_grad()
        scheduler.step()
        return norm

    return optimizer_step
