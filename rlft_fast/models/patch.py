"""Log-probabilities from any transformers causal language model, inside any trainer.

The patched model runs its own forward. Before it, the head is told the targets; when the model calls its head, the head
answers with statistics, which leave through the hooked module call, and hands the model a column of zeros instead.
The model calls its head once per forward, as FSDP2 expects of every module of a unit: a second call would find the
unit's weights gone, or come after them in backward.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from rlft_fast.models.heads import LogprobHead
from rlft_fast.models.probe import probe
from rlft_fast.ops import LinearLogprob, LinearLogprobLoss
from rlft_fast.ops.logprob import LossFunction

_KEYWORDS = (
    "temperature", "return_entropy", "return_sum_prob_squared", "return_top1", "loss_fn", "per_token",
)  # fmt: skip


def patch_lm_head(model: PreTrainedModel, *, workspace_mib: int | None = None) -> PreTrainedModel:
    """Lets a causal language model answer with log-probabilities, in place; without targets it stays as it was.

    Afterwards ``model(input_ids=..., attention_mask=..., logprob_targets=...)`` returns a ``LinearLogprob`` and never
    holds the logits; the model's other keywords stay, and these are new:

        logprob_targets: (B, L) int64, the token to score at each position: ``input_ids`` one to the left. -100 where
            none is; such positions give 0, and their head costs nothing. With ``logits_to_keep=K`` (B, K).
        temperature: sampling temperature, one number or a tensor in the shape of ``logprob_targets``.
        return_entropy: also the entropy of each position.
        return_sum_prob_squared, return_top1: also the sum of squared probabilities, and whether the target is the most
            likely token, see :func:`rlft_fast.ops.linear_logprob`; not with ``loss_fn``.
        loss_fn, per_token: a per-token loss and a tuple of the tensors that it reads, in the same shape, see
            :func:`rlft_fast.ops.linear_logprob_loss`; the model then returns a ``LinearLogprobLoss``.

    Soft-capping, logit scale and bias are those of the model, found by running its forward once on two tokens, without
    its layers. Parameters, their names, ties and ``generate`` do not change. Patch after resizing the vocabulary and
    before anything wraps the model: PEFT, accelerate, DDP, ``fully_shard``, ``torch.compile``. :func:`unpatch_lm_head`
    undoes it.

    Args:
        model: causal language model with a linear head, on any device.
        workspace_mib: most memory for logits at any time, see :func:`rlft_fast.ops.linear_logprob` and, for losses,
            :func:`rlft_fast.ops.linear_logprob_loss`.

    Returns:
        The same model.

    Raises:
        TypeError: not a transformers model.
        ValueError: an encoder-decoder; no head, or none that is plainly linear (adapter, quantized, sharded); a model
            that is patched or wrapped already; a forward that does anything else to its logits.
    """
    head = _plain_head(model)
    weight = cast(nn.Parameter, head.weight)
    around = probe(model, weight.device, weight.dtype)
    model.set_output_embeddings(_PatchedHead(weight, head.bias, around.softcap, around.logit_scale, workspace_mib))
    if not _is_patched(type(model)):  # it is where the head was replaced
        model.__class__ = _patched_class(type(model))
    return model


def unpatch_lm_head(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`patch_lm_head`, in place: the model has a ``torch.nn.Linear`` with the same parameters again.

    Args:
        model: patched, and not wrapped or sharded since.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched, or was sharded after that.
    """
    head = model.get_output_embeddings()
    if type(head) is not _PatchedHead or not _is_patched(type(model)):
        raise ValueError(
            f"{type(model).__name__} with a {type(head).__name__} cannot be unpatched: expected a model as "
            "patch_lm_head left it, before fully_shard or another wrapper"
        )
    vocab, dim = head.weight.shape
    linear = nn.Linear(dim, vocab, head.bias is not None, device="meta")
    linear.weight = head.weight
    linear.register_parameter("bias", head.bias)
    model.set_output_embeddings(linear.train(head.training))
    model.__class__ = type(model).__bases__[0]
    return model


def _is_patched(model_class: type) -> bool:
    bases = model_class.__bases__
    return len(bases) == 1 and issubclass(bases[0], PreTrainedModel) and model_class is _patched_class(bases[0])


def _plain_head(model: PreTrainedModel) -> nn.Linear:
    """The model's head, if it can be replaced."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a transformers PreTrainedModel, got {name}: patch the model before wrapping it")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: patch_lm_head takes causal language models only")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} has no lm_head: load a causal language model (...ForCausalLM)")
    head_name = f"{type(head).__module__}.{type(head).__name__}"
    if isinstance(head, LogprobHead):
        raise ValueError(f"{name} is patched already: call patch_lm_head once")
    if hasattr(head, "base_layer"):
        raise ValueError(f"the head of {name} has an adapter ({head_name}): leave it out of the adapter's targets")
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        raise ValueError(
            f"the head of {name} is a {head_name} with a {type(head.weight).__name__} weight, expected a "
            "torch.nn.Linear with a plain parameter: leave it out of quantization, and patch before sharding"
        )
    if "forward" in vars(model) or "forward" in vars(head):
        raise ValueError(f"the forward of {name} was replaced already: patch the model before accelerate or others do")
    return head


class _PatchedHead(LogprobHead):
    """A head that answers the next call, which the model makes, with the statistics that the caller asks for."""

    asked: dict[str, Any] | None = None  # keywords of `LogprobHead.forward`, of the call that is expected

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.answers: list[LinearLogprob | LinearLogprobLoss] = []

    def __call__(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        result = super().__call__(hidden, *args, **options)  # with all hooks: those of FSDP2 need what leaves here
        if self.asked is None:
            return result
        self.answers.append(result)
        return hidden.new_zeros(*hidden.shape[:-1], 1)  # of which the model makes logits that nobody sees

    def forward(self, hidden: Tensor, target: Tensor | None = None, **options: Any) -> Any:
        # Not through the call's keywords, whose float32 tensors FSDP2 would cast to its param_dtype.
        return (
            super().forward(hidden, target, **options) if self.asked is None else super().forward(hidden, **self.asked)
        )

    def ask(self, name: str, forward: Callable[[], Any], **asked: Any) -> LinearLogprob | LinearLogprobLoss:
        """What the head answers when the model's ``forward`` calls it."""
        self.asked, self.answers = asked, []
        try:
            outputs = forward()
            answers = self.answers
        finally:
            self.asked, self.answers = None, []
        if len(answers) != 1:
            raise ValueError(f"{name} called its head {len(answers)} times, expected once: it cannot be patched")
        if getattr(outputs, "aux_loss", None) is not None:
            raise ValueError(f"the auxiliary loss of {name}'s router would be lost: pass output_router_logits=False")
        return answers[0]


@functools.cache
def _patched_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of the same name. Not an attribute of the instance, which would make a deep copy call the original."""

    def forward(
        self,
        *args: Any,
        logprob_targets: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        return_entropy: bool = False,
        return_sum_prob_squared: bool = False,
        return_top1: bool = False,
        loss_fn: LossFunction | None = None,
        per_token: tuple[Tensor, ...] = (),
        **inputs: Any,
    ) -> Any | LinearLogprob | LinearLogprobLoss:
        options = {
            "temperature": temperature, "return_entropy": return_entropy, "loss_fn": loss_fn, "per_token": per_token,
            "return_sum_prob_squared": return_sum_prob_squared, "return_top1": return_top1,
        }  # fmt: skip
        if logprob_targets is None:
            if loss_fn is not None:
                raise ValueError("loss_fn needs logprob_targets, the tokens whose log-probabilities it is a loss of")
            return model_class.forward(self, *args, **inputs, **{name: options[name] for name in shared & set(options)})
        _check_keywords(model_class, inputs, inputs.keys() if takes_any else known)
        head = self.get_output_embeddings()
        if not isinstance(head, _PatchedHead):
            raise ValueError(
                f"the lm_head of {model_class.__name__} was replaced by a {type(head).__name__} after patch_lm_head: "
                "call patch_lm_head(model) again"
            )
        own_forward = functools.partial(model_class.forward, self, *args, **inputs)
        return head.ask(model_class.__name__, own_forward, target=logprob_targets, **options)

    def call(self, *args: Any, **inputs: Any) -> Any:
        result = PreTrainedModel.__call__(self, *args, **inputs)
        if isinstance(result, LinearLogprob | LinearLogprobLoss) and result.logprob.dtype != torch.float32:
            warnings.warn(
                f"log-probabilities of {model_class.__name__} were rounded to {result.logprob.dtype} by FSDP2, so that "
                "ratios of an unchanged policy are not 1: use MixedPrecisionPolicy(output_dtype=torch.float32)",
                stacklevel=2,
            )
        return result

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> nn.Module:
        if new_num_tokens is not None:
            raise ValueError(
                f"the head of {model_class.__name__} is patched and cannot be resized: call unpatch_lm_head(model), "
                "resize, and patch again"
            )
        return model_class.resize_token_embeddings(self, None, *args, **options)

    def reduce_ex(self, protocol: Any) -> Any:
        reduced = model_class.__reduce_ex__(self, protocol)
        if type(self) is not _patched_class(model_class):  # but one that FSDP2 or others made of it: theirs to do
            return reduced
        return _empty_patched, (model_class,), *reduced[2:]

    # generate() and transformers' Trainer read from the signature which keywords the model takes.
    own, new = (inspect.signature(function).parameters for function in (model_class.forward, forward))
    added = {name: parameter for name, parameter in new.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    shared = own.keys() & added.keys()  # verl's forwards of models with images have a temperature of their own
    forwards = [vars(each)["forward"] for each in model_class.__mro__ if "forward" in vars(each)]
    known = {name for each in forwards for name in inspect.signature(each).parameters}
    # What a forward of somebody else makes of its **kwargs cannot be known: verl replaces forwards.
    takes_any = any(not each.__module__.startswith("transformers.") and _has_kwargs(each) for each in forwards)
    known |= {*TransformersKwargs.__annotations__, "return_dict"}  # a decorator of the forwards takes return_dict
    signature = inspect.Signature(sorted((own | added).values(), key=lambda parameter: parameter.kind))
    names = {
        "forward": forward, "__call__": call, "resize_token_embeddings": resize_token_embeddings,
        "__reduce_ex__": reduce_ex, "__doc__": model_class.__doc__,
    }  # fmt: skip
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(model_class.__name__, (model_class,), names | {"__module__": model_class.__module__})


def _has_kwargs(function: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _check_keywords(model_class: type[PreTrainedModel], inputs: dict[str, Any], known: Collection[str]) -> None:
    """Refuses what the model's forward would swallow by its ``**kwargs``."""
    if inputs.get("labels") is not None:
        raise ValueError("got labels and logprob_targets: leave out one of them; a loss is computed by loss_fn")
    for name in inputs.keys() - set(known):
        close = difflib.get_close_matches(name, [*known, *_KEYWORDS], n=1)
        raise ValueError(
            f"{model_class.__name__} has no keyword {name}{f' (did you mean {close[0]}?)' if close else ''}: beside "
            f"logprob_targets it takes its own and {', '.join(_KEYWORDS)}"
        )


def _empty_patched(model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """What unpickling fills: the patched class itself has the name of its original, and cannot be found by it."""
    patched = _patched_class(model_class)
    return patched.__new__(patched)
