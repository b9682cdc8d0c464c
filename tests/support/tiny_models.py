"""Tiny random models in Hugging Face folders: small enough for a test, real enough for every code path."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

# transformers writes each configuration that it reads as JSON, for a line of its log that is not shown.
PretrainedConfig.__repr__ = object.__repr__

VOCAB_SIZE = 259  # one token per byte, end and padding, and one id that the tokenizer never makes
EOS_TOKEN_ID = 256
PAD_TOKEN_ID = 257
SLIDING_WINDOW = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID,
    # Far larger than usual: with 0.02 every prediction is nearly uniform and errors in the layers hardly show.
    "initializer_range": 0.2,
}  # fmt: skip
_SLIDING = {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1}

MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    # The first layer sees everything, the others a window.
    "qwen2-sliding": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True} | _SLIDING),
}

# Further architectures, for the tests of the packed forward.
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": SLIDING_WINDOW}
MORE_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": SLIDING_WINDOW, "num_key_value_heads": 1}),
    # Caps low enough to bend the scores and logits of so small a model.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, _GEMMA | {
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention",
        ],
    }),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    # Layers differ in their heads, and the last two have the keys and values of the first two.
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, {
        "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": SLIDING_WINDOW, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB_SIZE, "final_logit_softcapping": 5.0,
    }),
    # One dense layer, then experts; values have another width than queries and keys.
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_mtp_layers": 0,
    }),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {  # attention sinks
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": SLIDING_WINDOW,
    }),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig, {  # attention within chunks, and queries scaled by their positions
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": SLIDING_WINDOW,
        "intermediate_size_mlp": 48, "no_rope_layer_interval": 2, "floor_scale": 4,
    }),
}  # fmt: skip

# Packed sequences would be wrong for these.
PADDED_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    # A recurrent state in two layers of three.
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {
        "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }),
    # Its images do not run, and its tower is frozen.
    "llava-next": (LlavaNextForConditionalGeneration, LlavaNextConfig, {
        "text_config": _SIZES | {"model_type": "llama"}, "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
        },
    }),
}  # fmt: skip

# Checkpoints call its layers otherwise than transformers does. Its grouped GEMMs know no float64.
EXPERT_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 12, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {  # one dense layer
            "head_dim": 8,
            "num_experts": 300,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "mlp_only_layers": [1],
        },
    ),
    # Its routers return the numbers of experts first.
    "granite-moe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    # It runs padded.
    "qwen3.5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
}

IMAGE_TOKEN_ID, BOI_TOKEN_ID, EOI_TOKEN_ID = 258, 259, 260  # the last two of Gemma alone
_VISION: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "initializer_range": 0.2,
}  # fmt: skip
_MULTI_MODAL = {"image_token_id": IMAGE_TOKEN_ID, "video_token_id": 300, "tie_word_embeddings": True}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
VISION_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "qwen2-vl": (Qwen2VLForConditionalGeneration, Qwen2VLConfig, _MULTI_MODAL | {
        "text_config": _SIZES | _MROPE, "vision_config": _VISION | {"embed_dim": 16, "hidden_size": 32},
    }),
    # Of its two vision layers one sees windows of 2 x 2 merged patches, the other whole images.
    "qwen2.5-vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, _MULTI_MODAL | {
        "text_config": _SIZES | _MROPE, "vision_config": _VISION | {
            "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    }),
    # Features of its first vision layer are added behind the first text layer.
    "qwen3-vl": (Qwen3VLForConditionalGeneration, Qwen3VLConfig, _MULTI_MODAL | {
        "text_config": _SIZES | _MROPE | {"head_dim": 8}, "vision_config": _VISION | {
            "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    }),
}  # fmt: skip
EXPERT_MODELS["qwen3-vl-moe"] = (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, _MULTI_MODAL | {
    "text_config": VISION_MODELS["qwen3-vl"][2]["text_config"] | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    },
    "vision_config": VISION_MODELS["qwen3-vl"][2]["vision_config"], "tie_word_embeddings": False,
})  # fmt: skip
# The tower takes pictures of 8 x 8 pixels, and Mistral's of any size. LLaVA makes 16 tokens of each, and the others 4.
_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2, "initializer_range": 0.2, "initializer_factor": 4.0,
}  # fmt: skip
_AROUND_LLAMA = {"text_config": _SIZES | {"model_type": "llama"}, "image_token_id": IMAGE_TOKEN_ID}
PICTURE_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llava": (LlavaForConditionalGeneration, LlavaConfig, _AROUND_LLAMA | {
        "vision_config": _TOWER | {"model_type": "clip_vision_model"}, "tie_word_embeddings": False,
    }),
    "internvl": (InternVLForConditionalGeneration, InternVLConfig, _AROUND_LLAMA | {
        "vision_config": _TOWER | {"use_qk_norm": True}, "tie_word_embeddings": True,
    }),
    "idefics3": (Idefics3ForConditionalGeneration, Idefics3Config, _AROUND_LLAMA | {
        "vision_config": _TOWER, "scale_factor": 2, "tie_word_embeddings": False,
    }),
    "smolvlm": (SmolVLMForConditionalGeneration, SmolVLMConfig, _AROUND_LLAMA | {
        "vision_config": _TOWER, "scale_factor": 2, "tie_word_embeddings": True,
    }),
    "mistral3": (Mistral3ForConditionalGeneration, Mistral3Config, {
        "text_config": _SIZES | {"model_type": "mistral", "sliding_window": None}, "image_token_id": IMAGE_TOKEN_ID,
        "vision_config": _TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 16},
        "tie_word_embeddings": False,
    }),
    # The window is narrower than an image.
    "gemma3-vision": (Gemma3ForConditionalGeneration, Gemma3Config, {
        "text_config": _SIZES | _GEMMA | {
            "vocab_size": VOCAB_SIZE + 2, "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": _TOWER | {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN_ID, "boi_token_index": BOI_TOKEN_ID, "eoi_token_index": EOI_TOKEN_ID,
    }),
}  # fmt: skip
REWARD_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama-reward": (LlamaForSequenceClassification, LlamaConfig, {"num_labels": 1}),
}
# For tests of runs: they ask nothing of the layers, in which most of a step's time is spent.
SHALLOW_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "shallow": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "num_hidden_layers": 1}),
}
# Rotary embeddings that change for all sequences of a pass, once one of them is longer than this.
ROPE_LIMIT = 24
ROPE_MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "phi3": (Phi3ForCausalLM, Phi3Config, {
        "original_max_position_embeddings": ROPE_LIMIT, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        },
    }),
}  # fmt: skip
ALL_MODELS = (
    MODELS | MORE_MODELS | PADDED_MODELS | EXPERT_MODELS | VISION_MODELS | PICTURE_MODELS | REWARD_MODELS
    | SHALLOW_MODELS | ROPE_MODELS
)  # fmt: skip


def save_tiny_model(name: str, folder: Path, **options: Any) -> Path:
    """Writes the random model `name` of `ALL_MODELS` with its tokenizer; the same weights every time.

    Args:
        name: key of `ALL_MODELS`.
        folder: where to write.
        **options: changes to the model's configuration.

    Returns:
        The folder.
    """
    model_class, config_class, own = ALL_MODELS[name]
    sizes = {} if "text_config" in own else _SIZES  # theirs are those of the text model inside
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        model = model_class(config_class(**(sizes | own | options)))
        for parameter in model.parameters():
            # Biases and Gemma's projection start at 0 and norms at 1, which would hide that they are forgotten.
            if parameter.dim() == 1 or not parameter.any():
                torch.nn.init.normal_(parameter, mean=parameter.flatten()[0].item(), std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    if name in VISION_MODELS | PICTURE_MODELS:
        _save_processor(folder, _PROCESSORS.get(name, _QWEN_PROCESSOR), name == "gemma3-vision")
    return folder


_QWEN_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 2, "merge_size": 2, "temporal_patch_size": 2,
    "min_pixels": 16, "max_pixels": 256,
}  # fmt: skip
_PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8},
        "crop_size": {"height": 8, "width": 8},
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 8, "width": 8}, "crop_to_patches": True,
        "min_patches": 1, "max_patches": 4,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 16},
        "max_image_size": {"longest_edge": 8},
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 16},
        "max_image_size": {"longest_edge": 8},
    },
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 16}, "patch_size": 2},
    "gemma3-vision": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 8, "width": 8}, "do_pan_and_scan": True,
    },
}  # fmt: skip


def _save_processor(folder: Path, settings: dict[str, Any], is_gemma: bool) -> None:
    """What reads images: the token of images, a chat template, and the settings of the image processor."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = ["<|image_pad|>", *(["<start_of_image>", "<end_of_image>"] if is_gemma else [])]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = [IMAGE_TOKEN_ID, BOI_TOKEN_ID, EOI_TOKEN_ID]
    assert tokenizer.convert_tokens_to_ids(special) == ids[: len(special)]
    placeholder = "<start_of_image>" if is_gemma else "[<|image_pad|>]"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{% for p in m.content %}"
        "{% if p.type == 'image' %}" + placeholder + "{% else %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def save_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: every byte of a text is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def chat_tokenizer(folder: Path, special: list[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of `save_tokenizer`, with special tokens that chat templates name."""
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<|begin_of_text|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer
