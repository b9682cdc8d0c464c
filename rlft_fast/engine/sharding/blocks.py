"""Activation checkpointing and compilation of a model's repeated blocks, before the model is sharded.

Both replace the ``forward`` of a block, not the block. So parameters keep their names, and FSDP's hooks run outside of
the recomputed or compiled code.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers the operator named below
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Mode "selective" keeps the results of these operators: matrix products, and attention, whose flops grow with the
# square of the length.
_EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def checkpoint_activations(
    blocks: Iterable[nn.Module], mode: Literal["selective", "full", "offload"], *, is_random: bool = False
) -> None:
    """Has blocks keep only their inputs and run again in the backward pass. Chen et al. 2016, arXiv:1604.06174.

    Args:
        blocks: changed in place.
        mode: "selective" also keeps the results of matrix products and attention, and does not run these again. The
            inputs stay with "offload", too, until `offload_inputs`.
        is_random: whether blocks draw random numbers. The second run draws the same numbers then, for which the states
            of the generators are kept.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)


def offload_inputs(blocks: Iterable[nn.Module], host: torch.device) -> None:
    """Has blocks that are checkpointed in full keep their inputs in another memory until the backward pass.

    Inputs keep their bits. Copies run in the stream of the computation, so that nothing waits for them but the device.

    Args:
        blocks: from `checkpoint_activations` and `compile_blocks`; changed in place.
        host: keeps the inputs. Memory of a CPU is pinned.
    """
    for block in blocks:
        block.forward = functools.partial(_run_offloaded, block.forward, host)


def _run_offloaded(forward: Callable[..., Any], host: torch.device, *arguments: Any, **options: Any) -> Any:
    inputs = {x.untyped_storage()._cdata for x in arguments if isinstance(x, Tensor)}
    device = next((x.device for x in arguments if isinstance(x, Tensor)), host)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in inputs:  # a compiled block also saves its weights
            return tensor
        kept = torch.empty_like(tensor, device=host, pin_memory=tensor.is_cuda and host.type == "cpu")
        return kept.copy_(tensor, non_blocking=True)

    with saved_tensors_hooks(pack, lambda kept: kept.to(device, non_blocking=True)):
        return forward(*arguments, **options)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compiles each block in place. One graph serves all blocks of a class, and all lengths."""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)
