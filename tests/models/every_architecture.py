"""Every language model of the installed transformers: whether its head can be patched, and its sequences packed.

    python -m tests.models.every_architecture    # writes docs/models.md

A model of small sizes is asked, and each yes is compared with the model's own logits. Where no small sizes fit, and for
models with images, the model of the default configuration is asked on the meta device, and nothing is compared.
"""

import dataclasses
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlft_fast import patch_lm_head, unpatch_lm_head
from rlft_fast.models import ModelInputs, PolicyModel
from rlft_fast.models.architectures import packed_implementation, padded_attention, require_packed_attention

CLASSES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # by model type
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
YES, UNREFUTED = "yes", "yes *"
UNTRIED = "not tried"

PAGE_TEXT = """\
# Which models

This page says which models of transformers {version} rlft_fast takes. *Patched head* is `patch_lm_head`, and with it
every [integration](integrations.md) but TRL's, since TRL has a patch of its own. *Packed* is the packed forward of the
engine and of [LightRFT](integrations.md#lightrft), and rollouts by transformers. The other trainers pack in their own
way. Names are those of `model_type` in config.json: {total}, of which {patched} have a patched head, and {packed} pack.

`python -m tests.models.every_architecture` asks every model and writes this page. `make test-slow` fails where the page
is out of date. A *yes* is compared: a small random model gives the log-probabilities of its own logits to 1e-4, for two
rows with a patched head, and for three packed sequences, which it also continues from padding on the left. A star says
that the class was asked with its default configuration, and was not refused; its numbers were not compared. All other
models are refused by name when they are patched, packed or first called. The table has the first reason of the
`ValueError`. *Not tried* are those that transformers cannot build with their default configurations.

| patched head | packed | model types |
| --- | --- | --- |
{table}

Other tests compare Qwen2-VL and Qwen2.5-VL, packed and with images, with transformers' own numbers. Encoder-decoders
for text alone are not listed, and are refused.

Your configuration may differ from the default, and the class may be your own. This asks a model without its weights:

```python
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from rlft_fast import patch_lm_head
from rlft_fast.models import require_packed_attention

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(Gemma2Config())  # or AutoConfig.from_pretrained(folder)
require_packed_attention(model)  # a ValueError if it cannot be packed
patch_lm_head(model)  # a ValueError if its head cannot be patched
```
"""

LENGTHS = [9, 3, 12]
SMALL: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 3),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"], 48),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 128),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], 64),
    **dict.fromkeys(["head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "query_pre_attn_scalar"], 8),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "encoder_layers", "bos_token_id"], 1),
    **dict.fromkeys(["num_mtp_layers", "num_nextn_predict_layers", "pad_token_id"], 0),
    "is_decoder": True, "num_key_value_heads": 2, "sliding_window": 4, "num_experts_per_tok": 2, "rotary_dim": 4,
    "initializer_range": 0.2, "qk_rope_head_dim": 4, "q_lora_rank": 12, "hidden_size_per_layer_input": 4,
    "eos_token_id": 2,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_GEMMA = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
# What does not fit the sizes above, or would be left out by them, as the convolutions of LFM2.
SMALL_OF: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    },
    "gemma3n_text": _GEMMA | {"activation_sparsity_pattern": None},
    "gemma4_text": _GEMMA | {"global_head_dim": 8},
    "gemma4_unified_text": _GEMMA | {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention", "mamba"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "mistral4": {"head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


class Answer(NamedTuple):
    """YES, UNREFUTED, or why not."""

    patched: str
    packed: str


def page() -> str:
    """The text of docs/models.md."""
    types_of: dict[Answer, list[str]] = defaultdict(list)
    for model_type in sorted(CLASSES):
        found = answer(model_type)
        key = Answer(*(YES if each == UNREFUTED else each for each in found))
        types_of[key].append(model_type + ("\\*" if UNREFUTED in found else ""))
    rows = sorted(types_of.items(), key=lambda row: (row[0] != (YES, YES), UNTRIED in row[0], -len(row[1]), row[0]))
    table = "\n".join(f"| {patched} | {packed} | {', '.join(names)} |" for (patched, packed), names in rows)
    return PAGE_TEXT.format(
        version=transformers.__version__,
        total=len(CLASSES),
        patched=sum(len(names) for found, names in rows if found.patched == YES),
        packed=sum(len(names) for found, names in rows if found.packed == YES),
        table=table,
    )


@cache
def answer(model_type: str) -> Answer:
    """Asks the model, and compares each YES with the model's own logits.

    Raises:
        AssertionError: a YES is wrong.
    """
    try:
        model = _small_model(model_type)
    except Exception:  # anything at all, from hundreds of configurations
        try:
            return _not_compared(_default_model(model_type))
        except Exception:
            return Answer(UNTRIED, UNTRIED)
    return Answer(_patched(model), _packed(model))


def _class_of(model_type: str) -> type[PreTrainedModel]:
    names = CLASSES[model_type]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _small_model(model_type: str) -> PreTrainedModel:
    """Builds the model, or raises the error of an architecture that these sizes do not fit."""
    default = CONFIG_MAPPING[model_type]().get_text_config()
    fields = {field.name for field in dataclasses.fields(default)}
    sizes = {name: value for name, value in SMALL.items() if name in fields | default.attribute_map.keys()}
    if "kv_lora_rank" in fields:  # there head_dim is the width of the rotary part
        sizes |= {"num_key_value_heads": 4, "head_dim": SMALL["qk_rope_head_dim"]}
    if "layer_types" in fields and default.layer_types:
        sizes["layer_types"] = ([*dict.fromkeys(default.layer_types)] * 3)[:3]
    model_class, config = _class_of(model_type), type(default)(**sizes | SMALL_OF.get(model_type, {}))
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model_class(config).parameters()) < 2e7
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=parameter.flatten()[0].item(), std=0.2)
    model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    return model


def _default_model(model_type: str) -> PreTrainedModel:
    with torch.device("meta"):
        return _class_of(model_type)(CONFIG_MAPPING[model_type]()).eval()


def _not_compared(model: PreTrainedModel) -> Answer:
    answers = []
    for ask in (lambda: unpatch_lm_head(patch_lm_head(model)), lambda: _as_policy(model)):
        try:
            ask()
            answers.append(UNREFUTED)
        except ValueError as error:
            answers.append(_reason(model, error))
    return Answer(*answers)


def _as_policy(model: PreTrainedModel) -> PolicyModel:
    require_packed_attention(model)
    return PolicyModel(model)


def _reason(model: PreTrainedModel, error: ValueError) -> str:
    """The first reason in the message, without the name of the model's class."""
    message = str(error).replace(type(model).__name__, "the model").removeprefix("the model ")
    return re.split(r": | \((?!\d)| and (?!its)", message)[0]


def _patched(model: PreTrainedModel) -> str:
    """Compares the log-probabilities of two rows with the model's own logits."""
    ids, targets = torch.randint(3, 64, (2, 2, 9))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        try:
            logprob = patch_lm_head(model)(input_ids=ids, logprob_targets=targets).logprob
        except ValueError as error:
            return _reason(model, error)
    expected = torch.log_softmax(logits, -1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(logprob, expected, rtol=0, atol=1e-4)
    unpatch_lm_head(model)
    return YES


def _packed(model: PreTrainedModel) -> str:
    """Compares the log-probabilities of packed sequences and of generated tokens with the model's own logits."""
    try:
        policy = _as_policy(model)
    except ValueError as error:
        return _reason(model, error)
    parts = torch.randint(3, 64, (1, sum(LENGTHS))).split(LENGTHS, 1)
    target = torch.randint(3, 64, (sum(LENGTHS),))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        alone = [model(input_ids=part, use_cache=False).logits[0] for part in parts]
        longer = [torch.cat([part, logits[-1:].argmax(1)[None]], 1) for part, logits in zip(parts, alone, strict=True)]
        last_two = torch.stack([model(input_ids=part, use_cache=False).logits[0, -2:] for part in longer])
        model.set_attn_implementation(packed_implementation(model.config))
        expected = torch.log_softmax(torch.cat(alone), -1).gather(1, target[:, None]).squeeze(1)
        torch.testing.assert_close(_packed_logprobs(policy, parts, target), expected, rtol=0, atol=1e-4)
        assert policy.deviation(parts[0][0]) < 1e-4
        generated = _generated_logits(policy, parts)
    torch.testing.assert_close(generated, last_two.repeat_interleave(2, 0), rtol=0, atol=1e-4)
    return YES


def _packed_logprobs(policy: PolicyModel, parts: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Of all tokens, as the engine computes them."""
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    everything = torch.arange(sum(LENGTHS))
    return policy(ModelInputs(
        input_ids_U=torch.cat(parts, 1)[0], position_ids_U=torch.cat([torch.arange(n) for n in LENGTHS]),
        cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=max(LENGTHS), max_seqlen_k=max(LENGTHS),
        key_index=None, active_index_A=everything, target_A=target, output_index_A=everything,
    )).logprob  # fmt: skip


def _generated_logits(policy: PolicyModel, parts: tuple[Tensor, ...]) -> Tensor:
    """(2 B, 2, V) as rollouts compute them: padding on the left, prefill, then token by token for two samples each."""
    padding = [(max(LENGTHS) - n, 0) for n in LENGTHS]
    ids, mask = (
        torch.cat([pad(x, width) for x, width in zip(rows, padding, strict=True)])
        for rows in (parts, [torch.ones_like(part) for part in parts])
    )
    policy.model.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
    with padded_attention(policy.model):
        twice = (x.repeat_interleave(2, 0) for x in (ids, mask))
        output = cast(Any, policy.generate(*twice, policy.prefill(ids, mask, num_samples=2), generation_config=config))
    return torch.stack(output.logits, 1)


if __name__ == "__main__":
    PAGE.write_text(page())
