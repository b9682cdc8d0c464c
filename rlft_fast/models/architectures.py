"""Which models can be packed, and the name of the attention that transformers is given.

A model is refused by its class, configuration and names alone, before anything runs. The test
tests/models/test_every_architecture.py checks the refusals with every causal language model of transformers.
"""

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from rlft_fast.models.attention import GROUPED_ATTENTION, PACKED_ATTENTION
from rlft_fast.models.vision import VISION_MODELS

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Models that look as if they could be packed, found by trying all (tests/models/test_every_architecture.py).
_EXCEPTIONS = {
    "nemotron": "does not hand boundaries on to its attention",
    "moshi": "does not hand boundaries on to its attention",
    "phimoe": "does not tell its attention of its sliding window",
}


def packed_implementation(config: PreTrainedConfig) -> str | dict[str, str]:
    """The ``attn_implementation`` for packed sequences with a model of this configuration.

    A vision tower separates its images itself and attends in both directions, so it uses SDPA.
    """
    return _except_in_towers(PACKED_ATTENTION, config)


def padded_implementation(config: PreTrainedConfig) -> str | dict[str, str]:
    """The ``attn_implementation`` for padded batches and generation: SDPA, or "eager" if scores are soft-capped."""
    softcapped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if softcapped else _except_in_towers(GROUPED_ATTENTION, config)


@contextlib.contextmanager
def padded_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model attends by `padded_implementation`; afterwards by `packed_implementation` again."""
    model.set_attn_implementation(padded_implementation(model.config))
    try:
        yield
    finally:
        model.set_attn_implementation(packed_implementation(model.config))


def _except_in_towers(name: str, config: PreTrainedConfig) -> str | dict[str, str]:
    return {"": name, "text_config": name, "vision_config": "sdpa"} if config.model_type in VISION_MODELS else name


def require_packed_attention(model: PreTrainedModel) -> None:
    """Refuses a model whose packed forward would be wrong. Reads class, configuration and names, but no weights.

    Raises:
        ValueError: the model cannot be packed; the message has the model's class and the reasons.
    """
    config = model.config.get_text_config()
    types = {*(getattr(config, "layer_types", None) or [])}
    modules = [module for name, module in model.named_modules() if "visual." not in name]
    causal = {getattr(module, "is_causal", True) for module in modules}
    reasons = {
        "is an encoder-decoder": model.config.is_encoder_decoder,
        "carries a recurrent state from token to token": model._is_stateful,
        "does not take its attention from transformers' AttentionInterface": not model._supports_attention_backend,
        "builds masks of its own (it has no flash attention)": not model._supports_flash_attn,
        f"has layers of type {', '.join(sorted(types - _LAYER_TYPES))}": bool(types - _LAYER_TYPES),
        "has a vision tower": hasattr(model.config, "vision_config") and model.config.model_type not in VISION_MODELS,
        "lets tokens see later ones": causal != {True} or getattr(config, "is_causal", True) is False,
        "counts positions from its padding token": any(
            hasattr(x, "create_position_ids_from_input_ids") for x in modules
        ),
        "has attention sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found := found + [_EXCEPTIONS[x] for x in (config.model_type,) if x in _EXCEPTIONS]:
        raise ValueError(
            f"{type(model).__name__} {' and '.join(found)}: sequences cannot be packed for it. Supported are causal "
            "language models whose layers are full or sliding-window attention (Llama, Qwen, Mistral, Gemma, ...) and "
            f"the vision-language models {', '.join(VISION_MODELS)}"
        )


def require_divisible_heads(backbone: PreTrainedModel, sequence_parallel: int) -> None:
    """Requires that `sequence_parallel` ranks can share the model's attention heads evenly.

    Raises:
        ValueError: the number of heads is no multiple of `sequence_parallel`.
    """
    num_heads = backbone.config.get_text_config().num_attention_heads
    if num_heads % sequence_parallel:
        raise ValueError(
            f"sequence_parallel={sequence_parallel} must divide the {num_heads} attention heads of "
            f"{type(backbone).__name__}: choose one of {[n for n in range(1, num_heads + 1) if num_heads % n == 0]}"
        )


def require_fixed_rope(backbone: PreTrainedModel, longest: int) -> None:
    """Refuses sequences whose rotary embeddings would depend on the other sequences of the pass.

    Some embeddings (Phi-4-mini's longrope, dynamic NTK) rotate all sequences by the largest position in the pass.

    Args:
        backbone: the model.
        longest: tokens of the longest sequence.

    Raises:
        ValueError: a sequence is too long; the message has the length up to which the model can be packed.
    """
    config = backbone.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(ropes.get(layer_type) or {} for layer_type in _LAYER_TYPES)):  # of all layers, or of a type
        limit = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", longest)
        if rope.get("rope_type") in ("dynamic", "longrope") and longest > limit:
            raise ValueError(
                f"a sequence has {longest} tokens, but the {rope['rope_type']} rotary embeddings of "
                f"{type(backbone).__name__} change beyond {limit} tokens, for all sequences packed together: limit "
                f"prompt and completion to {limit} tokens"
            )
