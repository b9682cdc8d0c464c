"""Log-probabilities from any transformers causal language model, inside any trainer.

The patched model runs its own forward, and the head gets the targets beforehand. When the model calls its head, the
head computes statistics as the result of a module call with all hooks, and keeps them for the caller. The model gets a
column of zeros in place of logits.

The model must call its head once per forward, because FSDP2 expects one call of every module of a unit. At a second
call, or in its backward, the unit's weights may be resharded already.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.utils import TransformersKwargs

from rlft_fast.models.heads import LogprobHead
from rlft_fast.models.probe import probe
from rlft_fast.ops import LinearLogprob, LinearLogprobLoss
from rlft_fast.ops.logprob import LossFunction

_KEYWORDS = (
    "temperature", "return_entropy", "return_sum_prob_squared", "return_top1", "return_mean_logits", "loss_fn",
    "per_token",
)  # fmt: skip
_FLOATS = ("temperature", "per_token")
_NARROW = (torch.bfloat16, torch.float16)
_MAX_UNASKED = 8  # forwards in training; a trainer may begin with a few that want logits

_LIGER = "apply Liger with fused_linear_cross_entropy=False"


@dataclass
class LogprobOutput(ModelOutput):
    """What a patched model returns if it gets targets; B sequences of L positions.

    As of every output of transformers, the keys are the fields that are not None. A position with target -100 has 0, or
    False.

    Attributes:
        loss: () float32, the sum over all positions of ``loss_fn``; None without ``loss_fn``.
        logprob: (B, L) float32 log-probability of the target, with a gradient unless there is a loss.
        entropy: (B, L) float32 [nats], with a gradient unless there is a loss; with ``return_entropy``.
        sum_prob_squared: (B, L) float32, without a gradient; with ``return_sum_prob_squared``.
        top1: (B, L) bool, whether no token is more probable than the target; with ``return_top1``.
        mean_logits: (B, L) float32, without a gradient; with ``return_mean_logits``.
    """

    loss: Tensor | None = None
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    sum_prob_squared: Tensor | None = None
    top1: Tensor | None = None
    mean_logits: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # FSDP2 makes a new output of those that it rounds, also behind the forward of a wrapper.
        if self.logprob is not None and self.logprob.dtype in _NARROW:
            warnings.warn(
                f"log-probabilities of a patched model were rounded to {self.logprob.dtype} by FSDP2. The ratios of an "
                "unchanged policy are then not 1: use MixedPrecisionPolicy(output_dtype=torch.float32)",
                stacklevel=1,  # told once, wherever it is rounded
            )


def patch_lm_head(model: PreTrainedModel, *, workspace_mib: int | None = None) -> PreTrainedModel:
    """Changes a causal language model in place, such that it returns log-probabilities if it gets targets.

    ``model(input_ids=..., attention_mask=..., logprob_targets=...)`` then returns a :class:`LogprobOutput` and never
    holds the logits. A call without targets works as before. The model keeps its own keywords and gets these:

        logprob_targets: (B, L) int64, the token to score at each position: ``input_ids`` shifted one to the left. A
            position with -100 is not scored: it gives 0, and its head costs nothing. With ``logits_to_keep=K`` the
            shape is (B, K).
        temperature: sampling temperature, one number or a tensor in the shape of ``logprob_targets``.
        return_entropy: also return the entropy of each position.
        return_sum_prob_squared, return_top1, return_mean_logits: also return the sum of squared probabilities, whether
            the target is the most likely token, and the mean of the logits over the vocabulary, see
            :func:`rlft_fast.ops.linear_logprob`. None of them goes with ``loss_fn``.
        loss_fn, per_token: a per-token loss, and a tuple of the tensors that it reads, in the shape of
            ``logprob_targets``, see :func:`rlft_fast.ops.linear_logprob_loss`. The output then has the loss.

    A call with targets makes no key-value cache unless ``use_cache=True`` asks for it, so that a packed row with
    ``position_ids`` and without ``attention_mask`` keeps its sequences apart.

    The model keeps its soft-capping, logit scale and bias. One run of its forward on two tokens, without its layers,
    finds them. Parameters, their names, ties and ``generate`` do not change. A model that only returns logits in its
    first forwards of training warns once, because its trainer does not call the head by targets.

    Resize the vocabulary before the patch. Wrap the model (PEFT, accelerate, DDP, ``fully_shard``, ``torch.compile``)
    after the patch. :func:`unpatch_lm_head` undoes the patch.

    Args:
        model: causal language model with a linear head, on any device.
        workspace_mib: the most memory that logits take at any time [MiB], see :func:`rlft_fast.ops.linear_logprob` and,
            for losses, :func:`rlft_fast.ops.linear_logprob_loss`.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: ``model`` is an encoder-decoder, is patched or wrapped already, returns tuples, or changes its
            logits in another way. Or it has no head, or its head is not plainly linear (an adapter, a quantized or a
            sharded head). Or Liger has replaced its forward by its own loss.
    """
    head = _plain_head(model)
    weight = cast(nn.Parameter, head.weight)
    around = probe(model, weight.device, weight.dtype)
    model.set_output_embeddings(_PatchedHead(weight, head.bias, around.softcap, around.logit_scale, workspace_mib))
    if not _is_patched(type(model)):  # it is patched already if only its head was replaced
        model.__class__ = _patched_class(type(model))
    return model


def unpatch_lm_head(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`patch_lm_head` in place. The head is again a ``torch.nn.Linear`` with the same parameters.

    Args:
        model: a patched model that has not been wrapped or sharded since the patch.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched, or was wrapped or sharded after the patch.
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


def added_keywords(model: PreTrainedModel) -> set[str]:
    """The keywords that the forward of a patched model has from the patch alone."""
    for model_class in type(model).__mro__:
        if _is_patched(model_class):
            own, new = (inspect.signature(x.forward).parameters for x in (model_class.__bases__[0], model_class))
            return {*new} - {*own}
    return set()


def _is_patched(model_class: type) -> bool:
    bases = model_class.__bases__
    return len(bases) == 1 and issubclass(bases[0], PreTrainedModel) and model_class is _patched_class(bases[0])


def _plain_head(model: PreTrainedModel) -> nn.Linear:
    """Returns the model's head. Raises an error if the head cannot be replaced."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a transformers PreTrainedModel, got {name}: patch the model before wrapping it")
    if model.config.return_dict is False:
        raise ValueError(
            f"{name} returns tuples (return_dict is false in its configuration), and models of transformers 5 fail at "
            "them: set model.config.return_dict = True"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: patch_lm_head takes causal language models only")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} has no lm_head: load a causal language model (...ForCausalLM)")
    if isinstance(head, LogprobHead):
        raise ValueError(f"{name} is patched already: call patch_lm_head once")
    _refuse_adapter(head, name)
    _refuse_zero3(head.weight, name)
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        raise ValueError(
            f"the head of {name} is a {type(head).__module__}.{type(head).__name__} with a "
            f"{type(head.weight).__name__} weight, expected a torch.nn.Linear with a plain parameter: {_advice(head)}"
        )
    if _is_ligers(model.forward) and "forward" in vars(model):
        raise ValueError(
            f"the forward of {name} is {_full_name(model.forward)}, which computes a loss in place of logits: {_LIGER}"
        )
    if "forward" in vars(model) or "forward" in vars(head):
        raise ValueError(
            f"the forward of {name} was replaced already: patch the model before accelerate or another tool wraps it"
        )
    return head


def _refuse_adapter(head: nn.Module, name: str) -> None:
    """Refuses what PEFT puts in place of a head. Only `modules_to_save` calls the head that the patch has made."""
    kind = f"{type(head).__module__}.{type(head).__name__}"
    if isinstance(getattr(head, "modules_to_save", None), nn.ModuleDict):
        raise ValueError(
            f"the head of {name} is a {kind}, whose copies of the head are not patched: call patch_lm_head before "
            "get_peft_model, and leave ensure_weight_tying out"
        )
    if hasattr(head, "base_layer") or hasattr(head, "token_adapter"):
        raise ValueError(
            f"the head of {name} has an adapter ({kind}), which computes logits in its own way: leave the head out of "
            "target_modules, target_parameters and trainable_token_indices (the embedding too, if it is tied to the "
            "head), or do not patch the model"
        )


def _advice(head: nn.Module) -> str:
    """What to do about a head that is not plainly linear."""
    if isinstance(head.weight, DTensor):
        return "patch the model before it is sharded"
    if hasattr(head, "parametrizations"):
        return "call torch.nn.utils.parametrize.remove_parametrizations for it before the patch"
    if type(head.weight) is nn.Parameter and head.weight.is_floating_point():
        return "a head of this kind cannot be patched"
    return "load the model with a head that is not quantized (for bitsandbytes: llm_int8_skip_modules=['lm_head'])"


def _refuse_zero3(weight: Any, name: str) -> None:
    if hasattr(weight, "ds_id"):  # DeepSpeed's mark; the shape of the parameter itself is (0,)
        raise ValueError(
            f"the head of {name} is sharded by DeepSpeed's ZeRO-3 (its weight has shape {tuple(weight.shape)}), "
            "expected the whole weight or an FSDP2 unit: use ZeRO stage 0 to 2, or FSDP2"
        )


def _is_ligers(forward: Any) -> bool:
    return (getattr(forward, "__module__", None) or "").startswith("liger_kernel.")


def _full_name(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


class _PatchedHead(LogprobHead, nn.Linear):  # type: ignore[inconsistent-inheritance]
    """A head that is asked for statistics by a caller, and computes them when the model calls the head.

    To other libraries it is the linear layer that it replaces: PEFT, for example, takes linear layers alone.
    """

    asked: dict[str, Any] | None = None  # keywords of `LogprobHead.forward` for the expected call
    num_unasked: int | None = 0  # forwards in training without targets; None: nothing is left to tell

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.out_features, self.in_features = self.weight.shape
        self.answers: list[LinearLogprob | LinearLogprobLoss] = []

    def __call__(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        result = super().__call__(hidden, *args, **options)  # FSDP2's hooks need the real result
        if self.asked is None:
            return result
        self.answers.append(result)
        return hidden.new_zeros(*hidden.shape[:-1], 1)  # the model makes logits of them, which nobody reads

    def forward(self, hidden: Tensor, target: Tensor | None = None, **options: Any) -> Any:  # type: ignore[bad-override]
        if self.asked is None:
            return super().forward(hidden, target, **options)
        # The targets are no keywords of the call, because FSDP2 would cast float32 tensors among them to its
        # param_dtype. The head may be on another device than the model's inputs (`device_map`).
        return super().forward(hidden, **{name: _moved(x, hidden.device) for name, x in self.asked.items()})


def _moved(values: Any, device: torch.device) -> Any:
    if isinstance(values, (list, tuple)):
        return tuple(_moved(x, device) for x in values)
    return values.to(device) if isinstance(values, Tensor) else values


class _Unrounded:
    """Values in which FSDP2 finds no tensors. It rounds those that it finds to the param_dtype of a sharded model."""

    def __init__(self, values: Any) -> None:
        self.values = values


def _warn_of_rounded(model: PreTrainedModel, temperature: Any, per_token: Any) -> None:
    """Warns of narrow values: FSDP2 rounds those that a wrapper around the model gets, such as PEFT's.

    The model cannot tell whether a wrapper is sharded: no module of the model is, where the wrapper is the only unit.
    """
    values = [temperature, *(per_token if isinstance(per_token, (list, tuple)) else ())]
    narrow = [x.dtype for x in values if isinstance(x, Tensor) and x.dtype in _NARROW]
    if narrow and not torch.compiler.is_compiling():  # a warning would break the graph
        warnings.warn(
            f"temperature or per_token of {type(model).__name__} came in {narrow[0]}, which has three digits of an old "
            "log-probability: pass float32. FSDP2 rounds what a wrapper around the model gets, unless it has "
            "MixedPrecisionPolicy(cast_forward_inputs=False)",
            stacklevel=2,
        )


def _patched_heads(head: nn.Module, name: str) -> list[_PatchedHead]:
    """The heads of which a forward calls one: the model's head, or the copies of it in PEFT's `modules_to_save`."""
    copies = getattr(head, "modules_to_save", None)
    modules = [head.original_module, *copies.values()] if isinstance(copies, nn.ModuleDict) else [head]
    heads = [module for module in modules if isinstance(module, _PatchedHead)]
    if len(heads) < len(modules):
        _refuse_adapter(head, name)
        raise ValueError(
            f"the lm_head of {name} was replaced by a {type(head).__name__} after patch_lm_head: call "
            "patch_lm_head(model) again"
        )
    return heads


def _ask(heads: list[_PatchedHead], name: str, forward: Callable[[], Any], **asked: Any) -> LogprobOutput:
    """Runs the model's ``forward`` and returns the statistics that a head computed in it."""
    answers: list[LinearLogprob | LinearLogprobLoss] = []
    for head in heads:
        _refuse_zero3(head.weight, name)
        head.asked, head.answers, head.num_unasked = asked, answers, None
    try:
        outputs = forward()
    finally:
        for head in heads:
            head.asked, head.answers = None, []
    if len(answers) != 1:
        raise ValueError(f"{name} called its head {len(answers)} times, expected once: it cannot be patched")
    if getattr(outputs, "aux_loss", None) is not None:
        raise ValueError(f"the auxiliary loss of {name}'s router would be lost: pass output_router_logits=False")
    return LogprobOutput(**{key: x for key, x in answers[0]._asdict().items() if x is not None})


def _count_unasked(head: nn.Module | None, name: str) -> None:
    """Warns once if the trainer never asks the head."""
    if not isinstance(head, _PatchedHead) or head.num_unasked is None:
        return
    head.num_unasked += 1
    if head.num_unasked == _MAX_UNASKED:
        head.num_unasked = None
        warnings.warn(
            f"{name} is patched, but its first {_MAX_UNASKED} forwards in training returned logits, at the price of an "
            "unpatched model: call model(..., logprob_targets=targets), or use a trainer of rlft_fast.integrations",
            stacklevel=2,
        )


@functools.cache
def _patched_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of the same name, whose forward takes targets.

    An attribute of the instance would not do: the forward of a deep copy would still run the original model.
    """

    def forward(
        self,
        *args: Any,
        logprob_targets: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        return_entropy: bool = False,
        return_sum_prob_squared: bool = False,
        return_top1: bool = False,
        return_mean_logits: bool = False,
        loss_fn: LossFunction | None = None,
        per_token: tuple[Tensor, ...] = (),
        **inputs: Any,
    ) -> Any | LogprobOutput:
        if logprob_targets is not None:
            values: Any = (temperature, per_token)
            temperature, per_token = (x.values if isinstance(x, _Unrounded) else x for x in values)
            _warn_of_rounded(self, temperature, per_token)
        options = {
            "temperature": temperature, "return_entropy": return_entropy, "loss_fn": loss_fn, "per_token": per_token,
            "return_sum_prob_squared": return_sum_prob_squared, "return_top1": return_top1,
            "return_mean_logits": return_mean_logits,
        }  # fmt: skip
        if logprob_targets is None:
            if loss_fn is not None:
                raise ValueError("loss_fn needs logprob_targets: pass the tokens whose log-probabilities it reads")
            # Not in a compiled forward, which another count would compile again.
            if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                _count_unasked(self.get_output_embeddings(), model_class.__name__)
            return model_class.forward(self, *args, **inputs, **{name: options[name] for name in shared & set(options)})
        if renames_cache and "past_key_values" in inputs and "cache" not in inputs:
            inputs["cache"] = inputs.pop("past_key_values")
        _check_keywords(model_class, inputs, inputs.keys() if takes_any else known)
        heads = _patched_heads(self.get_output_embeddings(), model_class.__name__)
        if takes_cache:  # nobody gets it, and with a cache transformers lets packed sequences attend to each other
            inputs.setdefault("use_cache", False)
        if "return_dict" in inputs:  # of a tuple, the auxiliary loss would not be found
            inputs["return_dict"] = True
        own_forward = functools.partial(model_class.forward, self, *args, **inputs)
        return _ask(heads, model_class.__name__, own_forward, target=logprob_targets, **options)

    def call(self, *args: Any, **inputs: Any) -> Any:
        if inputs.get("logprob_targets") is not None:
            inputs |= {name: _Unrounded(inputs[name]) for name in _FLOATS if name in inputs}
        result = PreTrainedModel.__call__(self, *args, **inputs)
        if inputs.get("logprob_targets") is not None and not isinstance(result, LogprobOutput):
            raise ValueError(
                f"{_full_name(self.forward)} replaced the forward of {model_class.__name__} after patch_lm_head, and "
                f"returned a {type(result).__name__} for logprob_targets, expected log-probabilities: "
                + (_LIGER if _is_ligers(self.forward) else "leave the replacement out")
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
        if type(self) is not _patched_class(model_class):  # a wrapper's subclass, as of FSDP2
            return reduced
        return _empty_patched, (model_class,), *reduced[2:]

    # generate() and transformers' Trainer read from the signature which keywords the model takes.
    own, new = (inspect.signature(function).parameters for function in (model_class.forward, forward))
    added = {name: parameter for name, parameter in new.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    shared = own.keys() & added.keys()  # verl's vision-language forwards also take a temperature
    forwards = [vars(each)["forward"] for each in model_class.__mro__ if "forward" in vars(each)]
    known = {name for each in forwards for name in inspect.signature(each).parameters}
    # verl, for example, replaces forwards. A forward from outside of transformers may read any keyword from **kwargs.
    takes_any = any(not each.__module__.startswith("transformers.") and _has_kwargs(each) for each in forwards)
    takes_cache = "use_cache" in known
    renames_cache = "cache" in known and "past_key_values" not in known  # transformers 5.24; PEFT keeps the old name
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
    """Refuses keywords that the model's forward would take by ``**kwargs`` and ignore."""
    if inputs.get("labels") is not None:
        raise ValueError("got labels and logprob_targets: leave one of them out, and pass a loss as loss_fn")
    for name in inputs.keys() - set(known):
        close = difflib.get_close_matches(name, [*known, *_KEYWORDS], n=1)
        raise ValueError(
            f"{model_class.__name__} has no keyword {name}{f' (did you mean {close[0]}?)' if close else ''}: beside "
            f"logprob_targets it takes its own keywords and {', '.join(_KEYWORDS)}"
        )


def _empty_patched(model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """An empty patched model, which unpickling fills. Pickle finds only the original class under the class's name."""
    patched = _patched_class(model_class)
    return patched.__new__(patched)
