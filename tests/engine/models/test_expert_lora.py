"""Adapters of experts: what they learn is what their merged weights are, with transformers' gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PhimoeForCausalLM

from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.models import adapter_parameters, low_rank_factors
from tests.engine import reference
from tests.engine.models.every_architecture import small_model
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model

LORA = {"rank": 8, "alpha": 16}
EXPERTS = ("gate_up_proj", "down_proj")


def moved(path: Path, **options) -> FSDPEngine:
    """An engine whose adapters are no longer without effect."""
    engine = make_engine(path, config={"lora": LORA | options}, temperature=reference.TEMPERATURE, max_tokens=48)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return engine


# gpt-oss has biases, and matrices of (in, out); Qwen3-MoE has a dense layer, whose down_proj is a linear layer.
@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-moe", "deepseek-v3", "qwen3.5-moe"])
def test_gradients_are_those_of_the_merged_weights(name, tiny_model, tmp_path):
    """With W = W_0 + s B A, the gradients are dB = s dW A^T and dA = s B^T dW."""
    engine, batch = moved(tiny_model(name)), random_batch()
    export_hf(engine, tmp_path)
    factors = {key: x for key, x in low_rank_factors(engine.model).items() if key.endswith(EXPERTS)}
    assert len(factors) == 2 * sum("experts.down_proj" in key for key in factors) > 0
    doubles = {key: (up.detach().double(), down.detach().double(), s) for key, (up, down, s) in factors.items()}
    plain = reference.PlainPolicy(tmp_path, batch)
    batch, outputs = near_policy(batch, plain.logprob_T.float()), {}
    engine.train_step(batch, policy_loss(), outputs=outputs)
    torch.testing.assert_close(outputs["logprob"].double(), plain.logprob_T, rtol=0, atol=5e-5)
    wanted, found = plain.gradients(batch, "token-mean"), reference.gradients(engine)
    is_transposed = name == "gpt-oss"
    for key, (up, down, scale) in doubles.items():
        gradient = wanted[f"model.{key}"]
        d_up, d_down = scale * gradient @ down.mT, scale * up.mT @ gradient
        module, _, matrix = key.rpartition(".")
        own_B, own_A = (found[f"model.{module}.lora_{factor}_{matrix}"] for factor in "BA")
        if is_transposed:
            own_A, own_B = own_B.mT, own_A.mT
        assert d_up.abs().max() > 1e-3
        reference.assert_close({"up": own_B, "down": own_A}, {"up": d_up, "down": d_down}, 5e-5)


def logprob(engine: FSDPEngine) -> Tensor:
    return engine.infer(random_batch(), ("logprob",))["logprob"]


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"], ["gate_up_proj"]])
def test_targets_and_the_model_without_adapters(targets, tiny_model):
    path = tiny_model("qwen3-moe")
    engine = moved(path, target_modules=targets)
    plain = logprob(make_engine(path, temperature=reference.TEMPERATURE))
    assert (logprob(engine) - plain).abs().max() > 0.02
    with engine.disable_adapter():
        torch.testing.assert_close(logprob(engine), plain, rtol=0, atol=2e-6)
    matrices = {key.rpartition(".")[2] for key in low_rank_factors(engine.model) if ".experts." in key}
    assert matrices == {*EXPERTS} & ({*EXPERTS} if targets == ["all-linear"] else {*targets})
    dense = [key for key in low_rank_factors(engine.model) if key.endswith("mlp.down_proj.weight")]
    assert len(dense) == (targets != ["gate_up_proj"])


def test_adapters_of_one_dtype_beside_bfloat16_weights(tiny_model):
    """FSDP, which the second engine has, takes one dtype of all that a block trains: peft's are float32."""
    found = []
    for is_sharded in (False, True):
        config = {"lora": LORA, "param_dtype": "bfloat16", "cpu_offload": is_sharded}
        engine = make_engine(tiny_model("mixtral"), dtype="bfloat16", config=config, optimizer={"learning_rate": 0.01})
        assert {x.dtype for x in adapter_parameters(engine.model).values()} == {torch.float32}
        start = logprob(engine)
        engine.train_step(random_batch(), policy_loss())
        found.append(logprob(engine))
        assert (found[-1] - start).abs().max() > 0.02
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_a_router_that_is_a_linear_layer_has_none(tmp_path):
    """It returns more than a linear layer does."""
    small_model("phimoe", PhimoeForCausalLM).save_pretrained(tmp_path)
    engine = make_engine(tmp_path, config={"lora": LORA})
    adapted = {key.split(".")[-2] for key in low_rank_factors(engine.model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}


def test_files_of_adapters_have_no_place_for_experts(tiny_model, tmp_path):
    with pytest.raises(
        ValueError, match=r"no place for adapters of experts \(model.layers.0.mlp.experts.gate_up_proj\)"
    ):
        export_hf(moved(tiny_model("mixtral")), tmp_path, adapter=True)


@pytest.mark.slow
def test_experts_are_compiled_in_float32(tiny_model):
    """torch.compile knows the grouped product of bfloat16 alone."""
    engine = moved(tiny_model("mixtral"))
    experts = next(module for _, module in engine.model.named_modules() if hasattr(module, "adapters"))
    hidden, weights = torch.randn(5, 32), torch.rand(5, 2)
    chosen = torch.tensor([[0, 1], [3, 2], [11, 0], [5, 4], [1, 0]])
    with torch.no_grad():
        compiled = torch.compile(experts.forward, backend="eager")(hidden, chosen, weights)
        assert torch.equal(compiled, experts(hidden, chosen, weights))


def trained(path: Path) -> FSDPEngine:
    engine = make_engine(path, config={"lora": LORA}, max_tokens=24, optimizer={"learning_rate": 0.01})
    for _ in range(2):
        engine.train_step(random_batch(), policy_loss())
    return engine


def check_two(rank: int, path: Path) -> None:
    engine = trained(path)
    torch.testing.assert_close(logprob(engine), torch.load(path / "one.pt"), rtol=0, atol=1e-4)
    export_hf(engine, path / "hf")


@pytest.mark.dist
def test_two_processes(tmp_path):
    path = save_tiny_model("mixtral", tmp_path / "mixtral")
    one = logprob(trained(path))
    torch.save(one, path / "one.pt")
    run_distributed(check_two, 2, path)
    merged_T, _ = reference.plain_logprob_and_entropy(path / "hf", random_batch())
    torch.testing.assert_close(one.double(), merged_T, rtol=0, atol=1e-4)
