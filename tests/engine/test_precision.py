"""float32, bfloat16 over float32 weights, and bfloat16 weights with float32 masters in the optimizer."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, MambaForCausalLM

from rlft_fast.config import EngineConfig
from rlft_fast.engine.sharding import build
from rlft_fast.models import build_policy
from rlft_fast.rl import PolicyLoss
from tests.engine import reference
from tests.engine.models.every_architecture import small_model
from tests.engine.reference import make_engine, policy_loss, random_batch
from tests.support.tiny_models import VOCAB_SIZE

PURE = {"param_dtype": "bfloat16"}


def test_masters_are_the_weights_of_the_file(tiny_model):
    """Made from the bfloat16 weights they would be rounded, and most of the file's information lost."""
    path = tiny_model("llama")
    engine = make_engine(path, dtype="bfloat16", config=PURE)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    file = load_file(path / "model.safetensors")
    weights = reference.weights(engine)
    reference.assert_equal(weights, {name: file[name] for name in weights})
    for name, parameter in engine.model.model.named_parameters():
        assert torch.equal(reference.full(parameter), file[name].bfloat16())


def make_ernie() -> Ernie4_5_MoeForCausalLM:
    """One dense layer, and one with experts."""
    config = Ernie4_5_MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
        pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Ernie4_5_MoeForCausalLM(config)


@pytest.mark.parametrize("config", [{}, PURE], ids=["mixed", "pure"])
def test_biases_of_routers_choose_in_float32(config, tmp_path):
    """Ernie's are parameters, and all 1 in bfloat16. Its experts are equally probable here."""
    model = make_ernie()
    router = model.model.layers[1].mlp.gate
    torch.nn.init.zeros_(router.weight)
    bias = torch.tensor([[1.0, 1.0003, 1.0001, 1.0002]])
    router.moe_statics.e_score_correction_bias.data.copy_(bias)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, dtype="bfloat16", config=config)
    experts_TK = engine.infer(random_batch(), ("routed_experts",))["routed_experts"]
    assert {tuple(sorted(own)) for own in experts_TK.tolist()} == {(0, 0), (1, 3)}  # 0 for tokens that do not run
    sent = dict(engine.named_weights(torch.bfloat16))
    assert torch.equal(next(x for name, x in sent.items() if name.endswith("e_score_correction_bias")), bias)


def test_weights_that_a_class_makes_in_float32_have_masters(tmp_path):
    """Those of Ernie's routers."""
    make_ernie().save_pretrained(tmp_path)
    engine = make_engine(tmp_path, dtype="bfloat16", config=PURE)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    name, file = "model.layers.1.mlp.gate.weight", load_file(tmp_path / "model.safetensors")
    before = reference.weights(engine)[name]
    assert torch.equal(before, file[name])
    engine.train_step(random_batch(), policy_loss())
    assert not torch.equal(reference.weights(engine)[name], before)


def test_a_policy_that_rounds_its_hidden_states_for_its_head(tmp_path):
    small_model("mamba", MambaForCausalLM).save_pretrained(tmp_path)
    assert build_policy(tmp_path, torch.bfloat16).hidden_scale == 1.0


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_policy_is_accepted_whatever_torch_rounds_float32_products_to(precision, tiny_model, tmp_path):
    """On CPUs with bfloat16, "medium" moves log-probabilities of large weights by 0.3: rounding, no architecture."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "large")
    file = folder / "model.safetensors"
    save_file({name: 30 * x if x.dim() > 1 else x for name, x in load_file(file).items()}, file, {"format": "pt"})
    torch.set_float32_matmul_precision(precision)
    try:
        make_engine(folder)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_steps_smaller_than_a_bfloat16_ulp_are_not_lost(tiny_model):
    """A learning rate of 1e-6 moves no bfloat16 weight in one step, and many steps add up in the masters."""
    small = {"learning_rate": 1e-6, "eps": 1e-8}
    pure = make_engine(tiny_model("llama"), dtype="bfloat16", config=PURE, optimizer=small)
    mixed = make_engine(tiny_model("llama"), dtype="bfloat16", optimizer=small)
    before = reference.weights(pure)
    for engine in (pure, mixed):
        for _ in range(5):
            engine.train_step(random_batch(), policy_loss())
    moved = {name: weight - before[name] for name, weight in reference.weights(pure).items()}
    wanted = {name: weight - before[name] for name, weight in reference.weights(mixed).items()}
    ratio = sum((moved[n] * wanted[n]).sum() for n in moved) / sum(wanted[n].square().sum() for n in wanted)
    # Equal up to the noise of bfloat16 gradients, whose signs decide AdamW's first steps; lost steps would give 0.
    assert 0.9 < ratio < 1.1


def test_master_and_weight_never_part(tiny_model):
    engine = make_engine(tiny_model("qwen2-tied"), dtype="bfloat16", config=PURE)
    engine.train_step(random_batch(), policy_loss())
    assert engine.optimizer is not None
    for parameter in engine.model.parameters():
        master = reference.full(engine.optimizer.state[parameter]["master"])
        assert master.dtype == torch.float32
        assert torch.equal(reference.full(parameter), master.bfloat16())


@pytest.mark.parametrize("config", [{}, PURE], ids=["mixed", "pure"])
def test_unchanged_policy_has_ratio_one(config, tiny_model):
    engine = make_engine(tiny_model("llama"), dtype="bfloat16", max_tokens=24, config=config)
    batch = random_batch()
    batch = batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
    assert engine.train_step(batch, PolicyLoss())["ratio_max"] == 1.0


def test_gradients_of_many_micro_batches_are_added_in_float32(tiny_model):
    """64 micro-batches of one sequence each against one of all: in bfloat16 sums would drift by whole percents."""
    many, one = (
        make_engine(tiny_model("llama"), dtype="bfloat16", max_tokens=cap, config=PURE) for cap in (24, 100_000)
    )
    batch = random_batch(64)
    norms = [engine.train_step(batch, policy_loss())["grad_norm"] for engine in (many, one)]
    assert math.isclose(*norms, rel_tol=5e-3)


@pytest.mark.parametrize("config", [{}, PURE, {"lora": {"rank": 4}}], ids=["mixed", "pure", "lora"])
@pytest.mark.parametrize("head", ["value", "score"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["narrow", "fsdp"])
def test_values_and_scores_are_sums_in_float32(is_wrapped, head, config, tiny_model, monkeypatch):
    """In bfloat16, those near 10 would be multiples of 1/16."""
    monkeypatch.setattr(build, "is_wrapped", lambda *_: is_wrapped)
    engine = make_engine(tiny_model("llama-reward"), max_tokens=1000, dtype="bfloat16", head=head, config=config)
    torch.nn.init.constant_(engine.model.head.weight, 2.0)
    hidden, batch = [], random_batch()
    engine.model.head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    found = engine.infer(batch, (head,))[head][batch.loss_mask_T]
    assert {x.dtype for x in hidden} == {torch.bfloat16}
    wanted = 2.0 * torch.cat(hidden).double().sum(-1)
    assert wanted.abs().max() > 10
    torch.testing.assert_close(found.sort().values, wanted.float().sort().values, rtol=1e-5, atol=1e-4)


def test_pure_bfloat16_cannot_compute_in_float32():
    with pytest.raises(
        ValueError, match="float32 weights cannot be gathered from bfloat16: set compute_dtype: bfloat16"
    ):
        EngineConfig(param_dtype="bfloat16", compute_dtype="float32")
