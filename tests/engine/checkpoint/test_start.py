"""Weights to start from: of a checkpoint of any precision, of an export, and of an adapter of PEFT."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlft_fast.engine import CheckpointManager, FSDPEngine, export_hf
from rlft_fast.engine.checkpoint import find_start, load_start
from rlft_fast.models import low_rank_factors
from rlft_fast.rl import BradleyTerryLoss
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed

NARROW = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
LORA = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj", "lm_head"]}}


def trained(path, config=None) -> FSDPEngine:
    engine = make_engine(path, config=dict(config or {}), optimizer={"learning_rate": 0.05})
    engine.train_step(random_batch(), policy_loss())
    return engine


def masters(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Trained weights in full precision."""
    named = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    return {name: engine.optimizer.state.get(p, {}).get("master", p).detach().clone() for name, p in named.items()}


@pytest.mark.parametrize("saved", [{}, NARROW], ids=["float32", "masters"])
@pytest.mark.parametrize("own", [{}, NARROW], ids=["float32", "masters"])
def test_weights_of_a_checkpoint(saved, own, tiny_model, tmp_path):
    """A master is the weight, whichever of the two engines has masters; the optimizer and the schedule are new."""
    path = tiny_model("llama")
    source = trained(path, saved)
    CheckpointManager(tmp_path / "checkpoints").save(7, {"actor": source}, {})
    engine = make_engine(path, config=dict(own))
    load_start(engine, "actor", tmp_path / "checkpoints" / "step_00000007")
    expected = masters(source)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in masters(engine).items())
    rounded = {name: p.detach().float() for name, p in engine.model.named_parameters()}
    assert all(torch.equal(x, expected[name].to(engine.model.get_parameter(name).dtype)) for name, x in rounded.items())
    assert engine.step == 0
    assert not any(x.any() for name, x in engine.state_tensors().items() if name.endswith("exp_avg"))


def test_an_adapter_goes_to_peft_and_comes_back(tiny_model, tmp_path):
    path = tiny_model("llama")
    source = trained(path, LORA)
    export_hf(source, tmp_path / "adapter", adapter=True)
    assert {x.name for x in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", ".export.json",
    }  # fmt: skip
    tokens = torch.arange(12)[None]
    merged, base = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for _ in range(2))
    before = base(tokens).logits
    with torch.no_grad():
        for name, (lora_B, lora_A, scale) in low_rank_factors(source.model).items():
            merged.get_parameter(name).add_(scale * lora_B.double() @ lora_A.double())
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).double()
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-12)
    assert (before - merged(tokens).logits).abs().max() > 1e-3
    own = make_engine(path, config=LORA)
    load_start(own, "actor", tmp_path / "adapter")
    expected = masters(source)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in masters(own).items())
    adapted.save_pretrained(
        tmp_path / "theirs", save_embedding_layers=False
    )  # PEFT's own file has the same names and values
    load_start(own, "actor", tmp_path / "theirs")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in masters(own).items())


def test_an_adapter_of_a_reward_model_has_its_head(tiny_model, tmp_path):
    path, tokens = tiny_model("llama-reward"), torch.arange(12)[None]
    lora = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}}
    source = make_engine(path, head="score", config=lora, optimizer={"learning_rate": 0.05})
    pairs = random_batch(6).replace(unit_B=torch.arange(6) // 2, reward_B=torch.zeros(6))
    source.train_step(pairs, BradleyTerryLoss())
    export_hf(source, tmp_path / "hf")
    export_hf(source, tmp_path / "adapter", adapter=True)
    base, merged = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
        for folder in (path, tmp_path / "hf")
    )
    before = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).double()
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-6, atol=1e-5)
    assert (before - merged(tokens).logits).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    for name in ("adapter", "theirs"):
        own = make_engine(path, head="score", config=lora)
        load_start(own, "actor", tmp_path / name)
        reference.assert_equal(masters(own), masters(source))
    with pytest.raises(ValueError, match=r"no place for base_model\.model\.score\.weight"):
        load_start(make_engine(tiny_model("llama"), config=lora), "actor", tmp_path / "adapter")


def start_sharded(rank, path, folder):
    for name, config in (("adapter", LORA), ("narrow/step_00000007", NARROW)):
        engine = make_engine(path, config=dict(config))
        load_start(engine, "actor", folder / name)
        if name == "adapter":
            export_hf(engine, folder / "again", adapter=True)
        else:
            CheckpointManager(folder / "two").save(7, {"actor": engine}, {})


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_start_from_the_same_bits(tiny_model, tmp_path):
    path = tiny_model("llama")
    export_hf(trained(path, LORA), tmp_path / "adapter", adapter=True)
    source = trained(path, NARROW)
    CheckpointManager(tmp_path / "narrow").save(7, {"actor": source}, {})
    run_distributed(start_sharded, 2, path, tmp_path)
    first, again = (load_file(tmp_path / x / "adapter_model.safetensors") for x in ("adapter", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    own = make_engine(path, config=dict(NARROW))
    load_start(own, "actor", tmp_path / "two" / "step_00000007")
    expected = masters(source)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in masters(own).items())


@pytest.mark.parametrize("head", ["logprob", "value"])
def test_weights_of_a_model_that_computes_something_else_are_refused(head, tiny_model, tmp_path):
    """Their names and shapes are the same."""
    path = tiny_model("llama")
    export_hf(make_engine(path), tmp_path / "hf")
    engine = make_engine(path, head=head)
    load_start(engine, "actor", tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    for changes, message in (
        (heads, "has num_attention_heads 2 instead of 4, num_key_value_heads 1 instead of 2: give weights of Llama"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "has model_type 'mistral' instead of 'll"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(written | changes))
        with pytest.raises(ValueError, match=message):
            load_start(engine, "actor", tmp_path / "hf")


def test_an_adapter_that_does_not_fit_is_refused(tiny_model, tmp_path):
    path, adapter = tiny_model("llama"), tmp_path / "adapter"
    export_hf(make_engine(path, config=LORA), adapter, adapter=True)
    with pytest.raises(ValueError, match=r"the model has no adapters, which the adapter in .* needs: set lora"):
        load_start(make_engine(path), "actor", adapter)
    with pytest.raises(ValueError, match=r"has rank 4 and alpha 8, but lora\.rank is 2"):
        load_start(make_engine(path, config={"lora": {"rank": 2}}), "actor", adapter)
    other = {"lora": LORA["lora"] | {"target_modules": ["q_proj"]}}
    with pytest.raises(ValueError, match=r"no place for .*lora_A.*Name the adapter's layers in lora\.target_modules"):
        load_start(make_engine(path, config=other), "actor", adapter)
    with pytest.raises(ValueError, match="no adapters: set lora"):
        export_hf(make_engine(path), tmp_path / "none", adapter=True)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(ValueError, match="has use_dora: True, and only W x"):
        find_start(adapter)
    with pytest.raises(ValueError, match="is none of these: give the folder of a run"):
        find_start(tmp_path)


def test_adapters_of_another_alpha_are_refused(tiny_model, tmp_path):
    path = tiny_model("llama")
    CheckpointManager(tmp_path / "checkpoints").save(7, {"actor": make_engine(path, config=LORA)}, {})
    start = tmp_path / "checkpoints" / "step_00000007"
    other = make_engine(path, config={"lora": LORA["lora"] | {"alpha": 4}})
    with pytest.raises(ValueError, match=r"trained with lora\.alpha 8, and lora\.alpha is 4 here: give lora the alpha"):
        load_start(other, "actor", start)
    load_start(make_engine(path, config=LORA), "actor", start)


def test_an_adapter_that_has_changed_its_model_is_refused(tiny_model, tmp_path):
    """PiSSA takes B A out of the weights, so that the adapter beside the folder's own weights is another model."""
    path, tokens = tiny_model("llama"), torch.arange(12)[None]
    for kind in ("gaussian", "pissa", "olora"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        before, weight = model(tokens).logits, model.model.layers[0].self_attn.q_proj.weight.clone()
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=kind)
        adapted = peft.get_peft_model(model, config)
        torch.testing.assert_close(adapted(tokens).logits, before, rtol=0, atol=1e-4)
        adapted.save_pretrained(tmp_path / kind, save_embedding_layers=False)
        base = model.model.layers[0].self_attn.q_proj.base_layer.weight
        assert torch.equal(base, weight) == (kind == "gaussian")
    assert find_start(tmp_path / "gaussian") == tmp_path / "gaussian"
    for kind in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f"has init_lora_weights: '{kind}', and only W x"):
            find_start(tmp_path / kind)
    config = tmp_path / "gaussian" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [5, 6]}))
    with pytest.raises(ValueError, match=r"has alora_invocation_tokens: \[5, 6\], and only W x"):
        find_start(tmp_path / "gaussian")


def test_an_export_and_the_checkpoint_of_another_shape(tiny_model, tmp_path):
    path = tiny_model("llama")
    source = trained(path)
    export_hf(source, tmp_path / "hf")
    engine = make_engine(path)
    load_start(engine, "actor", tmp_path / "hf")
    expected = masters(source)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in masters(engine).items())
    CheckpointManager(tmp_path / "checkpoints").save(7, {"actor": source}, {})
    adapted = make_engine(path, config=LORA)
    with pytest.raises(ValueError, match=r"the checkpoint lacks .*lora_.*export the earlier run"):
        load_start(adapted, "actor", tmp_path / "checkpoints" / "step_00000007")


def test_a_part_of_a_checkpoint(tiny_model, tmp_path):
    """Without strict, what both have in one shape is filled, and all else is named."""
    path = tiny_model("llama")
    source = trained(path)
    manager = CheckpointManager(tmp_path)
    manager.save(7, {"actor": source}, {"round": 2})
    critic = make_engine(path, head="value")
    before = masters(critic)
    loaded = manager.load_part({"actor": critic}, strict=False, optimizer=False, scheduler=False)
    assert (loaded.state, loaded.folder) == ({"round": 2}, tmp_path / "step_00000007")
    assert loaded.missing["actor"]
    assert set(loaded.missing["actor"]) | set(loaded.tensors["actor"]) == {f"model.{name}" for name in before}
    assert "model.model.lm_head.weight" in loaded.unused["actor"]
    for name in loaded.missing["actor"]:
        assert torch.equal(masters(critic)[name.removeprefix("model.")], before[name.removeprefix("model.")])
    again = make_engine(path)
    whole = manager.load_part({"actor": again}, scheduler=False)
    assert (whole.missing["actor"], whole.unused["actor"], again.step) == ([], [], 0)
    state = source.state_tensors()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_tensors().items())
    assert manager.load_part({"actor": again}, 3) is None
