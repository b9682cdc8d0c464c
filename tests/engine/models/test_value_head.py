"""A critic keeps its head: what it starts from a reward model's, what it exports, and what is read from there again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForSequenceClassification,
)

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.engine.checkpoint import load_start
from tests.engine import reference
from tests.engine.reference import make_engine, random_batch, value_loss
from tests.support.machine.distributed import run_distributed

PURE = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
ADAPTERS = {"lora": {"rank": 4, "target_modules": ["q_proj"]}}


def critic(path: Path, **config) -> FSDPEngine:
    """As it is loaded, unlike `make_engine`'s."""
    return FSDPEngine(str(path), EngineConfig(max_tokens=64, **config), head="value", num_training_steps=4).initialize()


def values(engine: FSDPEngine) -> Tensor:
    return engine.infer(random_batch(), ("value",))["value"]


def trained(path: Path, **config) -> FSDPEngine:
    engine = make_engine(path, head="value", config=config, optimizer={"learning_rate": 1e-2})
    engine.train_step(random_batch(), value_loss())
    assert reference.full(engine.model.head.bias).any()
    return engine


def plain_values(folder: Path) -> Tensor:
    """By transformers alone, at the positions that have a value."""
    model, report = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    batch = random_batch()
    with torch.no_grad():
        logits = [model(ids[None]).logits[0, :, 0] for ids in batch.input_ids_T.split(batch.lengths.tolist())]
    return torch.cat(logits) * batch.loss_mask_T


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Its token classifier calls the head otherwise."""
    path = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=8, n_layer=1, n_head=2)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """A reward model whose final hidden states are projected, as those of OPT-350m."""
    path = tmp_path_factory.mktemp("opt")
    config = OPTConfig(
        vocab_size=259, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=12,
        init_std=0.3, num_labels=1, max_position_embeddings=128,
    )  # fmt: skip
    OPTForSequenceClassification(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "mixtral", "deepseek-v3", "gpt2", "llama-reward"])
def test_transformers_reloads_an_exported_critic(name, tiny_model, gpt2, tmp_path):
    engine = trained(gpt2 if name == "gpt2" else tiny_model(name))
    export_hf(engine, tmp_path / "hf")
    torch.testing.assert_close(plain_values(tmp_path / "hf"), values(engine), rtol=1e-5, atol=1e-6)
    assert torch.equal(values(critic(tmp_path / "hf")), values(engine))


def test_a_critic_that_transformers_has_no_class_for_is_read_again(tiny_model, tmp_path):
    engine = trained(tiny_model("qwen2-vl"))
    export_hf(engine, tmp_path / "hf")
    again = critic(tmp_path / "hf")
    assert torch.equal(values(again), values(engine))
    reference.assert_equal(reference.weights(again), reference.weights(engine))


def test_adapters_are_merged_below_the_head(tiny_model, tmp_path):
    engine = trained(tiny_model("llama"), **ADAPTERS)
    export_hf(engine, tmp_path / "hf")
    torch.testing.assert_close(plain_values(tmp_path / "hf"), values(engine), rtol=1e-5, atol=1e-6)


def scores(path: Path) -> Tensor:
    """What a reward model says at every position that a critic has a value for."""
    engine = FSDPEngine(str(path), EngineConfig(max_tokens=64), head="score").initialize()
    return engine.infer(random_batch(), ("score",))["score"]


@pytest.mark.parametrize("name", ["llama-reward", "opt"])
def test_a_critic_starts_from_the_scores_of_a_reward_model(name, tiny_model, opt):
    path = opt if name == "opt" else tiny_model(name)
    assert scores(path).abs().max() > 0.1
    assert torch.equal(values(critic(path)), scores(path))


@pytest.mark.parametrize("config", [{}, PURE], ids=["float32", "masters"])
def test_a_critic_of_the_policys_folder_starts_from_the_head_of_another(config, tiny_model, tmp_path):
    """By ``init_from``: of a reward model, and of an exported critic."""
    reward_model = tiny_model("llama-reward")
    engine = critic(tiny_model("llama"), **config)
    load_start(engine, "critic", reward_model)
    assert torch.equal(values(engine), values(critic(reward_model, **config)))
    exported = trained(reward_model)
    export_hf(exported, tmp_path / "hf", dtype="float32")
    load_start(engine, "critic", tmp_path / "hf")
    assert torch.equal(values(engine), values(critic(tmp_path / "hf", **config)))
    assert reference.full(engine.model.head.bias).any()


@pytest.mark.parametrize("config", [PURE, PURE | ADAPTERS], ids=["all", "lora"])
def test_masters_of_the_head_are_the_weights_of_the_file(config, tiny_model):
    """Beside adapters the head is float32 itself."""
    path = tiny_model("llama-reward")
    engine = critic(path, **config)
    file = load_file(path / "model.safetensors")
    weight = engine.model.head.weight
    assert engine.optimizer is not None
    master = engine.optimizer.state.get(weight, {}).get("master")
    assert (master is None) is ("lora" in config)
    assert torch.equal(reference.full(weight if master is None else master), file["score.weight"])
    assert torch.equal(reference.full(weight).bfloat16(), file["score.weight"].bfloat16())
    assert torch.equal(reference.weights(engine)["score.weight"], file["score.weight"])


def on_two(rank: int, path: Path, folder: Path, expected: Path) -> None:
    """One of the two has the head's only row."""
    tensors = load_file(expected)
    torch.testing.assert_close(values(critic(path)), tensors["scores"])
    export_hf(critic(path, **PURE), folder / "masters")
    engine = trained(path)
    export_hf(engine, folder / "trained")
    torch.testing.assert_close(values(critic(folder / "trained")), values(engine))


@pytest.mark.dist
def test_two_processes(tiny_model, tmp_path):
    path = tiny_model("llama-reward")
    save_file({"scores": scores(path)}, tmp_path / "expected.safetensors")
    run_distributed(on_two, 2, path, tmp_path, tmp_path / "expected.safetensors")
    file = load_file(path / "model.safetensors")
    masters = load_file(tmp_path / "masters" / "model.safetensors")
    assert masters.pop("score.bias").tolist() == [0.0]
    reference.assert_equal(masters, file)


def test_a_classifier_of_several_labels_gives_a_new_head(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("llama-reward"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (path / "config.json").write_text(json.dumps(config | labels))
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"score.weight": torch.ones(2, 32)}, path / "model.safetensors", {"format": "pt"})
    assert not values(critic(path)).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score.weight": None}, r"lack score\.weight, which config\.json asks for"),
        ({"score.weight": torch.ones(2, 32)}, r"other shapes .* score\.weight \(2, 32\) instead of \(1, 32\)"),
    ],
)
def test_damaged_heads(changes, message, tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("llama-reward"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        critic(path)
