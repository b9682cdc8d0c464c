"""flash_attn where there is no CUDA."""

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input


def flash_attn_without_cuda() -> Iterator[ModuleType]:
    """The functions that OpenRLHF imports from flash_attn, taken from their copies in transformers."""
    from einops import rearrange

    contents = {
        "flash_attn": {"__spec__": ModuleSpec("flash_attn", None)},
        "flash_attn.bert_padding": {
            "index_first_axis": lambda tensor, indices: tensor[indices], "rearrange": rearrange,
            "pad_input": _pad_input, "unpad_input": _unpad_input,
        },
        "flash_attn.utils": {},
        "flash_attn.utils.distributed": {"all_gather": None},
    }  # fmt: skip
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        yield module
