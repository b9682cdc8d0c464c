"""What may be done to each repeated block before it is sharded: recompute its activations, compile it.

Both replace the block's ``forward``, not the block: names stay, and FSDP's hooks run outside.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers the operator named below
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_EXPENSIVE = {  # what "selective" keeps: matrix products, and attention, whose flops grow with the square of the length
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def checkpoint_activations(blocks: Iterable[nn.Module], mode: Literal["selective", "full"]) -> None:
    """Blocks keep their inputs (selective: also the results of matrix products and attention) and run again backward.

    Chen et al. 2016, arXiv:1604.06174.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a block is random
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """One compiled graph serves all blocks of a kind, and all lengths."""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)
