"""Quantized checkpoints that are dequantized while they are read, by the conversions of transformers."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

_DEQUANTIZED = ("fp8", "mxfp4")  # DeepSeek-V3, Qwen3-FP8; gpt-oss


def take_quantization(config: PreTrainedConfig, path: str | Path) -> HfQuantizer | None:
    """What dequantizes the weights of a folder; None if they are not quantized.

    The entry of the configuration is removed: a model of this configuration has plain weights.

    Args:
        config: of the model.
        path: its folder, for the message.

    Raises:
        ValueError: transformers has no conversion from this kind of quantized weights.
    """
    found: Any = None
    for each in (config, config.get_text_config()):
        found = vars(each).pop("quantization_config", None) or found
    if found is None:
        return None
    given = found if isinstance(found, dict) else found.to_dict()
    method = given.get("quant_method")
    if method not in _DEQUANTIZED:
        raise ValueError(
            f"the model in {path} is quantized by {method}, and quantized weights cannot be trained. Dequantized while "
            f"loading are {' and '.join(_DEQUANTIZED)}: dequantize it, or take its folder of plain weights"
        )
    options: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[method].from_dict(given)
    options.dequantize = True
    quantizer: Any = AUTO_QUANTIZER_MAPPING[method]
    return quantizer(options, pre_quantized=True)


def mark_quantized(model: PreTrainedModel, quantizer: HfQuantizer | None) -> None:
    """Remembers how to read the weights of the model's folder."""
    vars(model)["_rlft_dequantizer"] = quantizer


def dequantizer_of(model: PreTrainedModel) -> HfQuantizer | None:
    """What `mark_quantized` was given for the model."""
    return vars(model).get("_rlft_dequantizer")
