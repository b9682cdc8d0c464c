"""Model folders of transformers, without their weights: tokenizers and configurations.

The code of models, which takes seconds to import, is not imported.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from rlft_fast.errors import brief, without_panics
from rlft_fast.files import read_text
from rlft_fast.models.images import FAMILIES, ImageFamily
from rlft_fast.tokenizer_files import check_tokenizer_files

_SIZE = re.compile(
    r"(?P<layers>(num|n)_(hidden_)?layers?|depth)|"
    r"(hidden|vocab|intermediate)_size|n_embd|d_model|(num|n)_(attention_|key_value_)?heads?|head_dim"
)
_MOST_LAYERS = 1000  # a thousand layers are built in seconds; the deepest language models have some 130
_LARGEST_SIZE = 1 << 24
_PARTS = ("truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, after it has tokenized a text.

    Raises:
        ValueError: the folder is missing or holds no tokenizer that can be used.
    """
    require_folder(path)
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


def hidden_size(path: str | Path) -> int:
    """The width of the hidden states of the model in a folder. Raises ValueError for a folder that cannot be used."""
    return getattr(read_config(path).get_text_config(), "hidden_size", 0)


def padding_id(path: str | Path) -> int | None:
    """The token of padding. Classifiers of transformers judge a text at its last other token. None: there is none.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    return getattr(read_config(path).get_text_config(), "pad_token_id", None)


def image_family(path: str | Path) -> tuple[ImageFamily, PreTrainedConfig] | None:
    """The family and the configuration of the model in a folder; None: it takes no images.

    Raises:
        ValueError: the folder is missing or unreadable.
    """
    config = read_config(path)
    return (FAMILIES[config.model_type], config) if config.model_type in FAMILIES else None


def is_quantized(path: str | Path) -> bool:
    """Whether the weights in a folder are quantized. Raises ValueError for a folder that cannot be used."""
    config = read_config(path)
    return any(getattr(each, "quantization_config", None) for each in (config, config.get_text_config()))


def read_config(path: str | Path):
    require_folder(path)
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


def require_folder(path: str | Path) -> None:
    if not Path(path).is_dir():
        raise ValueError(
            f"model folder {path} does not exist: give a local folder with config.json and safetensors files "
            "(a model of the Hugging Face Hub is downloaded by: hf download NAME)"
        )
