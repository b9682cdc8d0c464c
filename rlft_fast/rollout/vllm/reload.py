"""What a reload of vLLM (0.32) loses: weights that a model writes into its parameters past their loaders, or packs.

While vLLM reloads, parameters have no memory, and their loaders keep what comes. What a model writes otherwise is lost
without a word: vLLM goes on with the numbers before, which are random at first.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

_SINKS = (".sinks", ".attention_sink_bias")  # of gpt-oss and of MiMo-V2
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
_WRITERS = ("gpt_oss", "mimo_v2_flash")  # types of models
_NUM_COMPARED = 256  # elements of a parameter


def check_transfer(model_type: str, transfer: str) -> None:
    """Refuses models whose weights vLLM's own transfers would lose. Other weights go through `Reload`.

    Args:
        model_type: of transformers.
        transfer: of the weights.

    Raises:
        ValueError: the transfer is vLLM's own.
    """
    if transfer in ("ipc", "nccl") and model_type in _WRITERS:
        raise ValueError(
            f"vLLM's transfer of weights by {transfer} loses weights of {model_type}: use rollout.vllm.process: "
            "colocated, or servers with rollout.vllm.transfer: socket"
        )


class Reload:
    """One reload of all weights.

    Args:
        model: of vLLM, before the reload.
        is_first: whether the model's weights are random.
    """

    def __init__(self, model: nn.Module, *, is_first: bool) -> None:
        self.model = model
        self._sinks: list[tuple[str, Tensor]] = []
        self._before = _compared(model) if is_first else {}

    def weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as vLLM's model takes them with its loaders: of gpt-oss, the weights of each expert alone."""
        cuts_experts = type(self.model).__name__ == "GptOssForCausalLM"
        for name, weight in weights:
            if name.endswith(_SINKS):
                self._sinks.append((name, weight))
            if cuts_experts and (match := _EXPERTS.fullmatch(name)):
                yield from ((f"{match[1]}.{i}.{match[2]}", own) for i, own in enumerate(weight))
            else:
                yield name, weight

    @torch.no_grad()
    def write_sinks(self) -> None:
        """After vLLM has put its parameters back."""
        from vllm.distributed import get_tensor_model_parallel_rank

        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        for name, weight in self._sinks if mapper is None else mapper.apply(self._sinks):
            sinks, layer = self.model.get_parameter(name), cast(Any, self.model.get_submodule(name.rpartition(".")[0]))
            sinks.copy_(weight[sinks.numel() * get_tensor_model_parallel_rank() :][: sinks.numel()])
            if (own := layer.attn.impl.sinks) is not sinks:  # a copy in another dtype
                own.copy_(sinks)

    def require_all(self) -> None:
        """Raises RuntimeError for weights that are still random."""
        now = _compared(self.model)
        left = [name for name, x in self._before.items() if name in now and torch.equal(now[name], x)]
        if left:
            raise RuntimeError(
                f"vLLM did not get all weights of its model: {', '.join(left[:3])}{', ...' * (len(left) > 3)}"
            )


def renew_packed_weights(model: nn.Module) -> None:
    """Has vLLM pack two kinds of weights again after a reload. On CPUs, vLLM multiplies by packed weights.

    A reload (vLLM 0.32) packs the weights of most layers again. It leaves out a head that is tied to the embedding,
    because such a head gets no weights, and experts, which vLLM packs at their first load only. Without this function,
    vLLM would sample with old weights there.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    embeddings = [module for module in model.modules() if type(module) is VocabParallelEmbedding]
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and any(module.weight is embedding.weight for embedding in embeddings):
            method.process_weights_after_loading(module)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _compared(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of some elements of each parameter, whose dtype and whose size a reload may change."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.is_floating_point():
            flat = parameter.detach().reshape(-1)
            found[name] = flat[:: max(len(flat) // _NUM_COMPARED, 1)].clone().view(torch.uint8)
    return found
