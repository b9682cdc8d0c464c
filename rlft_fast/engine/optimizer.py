"""AdamW with parameter groups by rule, its master weights, and learning-rate schedules."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from rlft_fast.config import OptimizerConfig
from rlft_fast.models import RLModel, checkpoint_tensors, load_weights, stored_head
from rlft_fast.ops import FusedAdamW


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> FusedAdamW:
    """AdamW that clips while it steps. Only matrices decay: never biases, norms or scalars."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return FusedAdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate, betas=config.betas, eps=config.eps, moment_dtype=getattr(torch, config.moment_dtype),
        offload_moments=config.cpu_offload,
    )  # fmt: skip


def load_masters(path: str, model: RLModel, optimizer: FusedAdamW) -> None:
    """Reads float32 masters of bfloat16 weights from the model's files: made from the weights they would be rounded."""
    optimizer.initialize_state()
    head = stored_head(path, model)
    tensors = checkpoint_tensors(model.pretrained) | head
    masters = {name: optimizer.state[tensor]["master"] for name, tensor in tensors.items() if tensor.requires_grad}
    if masters:  # adapters alone are in no file
        load_weights(path, model.pretrained, into=masters, beside=head)


def learning_rate_factor(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """Share of the peak learning rate at optimizer step ``step``: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "linear":
        return 1.0 - progress
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
