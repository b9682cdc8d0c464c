"""What a model does between its backbone and its logits, found by running its own forward once.

The backbone is left out: a few random hidden states take the place of what it returns, and a few sample logits the
place of what the head returns. So the probe costs no layer, and needs no weights but those of modules in between.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Far enough out that a soft-cap bends them.
_SAMPLE_LOGITS = (-40.0, -1.0, 0.5, 40.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a model's forward does around its head.

    Attributes:
        softcap: c in c * tanh(logits / c), after the scale; None: nothing.
        logit_scale: factor on the raw logits.
        hidden_scale: factor on the hidden states before the head; None: something else happens to them.
    """

    softcap: float | None
    logit_scale: float
    hidden_scale: float | None


class UnknownForwardError(ValueError):
    """A model whose forward does what cannot be repeated."""


def probe(model: PreTrainedModel, device: torch.device | str, dtype: torch.dtype) -> Surroundings:
    """Runs the forward of a causal language model on two tokens, without its backbone.

    Where that fails, because the forward needs more outputs of the backbone, the backbone runs, too. The last attempts
    pass position ids in four dimensions, which verl's forwards of models with images ask for.

    Args:
        model: with a linear head, on any device, in any mode; nothing of it changes.
        device: of the hidden states that replace those of the backbone; on "meta" no `hidden_scale` is found.
        dtype: of these; narrower ones than float32 round `hidden_scale`.

    Raises:
        UnknownForwardError: the model does not call its head once, or does something else to its logits than to scale
            and to soft-cap them.
    """
    name = type(model).__name__
    seen = _first_that_runs(model, torch.device(device), dtype)
    if len(seen.at_head) != 1:
        raise UnknownForwardError(f"{name} calls its head {len(seen.at_head)} times in a forward, expected once")
    softcap, logit_scale = _transform(name, model.config, seen.logits)
    return Surroundings(
        softcap=softcap, logit_scale=logit_scale, hidden_scale=_factor(seen.hidden, seen.at_head[0])
    )  # fmt: skip


def _first_that_runs(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> "_Seen":
    positions = {"position_ids": torch.arange(2, device=device).expand(4, 1, 2)}
    failed: Exception | None = None
    for inputs in ({}, positions):
        for each in (dtype, None):
            try:
                return _run(model, device, each, inputs)
            except Exception as error:  # of the model's own code
                failed = error if each is None and not inputs else failed  # the plain call says most
    raise UnknownForwardError(
        f"the forward of {type(model).__name__} cannot be tried on two tokens: {type(failed).__name__}: "
        f"{' '.join(str(failed).split())}"
    ) from failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    hidden: Tensor | None  # what took the place of the backbone's; None: the backbone itself ran
    at_head: list[Tensor]
    logits: list[float]


class _Stub:
    """An output of the backbone that has hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


@torch.no_grad()
def _run(model: PreTrainedModel, device: torch.device, dtype: torch.dtype | None, inputs: dict[str, Tensor]) -> _Seen:
    """Without a dtype the backbone runs itself."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    at_head: list[Tensor] = []

    def record(hidden: Tensor) -> Tensor:
        at_head.append(hidden)
        on = "cpu" if hidden.is_meta else hidden.device
        return torch.tensor(_SAMPLE_LOGITS, device=on).repeat(*hidden.shape[:-1], 1)

    hidden = None
    if dtype is not None:
        generator = torch.Generator("cpu").manual_seed(0)
        shape = (1, 2, cast(Tensor, head.weight).shape[1])
        hidden = torch.randn(shape, device="cpu", generator=generator).to(device, dtype)
    backbones = [x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model]
    with torch.device("cpu"), contextlib.ExitStack() as stack:  # and not on a device that the caller made the default
        stack.enter_context(torch.random.fork_rng())  # it may have dropout
        stack.enter_context(_replaced(head, record))
        if hidden is not None:
            stub = _Stub(hidden)
            for backbone in backbones:
                stack.enter_context(_replaced(backbone, lambda *_, **__: stub))
        input_ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        outputs = type(model).forward(model, input_ids=input_ids, **inputs)
    logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
    return _Seen(hidden=hidden, at_head=at_head, logits=logits[0, 0].tolist())


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """Another forward of a module, for a while."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _factor(hidden: Tensor | None, at_head: Tensor) -> float | None:
    """c, if the head got c times what the backbone gave; where the backbone ran itself that cannot be seen."""
    if hidden is None or hidden.shape != at_head.shape or hidden.is_meta or at_head.is_meta:
        return None
    if torch.equal(hidden, at_head):
        return 1.0
    wide, result = hidden.double(), at_head.double()
    factor = float((wide * result).sum() / (wide * wide).sum())
    tolerance = 4 * torch.finfo(hidden.dtype).eps
    return factor if torch.allclose(result, factor * wide, rtol=tolerance, atol=tolerance * abs(factor)) else None


def _transform(name: str, config: Any, logits: list[float]) -> tuple[float | None, float]:
    """(softcap, scale) that turn the sample logits into these."""
    text = config.get_text_config()
    keys = ("final_logit_softcapping", "logits_soft_cap")  # Gemma, RecurrentGemma
    softcaps = sorted({float(value) for key in keys if (value := getattr(text, key, None))})
    raw, actual = (torch.tensor(x, device="cpu", dtype=torch.float64) for x in (_SAMPLE_LOGITS, logits))
    for softcap in [*softcaps, None]:
        inner = actual if softcap is None else softcap * torch.atanh(actual / softcap)
        scale = _rounded(float(inner[2] / raw[2]), text)
        expected = scale * raw if softcap is None else softcap * torch.tanh(scale * raw / softcap)
        if torch.allclose(expected, actual, rtol=1e-4):
            return softcap, scale
    raise UnknownForwardError(
        f"{name} turns raw logits {list(_SAMPLE_LOGITS)} into {[round(x, 4) for x in logits]}: expected a scale, or "
        "one of the soft-caps that its configuration names"
    )


def _rounded(scale: float, config: Any) -> float:
    """The number that the configuration has for this scale, if any: exact, where the one that was seen is rounded."""
    keys = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")  # Cohere, Falcon, Muse, Granite
    values = [float(value) for key in keys if (value := getattr(config, key, None))]
    known = [1.0, *values, *(1 / value for value in values)]
    return min([x for x in known if abs(x - scale) < 1e-4 * abs(scale)] or [scale], key=lambda x: abs(x - scale))
