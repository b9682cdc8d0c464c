"""The routers of a mixture of experts: which experts they choose is recorded, and replayed in a later pass.

A router of transformers returns its logits, the weights of the experts that it chose, and their numbers, or (Granite)
the numbers first and the logits last. It finds the numbers by one ``torch.topk`` over all experts. A replay answers
this call with other numbers and the scores at these numbers, so that the weights are the router's own function of them.
The scores are those before a mask, by which routers leave out groups of experts: DeepSeek-V2 takes its weights from
masked scores, which are 0 outside of the groups that the router would choose now.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

_MOST_IN_A_BYTE = 256


@dataclass
class Routing:
    """What the L routers of a model do in one pass over U rows.

    Args:
        replayed_UK: (U, L * K) integers, the numbers of the experts to use, layer after layer; None: the routers
            choose.
        logits: of each layer that has run, (U, experts).
        chosen: of each layer, (U, K) int64 numbers of the experts that ran.
        own: of each layer, (U, K) int64 numbers that its router would choose.
    """

    replayed_UK: Tensor | None = None
    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    own: dict[int, Tensor] = field(default_factory=dict)


class Routers:
    """The routers of a model, found by what transformers says of the model's outputs, and tried on the meta device.

    Args:
        backbone: its routers are changed in place: a `Routing` may follow them.

    Attributes:
        num_layers: L, routers of the model.
        num_experts: of a layer.
        top_k: K, experts that a token takes in a layer.
        dtype: the smallest that holds the numbers of the experts.

    Raises:
        ValueError: the model has no routers, or they choose experts in another way.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        modules, self.num_experts, self.top_k = _find(backbone)
        self._routing: Routing | None = None
        self.num_layers = len(modules)
        self.dtype = torch.uint8 if self.num_experts <= _MOST_IN_A_BYTE else torch.int16
        for layer, module in enumerate(modules):
            self._follow(module, layer)

    def check(self, experts_TK: Tensor) -> None:
        """Raises ValueError for numbers of experts that are not of this model.

        Args:
            experts_TK: (T, L * K) integers on the CPU.
        """
        width, highest = self.num_layers * self.top_k, self.num_experts - 1
        if experts_TK.shape[1] != width or not ((experts_TK >= 0) & (experts_TK <= highest)).all():
            raise ValueError(
                f"routed_experts_TK has shape {(*experts_TK.shape,)}, expected {width} experts for each token "
                f"({self.num_layers} layers, {self.top_k} of each) from 0 to {highest}: infer routed_experts by "
                "this model"
            )

    @contextlib.contextmanager
    def following(self, routing: Routing) -> Iterator[None]:
        """A forward pass, and its backward, in which the routers fill `routing` and replay what it says."""
        self._routing = routing
        try:
            yield
        finally:
            self._routing = None

    def encoded(self, routing: Routing) -> Tensor:
        """(U, L * K) numbers of the experts that ran, in `dtype`."""
        return torch.cat([routing.chosen[layer] for layer in range(self.num_layers)], -1).to(self.dtype)

    def _follow(self, module: Any, layer: int) -> None:
        run = module.forward

        @torch.compiler.disable
        def forward(hidden: Tensor, *args: Any, **options: Any) -> Any:
            routing = self._routing
            if routing is None:
                return run(hidden, *args, **options)
            replayed = None
            if routing.replayed_UK is not None:
                replayed = routing.replayed_UK[:, layer * self.top_k : (layer + 1) * self.top_k].long()
            with _Choice(self.num_experts, self.top_k, replayed) as choice:
                found = run(hidden, *args, **options)
            if layer not in routing.chosen:  # recomputed activations run a layer twice
                routing.logits[layer], _, routing.chosen[layer] = _numbers_last(found)
                routing.own[layer] = choice.own[0]
            return found

        module.forward = forward


def has_routers(backbone: PreTrainedModel) -> bool:
    """Whether a model has routers of experts that are known."""
    return any(True for _ in _routers(backbone))


def check_routers(backbone: PreTrainedModel, *, auxiliary_loss: bool = False) -> None:
    """Refuses a model whose routers cannot be followed.

    Args:
        backbone: stays as it is.
        auxiliary_loss: whether the routers also need a loss.

    Raises:
        ValueError: see `Routers`; or transformers has no auxiliary loss for the model.
    """
    _find(backbone)
    if auxiliary_loss and not hasattr(backbone.config.get_text_config(), "router_aux_loss_coef"):
        raise ValueError(
            f"router_aux_loss_coef is set, but transformers has no auxiliary loss for the routers of "
            f"{type(backbone).__name__}: leave router_aux_loss_coef out"
        )


class _Choice(TorchFunctionMode):
    """Finds the call of topk by which a router chooses experts, and answers it with other numbers."""

    def __init__(self, num_experts: int, top_k: int, replayed: Tensor | None) -> None:
        super().__init__()
        self._sizes, self._replayed = (num_experts, top_k), replayed
        self._masked: tuple[Tensor, Tensor] | None = None  # the result of the last mask, and what it was of
        self.own: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func in (torch.masked_fill, Tensor.masked_fill) and args:
            self._masked = found, args[0]
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or (scores.shape[-1], found.indices.shape[-1]) != self._sizes:
            return found
        self.own.append(found.indices)
        if self._replayed is None:
            return found
        if self._masked is not None and self._masked[0] is scores:
            scores = self._masked[1]
        return torch.return_types.topk((scores.gather(-1, self._replayed), self._replayed))


def _find(backbone: PreTrainedModel) -> tuple[list[nn.Module], int, int]:
    """The routers, the number of experts of a layer, and the experts of a token.

    A try on the meta device shows whether a router obeys a replay.
    """
    modules, name = [*_routers(backbone)], type(backbone).__name__
    if not modules:
        raise ValueError(
            f"{name} has no routers of experts that are known: leave router_aux_loss_coef and routing_replay out"
        )
    found = {_sizes(module, backbone.config.get_text_config().hidden_size) for module in modules}
    if len(found) > 1 or None in found:
        raise ValueError(
            f"the routers of {name} ({type(modules[0]).__name__}) do not choose by one topk, or do not return logits, "
            "weights and numbers of experts: leave router_aux_loss_coef and routing_replay out"
        )
    ((num_experts, top_k),) = filter(None, found)
    return modules, num_experts, top_k


def _sizes(module: nn.Module, hidden_size: int) -> tuple[int, int] | None:
    """Number of experts, and experts of a token; None for a router of another kind."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    meta = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in tensors.items()}
    hidden = torch.empty(3, hidden_size, dtype=next(module.parameters()).dtype, device="meta")
    try:
        logits, weights, chosen = _numbers_last(functional_call(module, meta, (hidden,)))
        num_experts, top_k = logits.shape[-1], chosen.shape[-1]
        with _Choice(num_experts, top_k, chosen) as choice:
            functional_call(module, meta, (hidden,))
    except Exception:  # a router of another kind may raise any error
        return None
    is_known = len(choice.own) == 1 and weights.shape == chosen.shape == (3, top_k)
    return (num_experts, top_k) if is_known and not chosen.dtype.is_floating_point else None


def _numbers_last(found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What a router returns, as logits, weights and numbers of experts."""
    first, weights, last = found
    return (last, weights, first) if last.dtype.is_floating_point else (first, weights, last)


def _routers(backbone: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules whose output transformers records as router_logits, in the order of the layers."""
    kinds: tuple[type, ...] = ()
    for module in backbone.modules():
        if isinstance(module, PreTrainedModel):
            named = (module._can_record_outputs or {}).get("router_logits", ())
            for recorder in named if isinstance(named, list | tuple) else (named,):
                kind = recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
                kinds += (kind,) if isinstance(kind, type) else ()
    return (module for module in backbone.modules() if isinstance(module, kinds))
