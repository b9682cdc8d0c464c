"""Loading from local folders, and one clear error for every folder that cannot be used."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    CTRLConfig,
    CTRLForSequenceClassification,
    DeepseekV4ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from rlft_fast.models import (
    PACKED_ATTENTION,
    ValueModel,
    build_critic,
    build_policy,
    build_reward_model,
    checkpoint_parts,
    load_critic,
    load_policy,
    load_tokenizer,
    require_divisible_heads,
    require_fixed_rope,
    require_packed_attention,
)
from tests.support.tiny_models import EOS_TOKEN_ID, MODELS, PAD_TOKEN_ID

LOADERS = [load_policy, load_critic]


@pytest.mark.parametrize("name", MODELS)
def test_policy_has_the_weights_of_the_folder(tiny_model, name):
    policy = load_policy(tiny_model(name))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model(name))
    actual, expected = dict(policy.model.named_parameters()), dict(plain.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert policy.model.config._attn_implementation == PACKED_ATTENTION
    assert not policy.model.training


def test_half_precision_weights_become_float32(tiny_model, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    for model in (load_policy(tmp_path), load_critic(tmp_path)):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_critic_takes_the_backbone_of_a_policy(tiny_model):
    critic = load_critic(tiny_model("llama"))
    names = {name for name, _ in critic.named_parameters()}
    assert {"head.weight", "head.bias", "backbone.embed_tokens.weight"} <= names
    assert not any("lm_head" in name for name in names)
    assert not critic.head.weight.any()


def test_tokenizer(tiny_model):
    tokenizer = load_tokenizer(tiny_model("llama"))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_TOKEN_ID, PAD_TOKEN_ID)
    ids = tokenizer("2 + 2 = é<eos>")["input_ids"]
    assert len(ids) == len("2 + 2 = é".encode()) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "2 + 2 = é"


# ---- folders that cannot be used --------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """A copy of a model's folder that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.mark.parametrize("load", [*LOADERS, load_tokenizer])
def test_missing_folder(load, tmp_path):
    with pytest.raises(ValueError, match="does not exist: give a local folder"):
        load(tmp_path / "absent")


@pytest.mark.parametrize("load", LOADERS)
def test_folder_without_config(load, folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="is not a model folder"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
# Not JSON, and JSON of a model type that does not exist.
@pytest.mark.parametrize("text", ["{", json.dumps({"model_type": "nonsense"})])
def test_unreadable_config(load, text, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="is not a model folder"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(("key", "value"), [("hidden_size", "wide"), ("num_attention_heads", 5)])
def test_config_that_transformers_refuses(load, key, value, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=r"is not a model folder: transformers .* cannot use its config\.json"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_model_that_returns_tuples(load, part, tiny_model, tmp_path):
    """Plain transformers loads the folder, and fails at the first forward."""
    folder = Path(shutil.copytree(tiny_model("qwen2-vl" if part else "llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config)["return_dict"] = False
    (folder / "config.json").write_text(json.dumps(config))
    if not part:
        with pytest.raises(AttributeError, match="'tuple' object has no attribute"):
            AutoModelForCausalLM.from_pretrained(folder)(torch.arange(9)[None])
    with pytest.raises(ValueError, match=r"cannot use its config\.json \(return_dict is false.*\): correct it"):
        load(folder)


def test_models_without_lm_head(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "bert")
    LlamaModel(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "base")
    for name in ("bert", "base"):
        with pytest.raises(ValueError, match="has no lm_head"):
            load_policy(tmp_path / name)
    assert load_critic(tmp_path / "base").head.weight.shape == (1, 8)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_token_id": 10**6}, "cannot build the model in .* AssertionError: Padding_idx"),
        ({"num_key_value_heads": 0}, r"cannot use its config\.json \(num_key_value_heads is 0, expected 1 to 16777216"),
        ({"hidden_size": 0}, r"cannot use its config\.json \(hidden_size is 0, expected 1 to"),
        ({"hidden_size": -8}, r"cannot use its config\.json \(hidden_size is -8, expected 1 to"),
        ({"vocab_size": 10**12}, r"cannot use its config\.json \(vocab_size is 1000000000000, expected 1 to 16777216"),
        # transformers would make a list of as many names, and then as many modules.
        ({"num_hidden_layers": 10**10}, r"\(num_hidden_layers is 10000000000, expected 1 to 1000\)"),
        ({"vision_config": {"depth": 10**5}}, r"\(depth is 100000, expected 1 to 1000\)"),
        # transformers 5.13 refuses these two itself, in other words.
        ({"architectures": "LlamaForCausalLM"}, r"cannot use its config\.json .*architectures.* 'LlamaForCausalLM'"),
        ({"architectures": [1]}, r"cannot use its config\.json .*architectures.* \[1\]"),
    ],
)
def test_configuration_of_no_model(load, changes, message, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"weight_map": []}', '{"weight_map": {"a": null}}'])
def test_damaged_index_of_shards(text, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_policy(folder)


@pytest.mark.parametrize("place", ["../other/model.safetensors", "absolute"])
def test_an_index_that_names_files_elsewhere(place, folder, tmp_path):
    (tmp_path / "other").mkdir()
    elsewhere = shutil.move(folder / "model.safetensors", tmp_path / "other" / "model.safetensors")
    name = str(elsewhere) if place == "absolute" else os.path.relpath(elsewhere, folder)
    weight_map = dict.fromkeys(load_file(elsewhere), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"is damaged: it names files outside of the folder \({re.escape(name)}\)"):
        load_policy(folder)


def test_damaged_generation_config(folder):
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot build the model"):
        load_policy(folder)


@pytest.mark.parametrize("load", LOADERS)
def test_missing_weights(load, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load the model"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
# An interrupted download, an empty file, and a page of HTML.
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _: b"", lambda _: b"<html>" * 99])
def test_damaged_weights(load, damage, folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ValueError, match="cannot load the model"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
def test_incomplete_weights(load, folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
def test_weights_of_another_size(load, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.down_proj\.weight \(32, 48\) instead of \(32, 40\).* and 6 more"
    ):
        load(folder)


@pytest.mark.parametrize("load", LOADERS)
def test_more_weights_than_the_config_has(load, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"hold model\.layers\.2.* of different models"):
        load(folder)


def test_more_weights_than_the_config_of_a_backbone_has(tmp_path):
    LlamaModel(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"hold layers\.1.* of different models"):
        load_critic(tmp_path)


# One expert would otherwise be taken for all of them.
@pytest.mark.parametrize("lost", [r"experts\.1\.", r"experts\.[1-3]\.", r"experts\.1\.w1", r"experts\..\.w1"])
def test_missing_experts(lost, tmp_path):
    MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not re.search(lost, name)}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"gate_up_proj (of shape .* instead of \(4, 32, 16\)|do not fit together)"):
        load_policy(tmp_path)


def test_names_of_tensors_are_cut(folder):
    change_weights(folder, {10**6 * "a": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"hold a+ \.\.\. a+, for which the .* has no place") as error:
        load_policy(folder)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("load", LOADERS)
def test_tensors_that_old_checkpoints_have_and_config_json_determines(load, tiny_model, tmp_path):
    """transformers leaves them out: masks and positions, which were buffers that it saved."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 4}
    GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 1]])).save_pretrained(tmp_path / "gpt_neo")
    shutil.copytree(tiny_model("llava"), tmp_path / "llava")
    kept = {name: load(tmp_path / name).backbone.state_dict() for name in ("gpt_neo", "llava")}
    attention = "transformer.h.0.attn.attention"
    mask = torch.ones(1, 1, 4, 4, dtype=torch.uint8).tril()
    change_weights(tmp_path / "gpt_neo", {f"{attention}.bias": mask, f"{attention}.masked_bias": torch.tensor(-1e9)})
    change_weights(
        tmp_path / "llava", {"model.vision_tower.vision_model.embeddings.position_ids": torch.arange(4)[None]}
    )
    for name, expected in kept.items():
        found = load(tmp_path / name).backbone.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())


def test_tied_weights_that_differ(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight, but"):
        load_policy(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_policy(folder).head.weight, weights["lm_head.weight"])


def test_config_of_another_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    )
    with pytest.raises(ValueError, match=r"lack .*(q_norm|k_norm)"):
        load_policy(folder)


def test_missing_shard_of_a_sharded_model(tmp_path, folder):
    policy = load_policy(folder)
    policy.model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    lost = sorted((tmp_path / "sharded").glob("*-of-*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ValueError, match=f"{lost.name} of model.safetensors.index.json are missing"):
        load_policy(tmp_path / "sharded")


UP = "model.layers.0.mlp.up_proj.weight"


def change_weights(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | changes, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("named", ["a", "b", None])
def test_a_weight_in_two_files_is_read_from_the_file_that_the_index_names(named, folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / "a", {"format": "pt"})
    save_file({UP: weights[UP] + 1, "model.norm.weight": norm}, folder / "b", {"format": "pt"})
    weight_map = dict.fromkeys(weights, "a") | {UP: named, "model.norm.weight": "b"}
    weight_map = {name: file for name, file in weight_map.items() if file is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if named is None:
        with pytest.raises(ValueError, match=f"b: a has {UP}, too, and the index names neither file"):
            load_policy(folder)
    else:
        expected = weights[UP] + (named == "b")
        assert torch.equal(load_policy(folder).model.get_parameter(UP), expected)


def test_a_tensor_under_two_names(folder):
    values = load_file(folder / "model.safetensors")[UP]
    change_weights(folder, {UP.removeprefix("model."): values.clone()})
    assert torch.equal(load_policy(folder).model.get_parameter(UP), values)
    change_weights(folder, {UP.removeprefix("model."): values + 1})
    with pytest.raises(ValueError, match=f"different values for one tensor of the model, as layers.* and {UP}: save"):
        load_policy(folder)


# Integers and what else is no number of a weight. E8M0 has the scales of quantized weights.
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"), (torch.uint8, "U8"), (torch.int64, "I64"), (torch.bool, "BOOL"), (torch.complex64, "C64"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
    ],
)  # fmt: skip
def test_weights_that_are_no_floating_point_numbers(dtype, name, folder):
    change_weights(folder, {UP: torch.ones(48, 32).to(dtype)})
    with pytest.raises(ValueError, match=rf"{UP} in {name}, expected floating-point .* dequantize the model"):
        load_policy(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_floating_point_numbers_are_read_as_they_are(dtype, folder):
    values = load_file(folder / "model.safetensors")[UP].to(dtype)
    change_weights(folder, {UP: values})
    assert torch.equal(load_policy(folder).model.get_parameter(UP), values.float())


@pytest.mark.parametrize("name", ["llama", "llama-reward"])
def test_an_adapter_in_a_model_folder(name, tiny_model, tmp_path):
    """The message is followed, and the merged folder has the numbers of the adapted model."""
    folder, adapter = Path(shutil.copytree(tiny_model(name), tmp_path / "model")), tmp_path / "adapter"
    task = "CAUSAL_LM" if name == "llama" else "SEQ_CLS"
    loads = [build_policy, build_critic] if name == "llama" else [build_reward_model, build_critic]
    auto = AutoModelForCausalLM if name == "llama" else AutoModelForSequenceClassification
    config = LoraConfig(task, r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted, ids = get_peft_model(auto.from_pretrained(folder), config), torch.arange(9)[None]
    adapted.save_pretrained(folder)
    expected = adapted(ids).logits
    for load in loads:
        with pytest.raises(ValueError, match=r"holds an adapter of PEFT .*move adapter_config.json .*merge_and_unload"):
            load(folder)
    adapter.mkdir()
    for path in folder.glob("adapter_*"):
        path.rename(adapter / path.name)
    with pytest.raises(ValueError, match="holds an adapter of PEFT"):
        loads[0](adapter)
    base = auto.from_pretrained(folder)
    assert not torch.allclose(base(ids).logits, expected, atol=0.1)
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    for load in loads:
        load(tmp_path / "merged")
    torch.testing.assert_close(auto.from_pretrained(tmp_path / "merged")(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_pickled_weights_are_not_read(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load the model"):
        load_policy(folder)


def test_folder_without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        load_tokenizer(folder)


ADDED = [{"id": 2**31, "content": "<eos>", "special": True}]
TO_100 = {"type": "Replace", "pattern": {"String": "a"}, "content": 100 * "a"}
BOS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<b>", "type_id": 0}}], "pair": [],
       "special_tokens": {}}  # fmt: skip
WORDS = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}
KINDS = "data did not match any variant of untagged enum"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # At the first seven the library would end the process, fill gigabytes, or panic.
        (
            {"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}},
            "vocab gives the token 'a' the id 2147",
        ),
        (
            {"added_tokens": ADDED},
            "added_tokens gives the token '<eos>' the id 2147483648, expected an",
        ),
        (
            {"normalizer": TO_100 | {"content": 10**7 * "a"}},
            "normalizer makes 10000000 characters of one and",
        ),
        ({"normalizer": {"type": "Sequence", "normalizers": 5 * [TO_100]}}, "normalizer makes 10000000000 characters"),
        ({"normalizer": TO_100 | {"pattern": {"Regex": "x*"}}}, "normalizer makes 101 characters of one and adds"),
        ({"normalizer": {"type": "Prepend", "prepend": 10**4 * "a"}}, "characters of one and adds 10000 to each text"),
        ({"post_processor": BOS}, "post_processor puts the token '<b>' around texts, and its special_tokens do not"),
        ({"post_processor": {"type": "Own"}}, f"tokenizer.json, post_processor: {KINDS} PostProcessorWrapper"),
        ({"pre_tokenizer": {"type": "Own"}}, f"tokenizer.json, pre_tokenizer: {KINDS}"),
        ({"decoder": {"type": "Own"}}, f"tokenizer.json, decoder: {KINDS}"),
        ({"model": {"type": "Own"}}, "tokenizer.json: "),
        ({"version": "9.0"}, "tokenizer.json: Unknown tokenizer version"),
        ({"model": WORDS, "added_tokens": []}, "cannot tokenize 'a' (WordLevel error: Missing [UNK] token from the"),
        ({"model": {"type": "Unigram", "vocab": [["b", -1.0]], "unk_id": None}}, "cannot tokenize 'a' (Encountered an"),
    ],
)
def test_tokenizers_that_cannot_be_used(changes, message, folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=r"tokenizer(_config)?\.json") as error:
        load_tokenizer(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{}", "cannot load a tokenizer from "),
        ("tokenizer.json", "[" * 10**5, "tokenizer.json is no JSON: maximum recursion depth"),
        ("tokenizer_config.json", '{"model_max_length": "long"}', "model_max_length is 'long', expected a number"),
        (
            "vocab.json",
            json.dumps({"a": 2**31}),
            "vocab.json: it gives the token 'a' the id 2147483648, expected an",
        ),
        (
            "additional_chat_templates/._rag.jinja",
            "Mac OS X",
            "._rag.jinja is a file of macOS and no chat template",
        ),
    ],
)
def test_files_of_a_tokenizer_that_cannot_be_used(name, text, message, folder):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_tokenizer(folder)


def test_a_normalizer_may_change_texts(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    shorter = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}, {"type": "Prepend", "prepend": "b"}]
    changes = {"normalizer": {"type": "Sequence", "normalizers": [*shorter, {"type": "NFKC"}, {"type": "Lowercase"}]}}
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("A    a")) == "ba a"


@pytest.mark.parametrize(("file", "load"), [("tokenizer_config.json", load_tokenizer), ("config.json", load_policy)])
def test_code_in_a_folder_is_not_run(file, load, folder, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "n")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    classes = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Slow", "own.Fast"]}
    values = json.loads((folder / file).read_text()) | {"auto_map": classes, "model_type": "own"}
    values.pop("tokenizer_class", None)
    (folder / file).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder)
    assert not asked
    assert not (folder / "ran").exists()


SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROBERTA = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"} | {"is_decoder": True}


@pytest.mark.parametrize(
    ("model_class", "config", "reason"),
    [
        (MambaForCausalLM, MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1), "a recurrent state"),
        (Lfm2ForCausalLM, Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (NemotronForCausalLM, NemotronConfig(**SMALL), "hand boundaries on"),
    ],
)
def test_a_model_that_cannot_be_packed_runs_padded(tmp_path, model_class, config, reason):
    model_class(config).save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    assert reason in policy.padded_because
    assert policy.deviation(torch.arange(3, 11)) < 1e-4
    with pytest.raises(ValueError, match=f"{model_class.__name__} .*{reason}.*: sequences cannot be packed"):
        require_packed_attention(policy.model)
    with pytest.raises(ValueError, match=f"sequence_parallel=2 needs packed sequences, but .*{reason}"):
        require_divisible_heads(policy.backbone, 2, policy.padded_because)


@pytest.mark.parametrize(
    ("model_class", "config", "reason"),
    [
        (LlamaForCausalLM, LlamaConfig(**SMALL, is_causal=False), "lets tokens see later ones"),
        (RobertaForCausalLM, RobertaConfig(**ROBERTA), "modules between its backbone and its lm_head"),
    ],
)
def test_a_model_that_cannot_run_is_refused_by_name(tmp_path, model_class, config, reason):
    model_class(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{model_class.__name__} .*{reason}"):
        load_policy(tmp_path)


# An encoder-decoder with images, and a type for which transformers has no causal language model.
@pytest.mark.parametrize(
    ("architecture", "model_type", "reason"),
    [
        ("Florence2ForConditionalGeneration", "florence2", "an encoder-decoder"),
        ("Mistral4ForCausalLM", "mistral4", "has no ModelForCausalLM of type mistral4"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_supported_is_refused_in_one_sentence(architecture, model_type, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        load_policy(tmp_path)
    message = str(error.value).replace(str(tmp_path), "")
    assert "has no lm_head" not in message
    assert "KeyError" not in message
    assert "\n" not in message
    assert len(message) < 250


def test_rotary_embeddings_by_layer_type():
    """Each type may have its own; here one of them changes for all sequences, once one is longer than 16."""
    ropes = {"full_attention": {"rope_type": "dynamic", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
    ropes = {kind: rope | {"rope_theta": 1e4} for kind, rope in ropes.items()}
    backbone = Gemma3TextModel(
        Gemma3TextConfig(**SMALL, head_dim=8, max_position_embeddings=16, rope_parameters=ropes, layer_types=[*ropes])
    )  # fmt: skip
    long, short = (backbone.rotary_emb(torch.zeros(1, n, 16), torch.arange(n)[None], "full_attention") for n in (17, 8))
    assert not torch.equal(long[0][:, :8], short[0])
    require_fixed_rope(backbone, 16)
    with pytest.raises(ValueError, match=r"17 tokens, but the dynamic rotary embeddings of Gemma3TextModel .* 16"):
        require_fixed_rope(backbone, 17)


def test_a_name_that_a_renaming_of_other_names_fits(tmp_path):
    """transformers renames norms of DeepSeek-V4's attention, and writes the last norm so that the renaming fits it."""
    from tests.engine.models.every_architecture import small_model  # needs pydantic, which a bare GPU machine lacks

    model = small_model("deepseek_v4", DeepseekV4ForCausalLM)
    model.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path).model
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_heads_that_are_not_known_are_refused(tmp_path):
    """Of a reward model with another head than `score`, and of a critic whose backbone comes with a head alone."""
    from tests.engine.models.every_architecture import small_model  # needs pydantic, which a bare GPU machine lacks

    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "dff": 8, "n_layer": 1, "n_head": 2}
    CTRLForSequenceClassification(CTRLConfig(**sizes, num_labels=1, pad_token_id=0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CTRLForSequenceClassification classifies by classifier, not by one linear"):
        build_reward_model(tmp_path)
    with pytest.raises(ValueError, match="no Llama4ForConditionalGeneration without its lm_head, whose place a critic"):
        ValueModel(small_model("llama4", Llama4ForConditionalGeneration))


def test_a_critic_that_sees_later_tokens_is_refused(tmp_path):
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BertModel lets tokens see later ones"):
        load_critic(tmp_path)


@pytest.mark.parametrize("name", ["llava", "gemma3-vision"])
def test_weights_keep_the_prefixes_of_the_folder(tiny_model, tmp_path, name):
    """Published towers have names with ``vision_model``, which the model's own names have not."""
    shutil.copytree(tiny_model(name), tmp_path, dirs_exist_ok=True)
    for prefix in ("vision_tower.", "vision_tower.vision_model."):
        stored = {
            key.replace("vision_tower.", prefix, 1): x
            for key, x in load_file(tiny_model(name) / "model.safetensors").items()
        }
        save_file(stored, tmp_path / "model.safetensors")
        model = load_policy(tmp_path).model
        found = {part.name for own in checkpoint_parts(model).values() for part in own}
        assert {
            key for key in found - stored.keys() if not key.endswith("lm_head.weight")
        } == set()  # a head may be tied
        assert stored.keys() <= found
