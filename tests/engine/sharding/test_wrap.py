"""Units are found by structure, in models of many families, and the models' own lists stay as they are."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
)

from rlft_fast.engine.sharding.wrap import describe_units, find_units

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 32,
    "out_hidden_size": 32,
}
VISION_2 = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
ROPE = {"rope_parameters": {"type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}

# Classes and numbers of the blocks that each model repeats.
MODELS = {
    "llama": (LlamaConfig(**TEXT), {"LlamaDecoderLayer": 3}),
    "mistral": (MistralConfig(**TEXT), {"MistralDecoderLayer": 3}),
    "qwen2": (Qwen2Config(**TEXT), {"Qwen2DecoderLayer": 3}),
    "qwen3": (Qwen3Config(**TEXT), {"Qwen3DecoderLayer": 3}),
    "gemma2": (Gemma2Config(**TEXT, head_dim=8), {"Gemma2DecoderLayer": 3}),
    "gemma3": (Gemma3TextConfig(**TEXT, head_dim=8), {"Gemma3DecoderLayer": 3}),
    "deepseek": (
        DeepseekV3Config(**(TEXT | MOE | MLA | {"num_key_value_heads": 4}), first_k_dense_replace=1),
        {"DeepseekV3DecoderLayer": 3},
    ),
    "gpt2": (GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, tie_word_embeddings=False), {"GPT2Block": 3}),
    "qwen2-vl": (
        Qwen2VLConfig(text_config=TEXT | ROPE, vision_config=VISION_2, tie_word_embeddings=False),
        {"Qwen2VLDecoderLayer": 3, "Qwen2VLVisionBlock": 2},
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLConfig(text_config=TEXT | ROPE, vision_config=VISION, tie_word_embeddings=False),
        {"Qwen2_5_VLDecoderLayer": 3, "Qwen2_5_VLVisionBlock": 2},
    ),
}


def build(config):
    vision = "vision_config" in config.sub_configs
    with torch.device("meta"):
        return (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_config(config)


def kinds(units) -> dict[str, int]:
    names = [type(module).__name__ for _, module in units]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_units_of_each_family(name):
    config, blocks = MODELS[name]
    model = build(config)
    declared = type(model)._no_split_modules
    before = None if declared is None else set(declared)
    units = find_units(model)
    ends = {type(model.get_input_embeddings()).__name__: 1, type(model.get_output_embeddings()).__name__: 1}
    assert kinds(units) == blocks | ends
    assert units[-1][1] is model.get_output_embeddings()
    assert type(model)._no_split_modules is declared
    assert before == (None if declared is None else set(declared))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_tied_embedding_and_head_stay_in_the_root(name):
    config, blocks = MODELS[name]
    model = build(type(config)(**(config.to_dict() | {"tie_word_embeddings": True})))
    assert kinds(find_units(model)) == blocks


def test_structure_where_a_model_declares_nothing():
    model = build(MODELS["llama"][0])
    model._no_split_modules = None
    model.model._no_split_modules = None
    assert kinds(find_units(model)) == {"LlamaDecoderLayer": 3, "Embedding": 1, "Linear": 1}


def test_given_classes():
    model = build(MODELS["llama"][0])
    assert kinds(find_units(model, ["LlamaMLP"])) == {"LlamaMLP": 3, "Embedding": 1, "Linear": 1}
    with pytest.raises(ValueError, match=r"wrap names NoSuchLayer, .* it repeats LlamaDecoderLayer"):
        find_units(model, ["NoSuchLayer"])


def test_table_accounts_for_every_parameter():
    model = build(MODELS["qwen2-vl"][0])
    table = describe_units(model, find_units(model))
    rows = [line.split()[-4:] for line in table.splitlines()[1:-1]] + [["", *table.splitlines()[-1].split()[-2:], ""]]
    total = sum(int(count) * int(numel.replace(",", "")) for _, count, numel, _ in rows)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert "Qwen2VLDecoderLayer" in table
