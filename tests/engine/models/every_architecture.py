"""Every language model of the installed transformers: whether its head can be patched, and how it trains.

    python -m tests.engine.models.every_architecture    # writes docs/models.md

A model of small sizes is asked, and each yes is compared with the model's own numbers. Where no small sizes fit, the
model of the default configuration is asked on the meta device, and nothing is compared.
"""

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping
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
from rlft_fast.data import Batch
from rlft_fast.engine.forward import prepare_model_inputs
from rlft_fast.models import PolicyModel, RowCache
from rlft_fast.models.architectures import WITHOUT_CACHE, padded_attention, require_causal
from tests.engine.models.update_time import FEW, MIXED, share_of_time

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
YES, UNREFUTED = "yes", "yes *"
PACKED, PADDED = "packed", "padded"
UNTRIED = "not tried"
# Their loops over tokens need minutes for `MIXED`, or more than 12 GB even for `FEW`, there and here.
SLOW_LOOPS = (
    "minicpmv4_6", "minicpmv4_7", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
)  # fmt: skip
LARGE_LOOPS = ("glm5_next", "kimi_linear")

PAGE_TEXT = """\
# Which models

This page says which models of transformers {version} rlft_fast takes. *Patched head* is `patch_lm_head`, and with it
every [integration](integrations.md) but TRL's, since TRL has a patch of its own. *Training* is how the engine runs the
model. Names are those of `model_type` in config.json: {total}, of which {patched} have a patched head, and {trained}
train: {packed} packed and {padded} padded.

A *packed* model runs sequences one after the other, without padding, and equal prefixes once. A *padded* model has
layers that would mix packed sequences: a recurrent state, or masks of its own. It runs batches of similar lengths, and
no token sees the padding on its right. Its head, losses, checkpoints, adapters and sharding are a packed model's.
It has no sequence parallelism, and its blocks are not compiled. A run says at its start that a model is padded, and
why. Rollouts by transformers then batch prompts of one length. They run without a cache, slowly, for the few models
whose cache gives other numbers: {uncached}.
[LightRFT](integrations.md#lightrft) takes packed models alone, but not Llama 4. The loss of
[FusedLossTrainer](integrations.md#hf-trainer) is not the loss of all models, and some are refused there.

Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA, InternVL, Idefics3, SmolVLM, Mistral 3 and Gemma 3 learn from
[images](runs.md#images), too. All other vision-language models learn from text: their towers are frozen, and images
are refused.

`python -m tests.engine.models.every_architecture` asks every model and writes this page. `make test-slow` fails where
the page is out of date. Each *yes*, *packed* and *padded* is compared. With a patched head, a small random model gives
the log-probabilities of its own logits to 1e-4. So does the engine's forward of three sequences, with the gradients of
each sequence alone, and rollouts continue the sequences by the model's own logits. A star says that the class was asked
with its default configuration, and was not refused; its numbers were not compared. All other models are refused by name
when they are patched or loaded. The table has the first reason of the `ValueError`. *Not tried* are those that
transformers cannot build with their default configurations.

*Time* is what an update of a padded model takes, as a share of transformers' own padded step on the same sequences, in
CPU seconds: below 1, the update is faster. The small random model runs forward and backward on {number} sequences of
{shortest} to {longest} tokens without a common prompt, which padding to one length makes {padding} times as many. The
packed Llama takes {llama}. So small a model spends its time on calls rather than on tokens. Models of four layers with
a width of 256 (Bloom, LFM2, Qwen3.5) take 0.3 to 0.4, and 0.9 to 1.0 where all lengths are equal.

Without packages of their own, transformers runs the recurrent layers of some models in slow loops. These models were
timed with {few} of the sequences, which padding makes {few_padding} times as many:
{loops}.
Models with a star have no time, and neither have {large}: their loops need more than 12 GB on
either side.

| patched head | training | time | model types |
| --- | --- | --- | --- |
{table}

Encoder-decoders for text alone are not listed, and are refused.

Your configuration may differ from the default, and the class may be your own. This asks a model without its weights:

```python
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from rlft_fast import patch_lm_head
from rlft_fast.models import require_packed_attention

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(Gemma2Config())  # or AutoConfig.from_pretrained(folder)
require_packed_attention(model)  # a ValueError if it cannot be packed, which has the reasons
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
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 256),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], 64),
    **dict.fromkeys(["head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "query_pre_attn_scalar"], 8),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "encoder_layers", "bos_token_id"], 1),
    **dict.fromkeys(["num_mtp_layers", "num_nextn_predict_layers", "pad_token_id"], 0),
    "is_decoder": True, "num_key_value_heads": 2, "sliding_window": 4, "num_experts_per_tok": 2, "rotary_dim": 4,
    "initializer_range": 0.2, "qk_rope_head_dim": 4, "q_lora_rank": 12, "hidden_size_per_layer_input": 4,
    "eos_token_id": 2,
}  # fmt: skip
# Sizes of towers. Their widths are theirs, but a model may join them to its own without a projection.
SMALL_TOWER: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "embed_dim", "d_model", "out_hidden_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layers", "num_layers", "depth", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["intermediate_size", "encoder_ffn_dim"], 48),
    "initializer_range": 0.2,
}


def _mrope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*section]}
    return {"rope_parameters": rope}


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_GEMMA = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
# What does not fit the sizes above, or would be left out by them, as the convolutions of LFM2.
SMALL_OF: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": _GEMMA | {"activation_sparsity_pattern": None},
    "gemma4_text": _GEMMA | {"global_head_dim": 8},
    "gemma4_unified_text": _GEMMA | {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention", "mamba"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 8]} | _mrope(1, 1, 2),
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 60},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 60},
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 5},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "n_mamba_heads": 8,
        "hybrid_layer_ids": [1, 3],
    },
    "chameleon": {"vocabulary_map": {"<image>": 60, "IMGIMGBZ": 61}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _mrope(1, 1, 2)["rope_parameters"]}},
    "hunyuan_vl_text": _mrope(2, 1, 1),
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "num_experts": 4,
    },
    **dict.fromkeys(["glm4v_moe_text"], _mrope(1, 1, 0)),
    **dict.fromkeys(
        ["cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_5_omni_text",
         "qwen2_5_vl_text", "qwen2_vl_text"], _mrope(2, 1, 1),
    ),
    "idefics3_vision": {"image_size": 64},  # 2 x 2 patches, which make one token
    "smolvlm_vision": {"image_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "llama4_text": {"attention_chunk_size": 4, "floor_scale": 3, "no_rope_layer_interval": 2},
    "mistral4": {"head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


class Answer(NamedTuple):
    """A star stands behind an answer that is not compared."""

    patched: str
    """YES, or why not."""
    trains: str
    """PACKED, PADDED, or why not."""


def page(times: Mapping[str, str]) -> str:
    """The text of docs/models.md.

    Args:
        times: see `measured`.
    """
    types_of: dict[tuple[Answer, str], list[str]] = defaultdict(list)
    for model_type in MODEL_TYPES:
        found = answer(model_type)
        key = Answer(*(each.removesuffix(" *") for each in found))
        time = times.get(model_type, "") if found.trains == PADDED else ""
        types_of[key, time].append(model_type + ("\\*" if key != found else ""))
    ways = [PACKED, PADDED]

    def place(row: tuple[tuple[Answer, str], list[str]]) -> tuple:
        (found, time), names = row
        way = ways.index(found.trains) if found.trains in ways else len(ways)
        return way, found.patched != YES, UNTRIED in found, not time, time, -len(names), found

    rows = sorted(types_of.items(), key=place)
    table = "\n".join(f"| {' | '.join(found)} | {time} | {', '.join(names)} |" for (found, time), names in rows)
    number = {way: sum(len(names) for (found, _), names in rows if found.trains == way) for way in ways}
    return PAGE_TEXT.format(
        version=transformers.__version__,
        total=len(MODEL_TYPES),
        patched=sum(len(names) for (found, _), names in rows if found.patched == YES),
        trained=sum(number.values()),
        packed=number[PACKED],
        padded=number[PADDED],
        table=table,
        uncached=", ".join(WITHOUT_CACHE),
        number=len(MIXED),
        llama=times["llama"],
        shortest=min(MIXED),
        longest=max(MIXED),
        padding=round(len(MIXED) * max(MIXED) / sum(MIXED)),
        loops=", ".join(SLOW_LOOPS),
        large=" and ".join(LARGE_LOOPS),
        few=len(FEW),
        few_padding=round(len(FEW) * max(FEW) / sum(FEW)),
    )


def measured() -> dict[str, str]:
    """The time of an update of each padded model that is compared, and of Llama, see `share_of_time`. Takes minutes."""
    timed = [x for x in MODEL_TYPES if answer(x).trains == PADDED and x not in LARGE_LOOPS]
    lengths = {x: FEW if x in SLOW_LOOPS else MIXED for x in ["llama", *timed]}
    return {x: _coarse(share_of_time(_as_policy(built_model(x)), own)) for x, own in lengths.items()}


def written() -> dict[str, str]:
    """The times that the page has."""
    text = PAGE.read_text()
    rows = re.findall(r"^\| .* \| padded \| ([\d.]+) \| (.*) \|$", text, re.MULTILINE)
    (llama,) = re.findall(r"packed Llama takes ([\d.]+)\.", text)
    return {"llama": llama} | {model_type: time for time, names in rows for model_type in names.split(", ")}


@cache
def told() -> dict[str, tuple[str, str]]:
    """The answers that the page has, without their stars."""
    rows = re.findall(r"^\| (.*) \| (.*) \| [\d.]* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {
        model_type.removesuffix("\\*"): (patched, trains)
        for patched, trains, model_types in rows
        for model_type in model_types.split(", ")
    }


def _coarse(share: float) -> str:
    """The nearest step, each about a quarter more than the one before."""
    steps = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
    return f"{min(steps, key=lambda step: abs(math.log(step / share))):g}"


def built_model(model_type: str) -> PreTrainedModel:
    """The small model, of the first class that can be built. Raises AssertionError if none can."""
    for model_class in _classes(model_type):
        with contextlib.suppress(Exception):  # as in `answer`
            return small_model(model_type, model_class)
    raise AssertionError(model_type)


@cache
def answer(model_type: str) -> Answer:
    """Asks the model, and compares each yes with the model's own numbers.

    Raises:
        AssertionError: a yes is wrong.
    """
    for build, ask in ((small_model, _compared), (_default_model, _not_compared)):
        for model_class in _classes(model_type):
            try:
                model = build(model_type, model_class)
            except Exception:  # anything at all, from hundreds of configurations
                continue
            return ask(model)
    return Answer(UNTRIED, UNTRIED)


def _classes(model_type: str) -> list[type[PreTrainedModel]]:
    """The class with a tower, and the class of text alone, if there are both."""
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = [mapping[model_type] for mapping in mappings if model_type in mapping]
    return [getattr(transformers, names if isinstance(names, str) else names[0]) for names in dict.fromkeys(found)]


def _compared(model: PreTrainedModel) -> Answer:
    return Answer(_patched(model), _trains(model))


def small_model(model_type: str, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Builds the model, or raises the error of an architecture that these sizes do not fit."""
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config()
    is_of_text = model_class.config_class is type(text)
    takes_whole = text is not default and not is_of_text
    config = _small_whole(default) if takes_whole else _small(text)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model_class(config).parameters()) < 3e7
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.numel():
            torch.nn.init.normal_(parameter, mean=parameter.flatten()[0].item(), std=0.2)
    model(input_ids=torch.full((1, 2), 5))
    return model


def _small(default: Any) -> Any:
    """A small configuration of a text model of this kind."""
    fields = {field.name for field in dataclasses.fields(default)}
    sizes = {name: value for name, value in SMALL.items() if name in fields | default.attribute_map.keys()}
    if "kv_lora_rank" in fields:  # there head_dim is the width of the rotary part
        sizes |= {"num_key_value_heads": 4, "head_dim": SMALL["qk_rope_head_dim"]}
    if "layer_types" in fields and default.layer_types:
        sizes["layer_types"] = ([*dict.fromkeys(default.layer_types)] * 3)[:3]
    return type(default)(**sizes | SMALL_OF.get(default.model_type, {}))


def _small_whole(default: Any) -> Any:
    """A small configuration of a model with a text model inside, beside towers."""
    parts: dict[str, Any] = {name: getattr(default, name, None) for name in default.sub_configs}
    small = {}
    for name, part in parts.items():
        if part is not None and part is default.get_text_config():
            small[name] = _small(part)
        elif dataclasses.is_dataclass(part):
            fields = {field.name for field in dataclasses.fields(part)} | part.attribute_map.keys()
            sizes = {key: value for key, value in SMALL_TOWER.items() if key in fields}
            small[name] = type(part)(**sizes | SMALL_OF.get(part.model_type, {}))
    fields = {field.name for field in dataclasses.fields(default)}
    own = {key: SMALL[key] for key in ("vocab_size", "hidden_size") if key in fields}
    return type(default)(**own | small | SMALL_OF.get(default.model_type, {}))


def _default_model(model_type: str, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    with torch.device("meta"):
        return model_class(CONFIG_MAPPING[model_type]()).eval()


def _not_compared(model: PreTrainedModel) -> Answer:
    try:
        unpatch_lm_head(patch_lm_head(model))
        patched = UNREFUTED
    except ValueError as error:
        patched = _reason(model, error)
    try:
        return Answer(patched, f"{_way(_as_policy(model))} *")
    except ValueError as error:
        return Answer(patched, _reason(model, error))


def _as_policy(model: PreTrainedModel) -> PolicyModel:
    require_causal(model)
    return PolicyModel(model)


def _way(policy: PolicyModel) -> str:
    return PADDED if policy.padded_because else PACKED


def _reason(model: PreTrainedModel, error: ValueError) -> str:
    """The first reason in the message, without the name of the model's class."""
    message = str(error).replace(type(model).__name__, "the model").removeprefix("the model ")
    return re.split(r": | \((?!\d)| and (?!its)|, which a policy", message)[0]


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


def _trains(model: PreTrainedModel) -> str:
    """Compares log-probabilities, gradients and logits of generated tokens with those of each sequence alone."""
    implementation = model.config._attn_implementation
    try:
        policy = _as_policy(model)
    except ValueError as error:
        return _reason(model, error)
    parts = torch.randint(3, 64, (1, sum(LENGTHS))).split(LENGTHS, 1)
    if not policy.padded_because:
        model.set_attn_implementation("eager")
    else:
        assert model.config._attn_implementation == implementation
    alone = [model(input_ids=part, use_cache=False).logits[0] for part in parts]
    batch = Batch.from_samples([part[0, :1].tolist() for part in parts], [part[0, 1:].tolist() for part in parts])
    logits = torch.cat([own[:-1] for own in alone])
    expected = torch.log_softmax(logits, -1).gather(1, torch.cat(parts, 1).squeeze(0)[_after_first()][:, None])[:, 0]
    gradients = _gradients(model, expected)
    with torch.no_grad():
        longer = [torch.cat([part, own[-1:].argmax(1)[None]], 1) for part, own in zip(parts, alone, strict=True)]
        last_two = torch.stack([model(input_ids=part, use_cache=False).logits[0, -2:] for part in longer])
    policy.choose_way(model)
    inputs = prepare_model_inputs(
        batch, torch.device("cpu"), backbone=policy.backbone, padded=bool(policy.padded_because)
    )  # fmt: skip
    logprob = policy(inputs).logprob
    torch.testing.assert_close(logprob, expected, rtol=0, atol=1e-4)
    for found, own in zip(_gradients(model, logprob), gradients, strict=True):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-3 * max(float(own.abs().max()), 0.1))
    try:
        assert not policy.deviation(torch.arange(3, 11)) > 1e-4
        with torch.no_grad():
            generated = _generated_logits(policy, parts)
            in_place = _logits_in_place(policy, parts) if policy.decodes_in_place else generated
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    for logits in (generated, in_place):
        torch.testing.assert_close(logits, last_two.repeat_interleave(2, 0), rtol=0, atol=1e-4)
    return _way(policy)


def _after_first() -> Tensor:
    """The positions of all tokens but each sequence's first."""
    return torch.cat([torch.arange(n) + sum(LENGTHS[:i]) for i, n in enumerate(LENGTHS)]).view(-1)[
        torch.cat([torch.arange(n) > 0 for n in LENGTHS])
    ]


def _gradients(model: PreTrainedModel, logprob: Tensor) -> list[Tensor]:
    """Of all parameters that are trained; 0 where a parameter does nothing."""
    weights = torch.linspace(0.5, 1.5, len(logprob))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((weights * logprob).sum(), trained, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, trained, strict=True)]


def _generated_logits(policy: PolicyModel, parts: tuple[Tensor, ...]) -> Tensor:
    """(2 B, 2, V) as rollouts compute them: prefill, then token by token for two samples each.

    Sequences are padded on the left, or run one by one if the model would see the padding.
    """
    policy.model.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
    logits = []
    for prompts in _batches(policy, parts):
        with padded_attention(policy.model):
            twice = (x.repeat_interleave(2, 0) for x in prompts)
            output = cast(
                Any, policy.generate(*twice, policy.prefill(*prompts, num_samples=2), generation_config=config)
            )  # fmt: skip
        logits.append(torch.stack(output.logits, 1))
    return torch.cat(logits)


def _logits_in_place(policy: PolicyModel, parts: tuple[Tensor, ...]) -> Tensor:
    """The same by our own loop: the second sample of each sequence branches after the first token."""
    logits = []
    for ids, mask in _batches(policy, parts):
        first_rows, padding = torch.arange(len(ids)), (mask == 0).sum(1)
        with padded_attention(policy.model):
            cache = RowCache(policy.model, 2 * len(ids), ids.shape[1] + 1)
            position = policy.prefill_rows(ids, mask, cache)
            first = policy.next_logits(ids[:, -1], position, padding, cache)
            cache.copy_rows(first_rows, first_rows + len(ids), 2 * len(ids))
            second = policy.next_logits(first.argmax(1).repeat(2), position.repeat(2) + 1, padding.repeat(2), cache)
        order = first_rows.repeat_interleave(2) + torch.tensor([0, len(ids)]).repeat(len(ids))
        logits.append(torch.stack([first.repeat(2, 1), second], 1)[order])
    return torch.cat(logits)


def _batches(policy: PolicyModel, parts: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Ids and mask: of all sequences, padded on the left, or of each alone if the model would see the padding."""
    alone = [(part, torch.ones_like(part)) for part in parts]
    return alone if policy.sees_padding else [_padded_left(parts)]


def _padded_left(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Ids and mask."""
    ids, mask = (
        torch.cat([pad(x, (max(LENGTHS) - x.shape[1], 0)) for x in rows])
        for rows in (parts, [torch.ones_like(part) for part in parts])
    )
    return ids, mask


if __name__ == "__main__":
    PAGE.write_text(page(measured()))
