"""Loads models from local Hugging Face folders. Only safetensors are read. Nothing is unpickled, no hub is asked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rlft_fast.errors import brief, without_panics
from rlft_fast.files import read_text
from rlft_fast.models.adapters import initialize_lora
from rlft_fast.models.architectures import own_implementation, require_causal
from rlft_fast.models.heads import PolicyModel, RewardModel, RLModel, ValueModel
from rlft_fast.models.images import FAMILIES, ImageFamily
from rlft_fast.models.value_head import stored_head
from rlft_fast.models.weights import (
    build_on_meta,
    check_weights,
    load_weights,
    mark_quantized,
    materialize,
    stored_dtype,
    take_quantization,
)
from rlft_fast.tokenizer_files import check_tokenizer_files

_SIZE = re.compile(
    r"(?P<layers>(num|n)_(hidden_)?layers?|depth)|"
    r"(hidden|vocab|intermediate)_size|n_embd|d_model|(num|n)_(attention_|key_value_)?heads?|head_dim"
)
_MOST_LAYERS = 1000  # a thousand layers are built in seconds; the deepest language models have some 130
_LARGEST_SIZE = 1 << 24
_PARTS = ("truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")


def build_policy(path: str | Path, dtype: torch.dtype = torch.float32, workspace_mib: int | None = None) -> PolicyModel:
    """A causal language model with a ``LogprobHead``. Its parameters have no memory yet.

    A vision-language model without packed images learns from text alone: its tower is frozen.

    The model is in eval mode and is trained in eval mode. With dropout, the policy of an update would differ from the
    policy that sampled, and their ratio would not be 1.

    Raises:
        ValueError: the folder is missing or unreadable, or its model is no causal language model with an lm_head.
    """
    config = _read_config(path)
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
    return ValueModel(_build(AutoModel, _read_config(path), path, dtype))


def build_reward_model(path: str | Path, dtype: torch.dtype = torch.float32) -> RewardModel:
    """A sequence classification model with one label, in eval mode. Its parameters have no memory yet.

    Raises:
        ValueError: the folder is missing or unreadable, or its model is no classifier with one label.
    """
    config = _read_config(path)
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


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, after it has tokenized a text.

    Raises:
        ValueError: the folder is missing or holds no tokenizer that can be used.
    """
    _require_folder(path)
    try:
        check_tokenizer_files(path)
    except ValueError as error:
        raise ValueError(f"cannot load a tokenizer from {path}: {error}") from error
    try:
        with without_panics():
            loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            tokenizer = cast(PreTrainedTokenizerBase, loaded)
    except Exception as error:  # a damaged file may raise any error
        where = _damaged_part(Path(path) / "tokenizer.json")
        raise ValueError(f"cannot load a tokenizer from {path}: {where}{brief(error)}") from error
    try:
        with without_panics():
            tokenizer.decode(tokenizer.encode("a"))
    except Exception as error:  # tokenizers has no error of its own
        raise ValueError(
            f"the tokenizer in {path} cannot tokenize 'a' ({brief(error)}): correct its tokenizer.json"
        ) from error
    return tokenizer


def _damaged_part(file: Path) -> str:
    """The file and the key without which tokenizers reads the file; "" if there is no such key."""
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return ""
    found = [name for name in _PARTS if isinstance(content, dict) and content.get(name)]
    if not found or _is_readable(content):
        return ""
    key = next((name for name in found if _is_readable(content | {name: [] if name == "added_tokens" else None})), None)
    return f"{file.name}{(key and f', {key}') or ''}: "


def _is_readable(content: dict[str, Any]) -> bool:
    try:
        with without_panics():
            Tokenizer.from_str(json.dumps(content))
    except Exception:  # tokenizers has no error of its own
        return False
    return True


def folder_dtype(path: str | Path) -> torch.dtype:
    """The dtype in which transformers loads a model folder: config.json names it, or else the first weight has it.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    config = _read_config(path)
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
    return model


def hidden_size(path: str | Path) -> int:
    """The width of the hidden states of the model in a folder. Raises ValueError for a folder that cannot be used."""
    return getattr(_read_config(path).get_text_config(), "hidden_size", 0)


def image_family(path: str | Path) -> tuple[ImageFamily, PreTrainedConfig] | None:
    """The family and the configuration of the model in a folder; None: it takes no images.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    config = _read_config(path)
    return (FAMILIES[config.model_type], config) if config.model_type in FAMILIES else None


def _read_config(path: str | Path):
    _require_folder(path)
    _refuse_adapter(path)
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} is not a model folder: it has no config.json")
    try:
        if (mistake := next(_mistaken_sizes(json.loads(read_text(Path(path) / "config.json"))), None)) is not None:
            raise ValueError(mistake)
        # With None, transformers would ask on the terminal whether to run Python files of the folder.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        names = config.architectures
        if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
            raise ValueError(f"architectures is {names!r}, expected a list of names")
        if False in (config.return_dict, config.get_text_config().return_dict):
            raise ValueError("return_dict is false, and models of transformers 5 fail at the tuples of their parts")
        return config
    except Exception as error:  # a wrong value may raise any error
        raise ValueError(
            f"{path} is not a model folder: transformers {transformers.__version__} cannot use its config.json "
            f"({' '.join(str(error).split())}): correct it, or give another folder"
        ) from error


def _mistaken_sizes(config: Any) -> Iterator[str]:
    """Sizes with which building a model takes minutes, or ends in an error that does not name them."""
    for key, value in config.items() if isinstance(config, dict) else ():
        yield from _mistaken_sizes(value)
        if type(value) is int and (match := _SIZE.fullmatch(key)):
            most = _MOST_LAYERS if match["layers"] else _LARGEST_SIZE
            if not 1 <= value <= most:
                yield f"{key} is {value}, expected 1 to {most}"


def _refuse_adapter(path: str | Path) -> None:
    """Refuses a folder that transformers loads as a base model with an adapter of PEFT."""
    if (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} holds an adapter of PEFT (adapter_config.json), and an adapter is no model. If base weights lie "
            "beside it, move adapter_config.json and adapter_model.safetensors to a folder of their own. To go on with "
            "the adapter, name its folder in actor.init_from, beside actor.lora. Or give a folder with merged weights: "
            "PeftModel.from_pretrained("
            "AutoModelForCausalLM.from_pretrained(BASE), ADAPTER).merge_and_unload().save_pretrained(MERGED)"
        )


def _require_folder(path: str | Path) -> None:
    if not Path(path).is_dir():
        raise ValueError(
            f"model folder {path} does not exist: give a local folder with config.json and safetensors files "
            "(a model of the Hugging Face Hub is downloaded by: hf download NAME)"
        )
