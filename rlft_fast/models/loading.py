"""Loading from local Hugging Face folders: safetensors only, nothing is unpickled and no hub is asked."""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlft_fast.models.heads import PolicyModel, ValueModel
from rlft_fast.models.support import packed_implementation, require_packed_attention
from rlft_fast.models.vision import VISION_MODELS


def load_policy(path: str | Path, workspace_mib: int | None = None) -> PolicyModel:
    """A causal language model in float32 on the CPU, with packed attention and a ``LogprobHead``.

    It is in eval mode and is trained so: with dropout the policy of an update would be another one than that which
    sampled and inferred, and the ratio between them not 1.

    Raises:
        ValueError: the folder is missing or unreadable, its weights are damaged or incomplete, or it has no lm_head,
            or its sequences cannot be packed.
    """
    config = _read_config(path)
    if config.model_type in VISION_MODELS:
        return PolicyModel(_load(AutoModelForImageTextToText, config, path), workspace_mib)
    architectures = config.architectures or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise ValueError(
            f"the model in {path} is {', '.join(architectures) or 'of unknown architecture'} and has no lm_head: "
            "a policy must be a causal language model (...ForCausalLM), or a "
            f"vision-language model of type {' or '.join(VISION_MODELS)}"
        )
    return PolicyModel(_load(AutoModelForCausalLM, config, path), workspace_mib)


def load_critic(path: str | Path) -> ValueModel:
    """The backbone of any text model in float32 on the CPU, with a new value head; in eval mode like the policy.

    Raises:
        ValueError: the folder is missing or unreadable, or its weights are damaged or incomplete, or its
            sequences cannot be packed.
    """
    return ValueModel(_load(AutoModel, _read_config(path), path))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder is missing or holds no tokenizer.
    """
    _require_folder(path)
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load a tokenizer from {path}: {error}") from error


def _load(auto_class: Any, config: Any, path: str | Path) -> PreTrainedModel:
    try:
        model, report = auto_class.from_pretrained(
            path, dtype=torch.float32, attn_implementation=packed_implementation(config), use_safetensors=True,
            local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {path}: {error}") from error
    if unfit := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise ValueError(
            f"the weights in {path} lack {len(unfit)} tensors of the shape that config.json asks for "
            f"({', '.join(unfit[:3])}, ...): they would be random; save or download the model again"
        )
    require_packed_attention(model)
    return model.eval()


def _read_config(path: str | Path):
    _require_folder(path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a model folder: {error}") from error


def _require_folder(path: str | Path) -> None:
    if not Path(path).is_dir():
        raise ValueError(
            f"model folder {path} does not exist: give a local folder with config.json and safetensors files "
            "(download a hub model first)"
        )
