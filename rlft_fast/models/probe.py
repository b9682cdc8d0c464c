"""The probe finds out how a model transforms hidden states and logits around its head.

The probe runs the model's own forward once. Random hidden states replace the output of the backbone, and sample logits
replace the output of the head. The probe therefore runs no layer of the backbone. It needs only the weights of modules
between backbone and head.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

# Logits of four tokens, repeated for all others. The outer logits are large enough that a soft-cap changes them.
_SAMPLE_LOGITS = (-40.0, -1.0, 0.5, 40.0)
_LABELS = (3, 1, -100, 2)  # of different sample logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The transforms that a model's forward applies around its head.

    Attributes:
        softcap: c in c * tanh(logits / c), applied after the scale; None: no soft-cap.
        logit_scale: factor on the raw logits.
        hidden_scale: factor on the hidden states before the head; None: the model changes them in another way, or the
            probe could not compare them.
    """

    softcap: float | None
    logit_scale: float
    hidden_scale: float | None


class UnknownForwardError(ValueError):
    """The forward of a model does something that no packed or patched head can repeat."""


def probe(model: PreTrainedModel, device: torch.device | str, dtype: torch.dtype) -> Surroundings:
    """Runs the forward of a causal language model on two tokens, without its backbone, and compares all logits.

    If this fails because the forward needs other outputs of the backbone, the backbone runs, too. The last attempts
    pass position ids in four dimensions, because verl's forwards of vision-language models need them.

    Args:
        model: a model with a linear head, on any device, in any mode. It stays unchanged.
        device: device of the random hidden states. On "meta" `hidden_scale` is None.
        dtype: dtype of the random hidden states. A dtype narrower than float32 rounds `hidden_scale`.

    Raises:
        UnknownForwardError: the forward fails, does not call the head exactly once, changes the logits by more than
            a scale and a soft-cap, treats some tokens otherwise than others, or leaves tokens out.
    """
    name, num_rows = type(model).__name__, len(_head_weight(model))
    seen = _first_that_runs(model, torch.device(device), dtype)
    if len(seen.at_head) != 1:
        raise UnknownForwardError(f"{name} calls its head {len(seen.at_head)} times in a forward, expected once")
    if (width := seen.logits_LV.shape[-1]) != num_rows:
        raise UnknownForwardError(
            f"{name} returns {width} logits of the {num_rows} rows of its head, expected all: call "
            f"model.resize_token_embeddings({width}) if the last rows are padding"
        )
    softcap, logit_scale = _transform(name, model.config, seen.logits_LV)
    return Surroundings(
        softcap=softcap, logit_scale=logit_scale, hidden_scale=_factor(seen.hidden, seen.at_head[0])
    )  # fmt: skip


def require_next_token_loss(model: PreTrainedModel) -> None:
    """Refuses a model whose loss of labels is not the mean cross-entropy of each next token.

    The model's own forward computes the loss of sample logits. As in `probe`, the backbone runs only if the forward
    fails without its other outputs.

    Args:
        model: a causal language model with a linear head, patched or not. It stays unchanged.

    Raises:
        UnknownForwardError: the loss has another value, or the forward fails.
    """
    weight = _head_weight(model)
    labels = torch.tensor([_LABELS], device="cpu" if weight.is_meta else weight.device)
    was_training, model.training = model.training, False  # in training, Liger's loss needs no logits
    try:
        seen = _first_that_runs(model, weight.device, weight.dtype, labels)
    finally:
        model.training = was_training
    expected = float(cross_entropy(seen.logits_LV[:-1], labels[0, 1:].cpu()))
    if seen.loss is None or not math.isclose(seen.loss, expected, rel_tol=1e-5):
        own = "no loss" if seen.loss is None else f"a loss of {seen.loss:.7g}"
        raise UnknownForwardError(
            f"{type(model).__name__} computes {own} for sample labels, expected {expected:.7g}, the mean cross-entropy "
            "of each next token"
        )


def _first_that_runs(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, labels: Tensor | None = None
) -> "_Seen":
    """Without labels, the sequence has two tokens."""
    num_tokens, what = (2, "two tokens") if labels is None else (labels.shape[1], "labels")
    asked = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.int64, device=device)}
    asked |= {} if labels is None else {"labels": labels}
    positions = {"position_ids": torch.arange(num_tokens, device=device).expand(4, 1, num_tokens)}
    failed: Exception | None = None
    for inputs in ({}, positions):
        for each in (dtype, None):
            try:
                return _run(model, device, each, asked | inputs)
            except Exception as error:  # the model's own code may raise anything
                failed = error if each is None and not inputs else failed  # the plain call's error tells most
    raise UnknownForwardError(
        f"the forward of {type(model).__name__} cannot be tried on {what}: {type(failed).__name__}: "
        f"{' '.join(str(failed).split())}"
    ) from failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    hidden: Tensor | None  # in place of the backbone's output; None: the backbone itself ran
    at_head: list[Tensor]
    logits_LV: Tensor  # float64, on the CPU
    loss: float | None


class _Stub:
    """An output of a backbone that has only hidden states. All other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


@torch.no_grad()
def _run(model: PreTrainedModel, device: torch.device, dtype: torch.dtype | None, inputs: dict[str, Tensor]) -> _Seen:
    """Runs the model's forward once. If dtype is None, the backbone runs, too."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    num_rows, dim = _head_weight(model).shape
    at_head: list[Tensor] = []

    def record(hidden: Tensor) -> Tensor:
        at_head.append(hidden)
        on = "cpu" if hidden.is_meta else hidden.device
        return _sample_logits(num_rows, torch.float32).to(on).repeat(*hidden.shape[:-1], 1)

    hidden = None
    if dtype is not None:
        generator = torch.Generator("cpu").manual_seed(0)
        shape = (*inputs["input_ids"].shape, dim)
        hidden = torch.randn(shape, device="cpu", generator=generator).to(device, dtype)
    backbones = [x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model]
    with torch.device("cpu"), contextlib.ExitStack() as stack:  # not on the caller's default device
        stack.enter_context(torch.random.fork_rng())  # the model may have dropout
        stack.enter_context(_replaced(head, record))
        if hidden is not None:
            stub = _Stub(hidden)
            for backbone in backbones:
                stack.enter_context(_replaced(backbone, lambda *_, **__: stub))
        outputs = type(model).forward(model, **inputs)
    logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
    loss = getattr(outputs, "loss", None)
    return _Seen(
        hidden=hidden, at_head=at_head, logits_LV=logits[0].cpu().double(), loss=None if loss is None else float(loss)
    )


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """Replaces the forward of a module inside the context."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _factor(hidden: Tensor | None, at_head: Tensor) -> float | None:
    """c, if the head got c times the random hidden states, else None. It is None, too, if the backbone itself ran."""
    if hidden is None or hidden.shape != at_head.shape or hidden.is_meta or at_head.is_meta:
        return None
    if torch.equal(hidden.to(at_head.dtype), at_head):  # Mamba rounds them to the dtype of the head, as heads here do
        return 1.0
    wide, result = hidden.double(), at_head.double()
    factor = float((wide * result).sum() / (wide * wide).sum())
    tolerance = 4 * torch.finfo(hidden.dtype).eps
    return factor if torch.allclose(result, factor * wide, rtol=tolerance, atol=tolerance * abs(factor)) else None


def _transform(name: str, config: Any, logits_LV: Tensor) -> tuple[float | None, float]:
    """(softcap, scale) that turn the sample logits into ``logits_LV``."""
    text = config.get_text_config()
    keys = ("final_logit_softcapping", "logits_soft_cap")  # Gemma, RecurrentGemma
    softcaps = sorted({float(value) for key in keys if (value := getattr(text, key, None))})
    raw_V, actual = _sample_logits(logits_LV.shape[-1], torch.float64), logits_LV[0, : len(_SAMPLE_LOGITS)]
    for softcap in [*softcaps, None]:
        inner = actual if softcap is None else softcap * torch.atanh(actual / softcap)
        scale = _rounded(float(inner[2] / raw_V[2]), text)
        expected_V = scale * raw_V if softcap is None else softcap * torch.tanh(scale * raw_V / softcap)
        if torch.allclose(expected_V[: len(actual)], actual, rtol=1e-4):
            _require_all_tokens(name, logits_LV, expected_V)
            return softcap, scale
    raise UnknownForwardError(
        f"{name} turns raw logits {list(_SAMPLE_LOGITS)} into {[round(x, 4) for x in actual.tolist()]}: expected a "
        "scale, or one of the soft-caps that its configuration names"
    )


def _require_all_tokens(name: str, logits_LV: Tensor, expected_V: Tensor) -> None:
    others = (~torch.isclose(logits_LV, expected_V, rtol=1e-4)).any(0).nonzero().flatten().tolist()
    if others:
        some = ", ".join(map(str, others[:3])) + (", ..." if len(others) > 3 else "")
        raise UnknownForwardError(
            f"{name} changes the logits of chosen tokens (ids {some}; {len(others)} of {len(expected_V)}), expected "
            "one scale and one soft-cap for all: choose another model"
        )


def _sample_logits(num_tokens: int, dtype: torch.dtype) -> Tensor:
    """(num_tokens,) on the CPU."""
    repeats = -(-num_tokens // len(_SAMPLE_LOGITS))
    return torch.tensor(_SAMPLE_LOGITS, dtype=dtype, device="cpu").repeat(repeats)[:num_tokens]


def _head_weight(model: PreTrainedModel) -> Tensor:
    """(V, D)"""
    return cast(Tensor, cast(nn.Module, model.get_output_embeddings()).weight)


def _rounded(scale: float, config: Any) -> float:
    """The configured scale if it is close to the measured scale, which is rounded; else the measured scale."""
    keys = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")  # Cohere, Falcon, Muse, Granite
    values = [float(value) for key in keys if (value := getattr(config, key, None))]
    known = [1.0, *values, *(1 / value for value in values)]
    return min([x for x in known if abs(x - scale) < 1e-4 * abs(scale)] or [scale], key=lambda x: abs(x - scale))
