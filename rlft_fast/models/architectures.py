"""How a model runs, packed or padded, and the name of the attention that transformers is given.

Packed sequences need an attention of our own. Every other causal model runs a padded batch, by its own attention: no
token sees the padding on its right. The way is chosen by the model's class, configuration and names alone, before
anything runs. tests/engine/models/test_every_architecture.py checks it with every language model of transformers.
"""

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlft_fast.models.attention import (
    CHUNKED_LAYER,
    GROUPED_ATTENTION,
    PACKED_ATTENTION,
)
from rlft_fast.models.images import VISION_MODELS

_LAYER_TYPES = {"full_attention", "sliding_attention", CHUNKED_LAYER}
# Packed attention attends within chunks, which flash attention does not. The tower of a Llama 4 stands beside a whole
# language model, which runs without it.
_CHUNKED_MODELS = ("llama4", "llama4_text")
# Models that look as if they could be packed, or run, found by trying all: tests/engine/models/every_architecture.py.
_EXCEPTIONS = {
    "nemotron": "does not hand boundaries on to its attention",
    "moshi": "does not hand boundaries on to its attention",
    "phimoe": "does not tell its attention of its sliding window",
}
# Such windows are longer than the few tokens by which a loaded model is tried. Without them the model is packed.
_SILENT_WINDOWS = ("qwen2_moe",)
WITHOUT_CACHE = ("moshi", "qwen3_omni_moe_thinker", "rwkv", "zamba2")
"""Types whose forward of one token with their cache gives other logits than their forward of all tokens."""
_REFUSED = {
    **dict.fromkeys(["cpmant", "xlm", "xlnet"], "lets tokens see later ones"),
    **dict.fromkeys(
        ["blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2"], "does not run on text alone"
    ),
}


def packed_implementation(config: PreTrainedConfig) -> str | dict[str, str]:
    """The ``attn_implementation`` for packed sequences with a model of this configuration.

    A vision tower separates its images itself and attends in both directions, so it uses SDPA.
    """
    return _except_in_towers(PACKED_ATTENTION, config)


def padded_implementation(model: PreTrainedModel) -> str | dict[str, str]:
    """The ``attn_implementation`` of a model that can be packed for padded batches and generation.

    It is SDPA, or "eager" if scores are soft-capped or have sinks.
    """
    is_eager = _is_softcapped(model.config) or _has_sinks(model)
    return "eager" if is_eager else _except_in_towers(GROUPED_ATTENTION, model.config)


def own_implementation(config: PreTrainedConfig) -> str | None:
    """The ``attn_implementation`` of a model that cannot be packed: transformers' choice, which ignores soft-caps."""
    return "eager" if _is_softcapped(config) else None


@contextlib.contextmanager
def padded_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a model with packed attention attends by `padded_implementation`. Other models keep their own."""
    if model.config._attn_implementation != PACKED_ATTENTION:
        yield
        return
    model.set_attn_implementation(padded_implementation(model))
    try:
        yield
    finally:
        model.set_attn_implementation(packed_implementation(model.config))


def _is_softcapped(config: PreTrainedConfig) -> bool:
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def _has_sinks(model: PreTrainedModel) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())


def _except_in_towers(name: str, config: PreTrainedConfig) -> str | dict[str, str]:
    return {"": name, "text_config": name, "vision_config": "sdpa"} if "vision_config" in config.sub_configs else name


def require_causal(model: PreTrainedModel) -> None:
    """Refuses a model that is no causal language model, however it runs.

    Raises:
        ValueError: the model is an encoder-decoder, or its tokens see later tokens.
    """
    decoder = [module.is_causal for module in model.get_decoder().modules() if hasattr(module, "is_causal")]
    is_causal = getattr(model.config.get_text_config(), "is_causal", True) is not False
    reasons = {
        "is an encoder-decoder": model.config.is_encoder_decoder,
        "lets tokens see later ones": not is_causal or (bool(decoder) and not any(decoder)),  # cross-attention is none
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found := found or [_REFUSED[x] for x in (model.config.model_type,) if x in _REFUSED]:
        raise ValueError(
            f"{type(model).__name__} {' and '.join(found)}: choose a causal language model (Llama, Qwen, Mistral, "
            "Gemma, ...)"
        )


def why_not_packed(model: PreTrainedModel) -> str:
    """Why a packed forward of the model would be wrong; empty if it is right.

    Reads class, configuration and names, but no weights.
    """
    config = model.config.get_text_config()
    types = {*(getattr(config, "layer_types", None) or [])}
    modules = [module for name, module in model.named_modules() if "visual." not in name]
    attends_in_chunks = model.config.model_type in _CHUNKED_MODELS
    causal = {getattr(module, "is_causal", True) for module in model.get_decoder().modules()}
    reasons = {
        "is an encoder-decoder": model.config.is_encoder_decoder,
        "carries a recurrent state from token to token": model._is_stateful,
        "does not take its attention from transformers' AttentionInterface": not model._supports_attention_backend,
        "builds masks of its own (it has no flash attention)": not (model._supports_flash_attn or attends_in_chunks),
        f"has layers of type {', '.join(sorted(types - _LAYER_TYPES))}": bool(types - _LAYER_TYPES),
        "does not tell its attention of its sliding windows": "sliding_attention" in types
        and config.model_type in _SILENT_WINDOWS,
        "has a vision tower": hasattr(model.config, "vision_config")
        and not (model.config.model_type in VISION_MODELS or attends_in_chunks),
        "lets tokens see later ones": causal != {True} or getattr(config, "is_causal", True) is False,
        "counts positions from its padding token": any(
            hasattr(x, "create_position_ids_from_input_ids") for x in modules
        ),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return " and ".join(found + [_EXCEPTIONS[x] for x in (model.config.model_type,) if x in _EXCEPTIONS])


def require_packed_attention(model: PreTrainedModel) -> None:
    """Refuses a model whose packed forward would be wrong.

    Raises:
        ValueError: the model cannot be packed; the message has the model's class and the reasons.
    """
    if reasons := why_not_packed(model):
        raise ValueError(
            f"{type(model).__name__} {reasons}: sequences cannot be packed for it. Packed are causal language models "
            "whose layers are full or sliding-window attention (Llama, Qwen, Mistral, Gemma, ...) and the "
            f"vision-language models {', '.join(VISION_MODELS)}"
        )


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configuration of each layer of a text model. Layers of Gemma 4 differ in their heads.

    Args:
        config: of the text model. It raises an error where it is asked for what differs.
    """
    layers = range(config.num_hidden_layers)
    if not getattr(config, "is_heterogeneous", False):  # new in transformers 5
        return [config for _ in layers]
    return [config.per_layer_config[layer] for layer in layers]


def require_divisible_heads(backbone: PreTrainedModel, sequence_parallel: int, padded_because: str = "") -> None:
    """Requires that `sequence_parallel` ranks can share the model's attention heads evenly.

    Args:
        backbone: the model.
        sequence_parallel: number of ranks.
        padded_because: why the model runs padded; empty if it is packed.

    Raises:
        ValueError: the number of heads is no multiple of `sequence_parallel`, or ranks cannot share a padded batch.
    """
    if sequence_parallel == 1:
        return
    if padded_because:
        raise ValueError(
            f"sequence_parallel={sequence_parallel} needs packed sequences, but {type(backbone).__name__} "
            f"{padded_because}: set it to 1"
        )
    num_heads = backbone.config.get_text_config().num_attention_heads
    if num_heads % sequence_parallel:
        raise ValueError(
            f"sequence_parallel={sequence_parallel} must divide the {num_heads} attention heads of "
            f"{type(backbone).__name__}: choose one of {[n for n in range(1, num_heads + 1) if num_heads % n == 0]}"
        )


def require_fixed_rope(backbone: PreTrainedModel, longest: int) -> None:
    """Refuses sequences at whose length the rotary embeddings of all sequences change.

    Some embeddings (Phi-4-mini's longrope, dynamic NTK) rotate all tokens of a pass by the largest position in it. The
    other sequences of a batch would change a sequence's log-probabilities, and keys in a cache would stay rotated as
    before.

    Args:
        backbone: the model.
        longest: most tokens of a sequence.

    Raises:
        ValueError: a sequence may be too long; the message has the length up to which embeddings stay as they are.
    """
    _require_within(_rope_bounds(backbone), longest)


def rope_limits(backbone: PreTrainedModel) -> dict[str, int]:
    """By type, the tokens of a sequence beyond which rotary embeddings change; empty if they never do."""
    config = backbone.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    limits: dict[str, int] = {}
    for rope in (ropes, *(x for x in ropes.values() if isinstance(x, dict))):  # of all layers, or of a type of layers
        kind = rope.get("rope_type")
        if kind == "dynamic":
            limits[kind] = config.max_position_embeddings
        elif kind == "longrope":
            limits[kind] = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return limits


def require_positions(backbone: PreTrainedModel, longest: int) -> None:
    """Refuses sequences that are longer than the positions of a model: `require_fixed_rope`, and tables end.

    A look-up behind the end of a table ends a process on a GPU without a reason.

    Args:
        backbone: the model.
        longest: most tokens of a sequence.

    Raises:
        ValueError: a sequence may be too long; the message has the length that the model takes.
    """
    _require_within(_bounds(backbone), longest)


def position_limit(backbone: PreTrainedModel) -> int | None:
    """The most tokens of a sequence that `require_positions` takes; None: any number."""
    return min(_bounds(backbone).values(), default=None)


def _require_within(bounds: Mapping[str, int], longest: int) -> None:
    for reason, most in bounds.items():
        if longest > most:
            raise ValueError(
                f"sequences have up to {longest} tokens, but {reason}: limit prompt and completion to {most} tokens"
            )


def _rope_bounds(backbone: PreTrainedModel) -> dict[str, int]:
    """The most tokens of a sequence for each reason."""
    name = type(backbone).__name__
    return {
        f"the {kind} rotary embeddings of {name} change beyond {most} tokens, for all sequences of a pass": most
        for kind, most in rope_limits(backbone).items()
    }


def _bounds(backbone: PreTrainedModel) -> dict[str, int]:
    """See `_rope_bounds`, and of a table of positions."""
    most = getattr(backbone.config.get_text_config(), "max_position_embeddings", None)
    if most is None or not _has_table(backbone, most):
        return _rope_bounds(backbone)
    return _rope_bounds(backbone) | {f"{type(backbone).__name__} has embeddings of {most} positions": most}


def _has_table(backbone: PreTrainedModel, num_positions: int) -> bool:
    """Whether positions are looked up: in learned embeddings, which may begin at 2 (OPT), or in a buffer (GPT-J)."""
    decoder, tokens = backbone.get_decoder(), backbone.get_input_embeddings()
    tables = [x.num_embeddings for x in decoder.modules() if isinstance(x, nn.Embedding) and x is not tokens]
    tables += [len(x) for name, x in decoder.named_buffers() if name.endswith("embed_positions")]
    return not {num_positions, num_positions + 2}.isdisjoint(tables)
