"""Counts the floating-point operations of a model, as model FLOPs utilisation (MFU) takes them.

Recomputed activations do not count (PaLM, arXiv 2204.02311, appendix B), and neither do towers of images and operations
that are no matrix product. Tokens that run once for several sequences count once, so that no device exceeds its peak.
Attention counts as causal over whole sequences, also where a model's layers see a window or have a state.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft_fast.data import Batch, count_tokens
from rlft_fast.models import PolicyModel, RLModel, layer_configs

PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12}
"""FLOP/s of dense bfloat16 by a part of the GPU's name, from the vendor's data sheets; the first that fits counts."""


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of dense bfloat16 that a device reaches at most; None where the peak is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


class ModelFlops(NamedTuple):
    """What a model's FLOPs grow with."""

    per_token: float
    """FLOPs of every token."""
    per_active: float
    """FLOPs of the head for every sampled token."""
    per_pair: float
    """FLOPs of attention for every pair of a token and a token before it."""
    is_padded: bool = False
    """Whether equal prefixes run as often as they stand in a batch."""

    def of(self, batch: Batch) -> float:
        """FLOPs of the tokens of a batch that an active token depends on, equal prefixes of its sequences once.

        The head counts as often as sequences have an active token.
        """
        tokens, pairs = count_tokens(batch, padded=self.is_padded)
        return self.per_token * tokens + self.per_active * int(batch.active_T.sum()) + self.per_pair * pairs


def model_flops(model: RLModel, *, backward: bool = True) -> ModelFlops:
    """FLOPs of a forward, or of a forward and a backward.

    A weight W takes 2 numel(W) FLOPs per token in the forward, the same for the gradient of its input, and the same for
    its own gradient if it is trained. The head runs for the sampled tokens alone. Experts count by the share of them
    that a token uses.

    Args:
        model: with all weights or with its shards.
        backward: count the backward, too.
    """
    per_active = _per_token(model.head.weight, backward) if isinstance(model, PolicyModel) else 0.0
    config = model.pretrained.config.get_text_config()
    width = sum(map(_attention_width, layer_configs(config)))
    return ModelFlops(
        per_token=sum(_per_token(weight, backward) * share for weight, share in _matrices(model)),
        per_active=per_active,
        per_pair=4 * width * (3 if backward else 1),
        is_padded=bool(model.padded_because),
    )


def _attention_width(config: Any) -> int:
    """Columns of the queries of a layer."""
    heads = getattr(config, "num_attention_heads", 0)
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))


def _per_token(weight: Tensor, backward: bool) -> float:
    return 2.0 * weight.numel() * (1 + (1 + weight.requires_grad) * backward)


def _matrices(model: RLModel) -> Iterator[tuple[Tensor, float]]:
    """The matrices that every token is multiplied by, and the share of a matrix that a token uses."""
    backbone = cast(PreTrainedModel, model.pretrained.base_model)
    config = backbone.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), 1)
    used = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    for name, module in backbone.get_decoder().named_modules():  # of text: a tower sees no token
        parts = name.split(".")
        if not isinstance(module, nn.Embedding):
            for weight in module.parameters(recurse=False):
                if weight.dim() >= 2:
                    yield weight, used if "experts" in parts else 1.0
