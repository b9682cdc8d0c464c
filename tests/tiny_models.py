"""Tiny random models in Hugging Face folders: small enough for a test, real enough for every code path."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

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


def save_tiny_model(name: str, folder: Path, **options: Any) -> Path:
    """Writes the random model `name` of `MODELS` with its tokenizer; the same weights every time.

    Args:
        name: key of `MODELS`.
        folder: where to write.
        **options: changes to the model's configuration.

    Returns:
        The folder.
    """
    model_class, config_class, own = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        model = model_class(config_class(**(_SIZES | own | options)))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1, which would hide that they are forgotten
                torch.nn.init.normal_(parameter, mean=parameter[0].item(), std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: every byte of a text is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
