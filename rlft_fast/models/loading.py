"""Loads models from local Hugging Face folders. Only safetensors are read. Nothing is unpickled, no hub is asked."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rlft_fast.models.adapters import initialize_lora
from rlft_fast.models.architectures import layer_configs, own_implementation, require_causal
from rlft_fast.models.folders import read_config
from rlft_fast.models.heads import PolicyModel, RewardModel, RLModel, ValueModel
from rlft_fast.models.value_head import stored_head
from rlft_fast.models.weights import (
    build_on_meta,
    check_weights,
    keeps_float32,
    load_weights,
    mark_quantized,
    materialize,
    stored_dtype,
    take_quantization,
)

# Settings with which the same weights, of the same shapes, compute something else.
_COMPUTED = ("model_type", "hidden_act", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")


def build_policy(path: str | Path, dtype: torch.dtype = torch.float32, workspace_mib: int | None = None) -> PolicyModel:
    """A causal language model with a ``LogprobHead``. Its parameters have no memory yet.

    A vision-language model without packed images learns from text alone: its tower is frozen.

    The model is in eval mode and is trained in eval mode. With dropout, the policy of an update would differ from the
    policy that sampled, and their ratio would not be 1.

    Raises:
        ValueError: the folder is missing or unreadable, or its model is no causal language model with an lm_head.
    """
    config = read_config(path)
    architectures = config.architectures or []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        auto_class: Any = AutoModelForCausalLM
    elif config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not config.is_encoder_decoder:
        auto_class = AutoModelForImageTextToText
    else:
        raise ValueError(
            f"the model in {path} is {', '.join(architectures) or 'of unknown architecture'}{_why_no_policy(config)}: "
            "a policy must be a causal language model (...ForCausalLM) or a vision-language model"
        )
    return PolicyModel(_build(auto_class, config, path, dtype), workspace_mib)


def build_critic(path: str | Path, dtype: torch.dtype = torch.float32) -> ValueModel:
    """The backbone of any text model with a value head, in eval mode. Its parameters have no memory yet.

    `load` reads the head from the folder of a reward model or of an exported critic. For other folders the head is new.

    Raises:
        ValueError: the folder is missing or unreadable, or the model is not causal.
    """
    return ValueModel(_build(AutoModel, read_config(path), path, dtype))


def build_reward_model(path: str | Path, dtype: torch.dtype = torch.float32) -> RewardModel:
    """A sequence classification model with one label, in eval mode. Its parameters have no memory yet.

    Raises:
        ValueError: the folder is missing or unreadable, or its model is no classifier with one label.
    """
    config = read_config(path)
    architectures = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures) or config.num_labels != 1:
        raise ValueError(
            f"the model in {path} is {', '.join(architectures) or 'of unknown architecture'} with {config.num_labels} "
            "labels: a reward model must be ...ForSequenceClassification with num_labels = 1"
        )
    return RewardModel(_build(AutoModelForSequenceClassification, config, path, dtype))


def load(
    path: str | Path, model: RLModel, device: torch.device | str = "cpu", buffer_device: torch.device | None = None
) -> None:
    """Gives a built model memory on a device and loads the weights of a folder. A rank holds only its own shards.

    Args:
        path: the folder.
        model: a model from one of the functions above.
        device: device of the weights.
        buffer_device: device of the buffers; None: the same device. FSDP copies offloaded weights to the device that
            computes, but not buffers.

    Raises:
        ValueError: weights are damaged, are missing, or have other shapes; or the model has no place for some weights.
    """
    materialize(model, torch.device(device), buffer_device)
    if isinstance(model, ValueModel):
        model.initialize_head()
    load_weights(path, model.pretrained, beside=stored_head(path, model))
    initialize_lora(model)


def check_loadable(path: str | Path, model: RLModel) -> None:
    """Checks that `load` finds all weights of a built model in a folder. Reads their names, shapes and dtypes alone.

    Raises:
        ValueError: as in `load`.
    """
    check_weights(path, model.pretrained, beside=stored_head(path, model))


def require_same_computation(path: str | Path, model: PreTrainedModel) -> None:
    """Refuses a folder whose model would compute something else with its weights than the model that is to get them.

    Raises:
        ValueError: it is of another type, or has other heads, activations or numbers of experts.
    """
    own, other = (_computed(config) for config in (model.config, read_config(path)))
    if different := [key for key in _COMPUTED if own[key] != other[key]]:
        shown = ", ".join(f"{key} {_short(other[key])} instead of {_short(own[key])}" for key in different)
        raise ValueError(
            f"the weights in {path} are of another model, whose config.json has {shown}: give weights of "
            f"{type(model).__name__} with these settings, or that folder as the model"
        )


def _computed(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The values of each setting in the layers of a text model."""
    layers = layer_configs(config.get_text_config())
    return {key: [getattr(layer, key, None) for layer in layers] for key in _COMPUTED}


def _short(values: list[Any]) -> str:
    return repr(values[0]) if values.count(values[0]) == len(values) else repr(values)


def load_policy(path: str | Path, workspace_mib: int | None = None) -> PolicyModel:
    """`build_policy` and `load`: a whole policy in float32 on the CPU, for scripts. `FSDPEngine` calls both itself."""
    model = build_policy(path, workspace_mib=workspace_mib)
    load(path, model)
    return model


def load_critic(path: str | Path) -> ValueModel:
    """`build_critic` and `load`: a whole critic in float32 on the CPU, for scripts that read an exported critic."""
    model = build_critic(path)
    load(path, model)
    return model


def folder_dtype(path: str | Path) -> torch.dtype:
    """The dtype in which transformers loads a model folder: config.json names it, or else the first weight has it.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    config = read_config(path)
    named = [x for x in (config.dtype, config.get_text_config().dtype) if isinstance(x, torch.dtype)]
    return named[0] if named else stored_dtype(Path(path))


def _why_no_policy(config: PreTrainedConfig) -> str:
    return ", an encoder-decoder" if config.is_encoder_decoder else " and has no lm_head"


def _build(auto_class: Any, config: PreTrainedConfig, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    if type(config) not in auto_class._model_mapping:
        raise ValueError(
            f"transformers {transformers.__version__} has no {auto_class.__name__.removeprefix('Auto')} of type "
            f"{config.model_type}, the type of the model in {path}: choose another model"
        )
    quantizer = take_quantization(config, path)
    _ask_for_no_more(config)
    options = {"dtype": dtype, "attn_implementation": own_implementation(config)}
    try:
        model = build_on_meta(lambda: auto_class.from_config(config, **options))
        if model.can_generate() and (Path(path) / "generation_config.json").is_file():
            # The file may name end tokens that config.json does not name.
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # with a wrong configuration the model's code may raise any error
        raise ValueError(f"cannot build the model in {path}: {type(error).__name__}: {error}") from error
    require_causal(model)
    mark_quantized(model, quantizer)
    _make_frozen_biases_buffers(model)
    for parameter in model.parameters():  # a class may make some in float32, whatever dtype is asked for
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if keeps_float32(model, name):  # transformers does so where it loads weights, and not where it builds a model
            buffer.data = buffer.float()
    return model


def _make_frozen_biases_buffers(model: PreTrainedModel) -> None:
    """Turns frozen parameters that transformers keeps in float32 into buffers, in place.

    They are the biases of Ernie 4.5's routers, which other models have as buffers. Mixed precision casts parameters
    alone, and rounded biases choose other experts.
    """
    for place, module in model.named_modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if not parameter.requires_grad and keeps_float32(model, f"{place}.{name}"):
                delattr(module, name)
                module.register_buffer(name, torch.zeros(parameter.shape))


def _ask_for_no_more(config: PreTrainedConfig) -> None:
    """Has a model return what is read here alone, whatever its config.json asks for beside it.

    A model that was trained with an auxiliary loss asks for the logits of its routers. In generation, transformers
    would then compute the loss of new tokens with the mask of all, and fail. States of layers would be kept for nobody.
    """
    for each in (config, config.get_text_config()):
        for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
            if getattr(each, name, False):
                setattr(each, name, False)
