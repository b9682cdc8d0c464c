"""Adapters: an untrained one changes nothing, a trained one is what its merged weights are, and only it trains."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    ZambaForCausalLM,
)

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.models import low_rank_factors
from rlft_fast.rl import BradleyTerryLoss, PolicyLoss
from tests.engine import reference
from tests.engine.models.every_architecture import small_model
from tests.engine.reference import (
    make_engine,
    near_policy,
    policy_loss,
    random_batch,
    random_image_batch,
    value_loss,
)
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import VOCAB_SIZE

BLOCKS = {"rank": 4, "alpha": 8}
HEAD_TOO = BLOCKS | {"target_modules": ["q_proj", "down_proj", "lm_head"]}
BIG_STEPS = {"learning_rate": 0.05}


def trained(path: Path, lora: dict, steps: int = 3, **options) -> FSDPEngine:
    engine = make_engine(path, config={"lora": lora}, max_tokens=24, optimizer=BIG_STEPS, **options)
    for _ in range(steps):
        engine.train_step(random_batch(), policy_loss())
    return engine


def infer(engine: FSDPEngine) -> torch.Tensor:
    return engine.infer(random_batch(), ("logprob",))["logprob"]


@pytest.mark.parametrize("lora", [BLOCKS, HEAD_TOO], ids=["blocks", "head"])
def test_untrained_adapters_change_nothing(lora, tiny_model):
    path = tiny_model("llama")
    plain, adapted = make_engine(path), make_engine(path, config={"lora": lora})
    torch.testing.assert_close(infer(adapted), infer(plain), rtol=0, atol=1e-6)


def test_adapters_start_as_linear_layers_do(tiny_model):
    """A uniform within 1 / sqrt(in_features), B = 0: also those of layers that are wider than high."""
    engine = make_engine(tiny_model("llama"), config={"lora": HEAD_TOO})
    adapters = {name: p for name, p in engine.model.named_parameters() if "lora_" in name}
    assert {x.shape[1] for name, x in adapters.items() if "lora_A" in name} == {32, 48}
    for name, x in adapters.items():
        if "lora_A" in name:
            assert 0.9 < x.abs().max() * x.shape[1] ** 0.5 <= 1
        else:
            assert (x == 0).all()


@pytest.mark.parametrize("lora", [BLOCKS, HEAD_TOO], ids=["blocks", "head"])
@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_merged_export_is_the_trained_model(lora, name, tiny_model, tmp_path):
    if name == "qwen2-tied" and lora is HEAD_TOO:
        lora = BLOCKS | {"target_modules": ["q_proj", "down_proj"]}
    engine = trained(tiny_model(name), lora)
    export_hf(engine, tmp_path)
    logprob_T, _ = reference.plain_logprob_and_entropy(tmp_path, random_batch())
    before_T, _ = reference.plain_logprob_and_entropy(tiny_model(name), random_batch())
    assert (logprob_T - before_T).abs().max() > 0.05  # it did learn something
    torch.testing.assert_close(infer(engine).double(), logprob_T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["internvl", "gemma3-vision"])
def test_vectors_of_a_tower_are_no_experts(name, tiny_model, tmp_path):
    """Those of all positions are one tensor of three dimensions."""
    path, batch = tiny_model(name), random_image_batch(name=name)
    engine = make_engine(path, config={"lora": BLOCKS}, max_tokens=80, optimizer=BIG_STEPS)
    before_T = engine.infer(batch, ("logprob",))["logprob"]
    for _ in range(2):
        engine.train_step(near_policy(batch, before_T), policy_loss())
    export_hf(engine, tmp_path)
    logprob_T, _ = reference.plain_logprob_and_entropy(tmp_path, batch)
    assert (logprob_T - before_T).abs().max() > 0.05
    torch.testing.assert_close(
        engine.infer(batch, ("logprob",))["logprob"].double(), logprob_T, rtol=0, atol=2e-5
    )  # fmt: skip


def test_disabled_adapters_are_the_model_before(tiny_model):
    path = tiny_model("llama")
    engine = trained(path, HEAD_TOO)
    changed = infer(engine)
    with engine.disable_adapter():
        torch.testing.assert_close(infer(engine), infer(make_engine(path, max_tokens=24)), rtol=0, atol=0)
    assert torch.equal(infer(engine), changed)
    engine.train_step(random_batch(), policy_loss())  # and they train on
    assert not torch.equal(infer(engine), changed)


def test_only_adapters_train(tiny_model):
    engine = trained(tiny_model("llama"), HEAD_TOO, steps=1)
    names = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    assert names == {name.removeprefix("model.") for name in engine.state_tensors() if name.startswith("model.")}
    assert all("lora_" in name for name in names)
    assert len(names) == 2 * (2 * 3 + 1)
    assert sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"]) < 10_000


def test_gradient_is_that_of_the_merged_weight(tiny_model):
    """dB = s dW A^T and dA = s B^T dW, with dW from a model that has the merged weights."""
    path = tiny_model("llama")
    engine = make_engine(path, config={"lora": HEAD_TOO}, temperature=reference.TEMPERATURE)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in engine.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    merged = reference.weights(engine)
    batch = near_policy(random_batch(), infer(engine))
    engine.train_step(batch, policy_loss())
    whole = make_engine(path, temperature=reference.TEMPERATURE)
    whole.model.model.load_state_dict(merged, strict=False)
    whole.train_step(batch, policy_loss())
    dense, low = reference.gradients(whole), reference.gradients(engine)
    # The step has moved A and B: these are the ones before.
    fresh = make_engine(path, config={"lora": HEAD_TOO})
    down = {n: p.detach() for n, p in fresh.model.named_parameters() if "lora_A" in n}
    for name, factor in (
        ("model.model.layers.1.self_attn.q_proj", "lora_A.default.weight"),
        ("model.lm_head", "lora_A"),
    ):
        wanted = 2.0 * dense[f"{name}.weight"] @ down[f"{name}.{factor}"].T
        got = low[f"{name}.{factor.replace('lora_A', 'lora_B')}"]
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def test_unchanged_policy_has_ratio_one(tiny_model):
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(tiny_model("llama"), config={"lora": HEAD_TOO}, dtype=dtype, max_tokens=24)
        batch = random_batch()
        batch = batch.replace(old_logprob_T=infer(engine))
        assert engine.train_step(batch, PolicyLoss())["ratio_max"] == 1.0


def test_critic_with_adapters_trains_its_head_too(tiny_model):
    # Adapters outside of its blocks train in one unit of FSDP with the head.
    config = {"lora": BLOCKS, "param_dtype": "bfloat16", "cpu_offload": True}
    engine = make_engine(tiny_model("gemma4"), head="value", dtype="bfloat16", config=config, optimizer=BIG_STEPS)
    before = engine.infer(random_batch(), ("value",))["value"]
    engine.train_step(random_batch(), value_loss())
    assert not torch.equal(engine.infer(random_batch(), ("value",))["value"], before)
    assert {"model.head.weight", "model.head.bias"} <= engine.state_tensors().keys()


@pytest.mark.parametrize("target", ["all-linear", "q_proj"])
def test_reward_model_with_adapters_trains_its_head_in_full(target, tiny_model):
    config = {"lora": BLOCKS | {"target_modules": [target]}, "param_dtype": "bfloat16", "cpu_offload": True}
    path, pairs = tiny_model("llama-reward"), random_batch(6)
    engine = make_engine(path, head="score", dtype="bfloat16", config=config, optimizer=BIG_STEPS)
    before = reference.full(engine.model.head.weight)
    pairs = pairs.replace(unit_B=torch.arange(6) // 2, reward_B=torch.zeros(6))
    engine.train_step(pairs, BradleyTerryLoss())
    assert (reference.full(engine.model.head.weight) - before).abs().median() > 0.04
    assert not any("score" in name for name in low_rank_factors(engine.model))
    name = "model.score.weight"
    assert {f"model.{name}", f"optimizer.{name}.exp_avg"} <= engine.state_tensors().keys()
    frozen = make_engine(path, head="score", config={"lora": BLOCKS, "freeze": ["score.*"]})
    assert not frozen.model.head.weight.requires_grad


# Names of experts in transformers 4 are names of dense layers. Frozen experts get none.
@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (
            "qwen3-moe",
            {"lora": BLOCKS | {"target_modules": ["q_proj", "up_proj"]}},
            {*(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)), "model.layers.1.mlp.up_proj.weight"},
        ),
        (
            "mixtral",
            {"lora": BLOCKS, "freeze": ("*.experts.*",)},
            {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(3) for x in "qkvo"},
        ),
    ],
    ids=["dense", "frozen"],
)
def test_linear_layers_beside_experts(name, config, expected, tiny_model):
    assert low_rank_factors(make_engine(tiny_model(name), config=config).model).keys() == expected


def test_layers_of_mamba(tmp_path):
    """peft refuses them, for kernels that leave adapters out in train mode. Models are in eval mode here."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "mamba_d_ssm": 32,
        "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    FalconH1ForCausalLM(FalconH1Config(**sizes)).save_pretrained(tmp_path / "model")
    engine = trained(tmp_path / "model", BLOCKS)
    assert {"in_proj", "out_proj", "q_proj"} <= {name.split(".")[-2] for name in low_rank_factors(engine.model)}
    export_hf(engine, tmp_path / "hf")
    start, merged = (infer(make_engine(tmp_path / name)) for name in ("model", "hf"))
    assert (infer(engine) - start).abs().max() > 0.1
    torch.testing.assert_close(infer(engine), merged, rtol=0, atol=1e-4)


def test_all_adapters_learn_beside_layers_that_are_never_called(tmp_path):
    """Mamba multiplies by the weight of its time steps itself."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    engine = trained(tmp_path, BLOCKS, steps=1)
    names = {"in_proj", "x_proj", "out_proj"}
    assert {name.split(".")[-2] for name in low_rank_factors(engine.model)} == names
    assert all(lora_B.any() for lora_B, _, _ in low_rank_factors(engine.model).values())
    with pytest.raises(ValueError, match="has dt_proj, whose weight is read by the layer around it, past an adapter"):
        make_engine(tmp_path, config={"lora": BLOCKS | {"target_modules": ["in_proj", "dt_proj"]}})


def test_weights_of_several_layers_have_no_adapters(tmp_path):
    """A merged Zamba would have the first layer's adapter in all layers that share the weight."""
    small_model("zamba", ZambaForCausalLM).save_pretrained(tmp_path)
    message = r"adapt model\.layers\.2\.shared_transf.*, whose weight .* is that of another layer, too.*\(in_proj\)"
    with pytest.raises(ValueError, match=message):
        make_engine(tmp_path, config={"lora": BLOCKS | {"target_modules": ["q_proj", "in_proj"]}})
    engine = make_engine(tmp_path, config={"lora": BLOCKS | {"target_modules": ["in_proj"]}})
    assert {name.split(".")[-2] for name in low_rank_factors(engine.model)} == {"in_proj"}


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ["no_such_layer"], "do not fit LlamaForCausalLM"),
        ("llama", ["q_proj", "proj"], "has proj, but LlamaForCausalLM has no such layer"),
        ("llama", ["q_proj", "embed_tokens"], r"adapt model\.embed_tokens, .* is no plain torch\.nn\.Linear"),
        ("gpt2", ["all-linear"], r"adapt transformer\.h\.0\.attn\.c_attn, .* is no plain torch\.nn\.Linear"),
        ("llama4", ["q_proj", "router"], r"adapt model\.layers\.\d\.feed_forward\.router, .* is no plain torch"),
        (
            "llama4",
            ["all-linear"],
            r"the experts of Llama4ForCausalLM \(model.layers.*gate_up_proj\), which are no linear",
        ),
        ("mixtral", ["down_proj"], "lora.rank is 12, but adapters of experts need a multiple of 8"),
        ("llama-tied", ["q_proj", "lm_head"], "tied to the embedding"),
        ("llama-reward", ["q_proj", "score"], "has score, the head of a reward model, which is trained in full beside"),
    ],
)
def test_refused_by_name(name, targets, message, tiny_model, tmp_path):
    if name == "gpt2":  # its weights are (in, out)
        GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    path = tmp_path if name == "gpt2" else tiny_model(name)
    head = "score" if name == "llama-reward" else "logprob"
    with pytest.raises(ValueError, match=message):
        make_engine(path, head=head, config={"lora": {"target_modules": targets, "rank": 12}})


def test_engine_without_adapters_has_none_to_disable(tiny_model):
    engine = FSDPEngine(str(tiny_model("llama")), EngineConfig()).initialize()
    with pytest.raises(ValueError, match="no adapters to disable"):
        engine.disable_adapter()


def check_two(rank: int, path: Path, output: Path) -> None:
    wanted = torch.load(output / "one.pt")
    engine = trained(path, HEAD_TOO)
    torch.testing.assert_close(infer(engine), wanted["trained"], rtol=0, atol=1e-4)
    with engine.disable_adapter():
        torch.testing.assert_close(infer(engine), wanted["before"], rtol=0, atol=1e-6)
    export_hf(engine, output / "hf")


@pytest.mark.dist
def test_two_processes(tiny_model, tmp_path):
    path = tiny_model("llama")
    one = {"before": infer(make_engine(path)), "trained": infer(trained(path, HEAD_TOO))}
    torch.save(one, tmp_path / "one.pt")
    run_distributed(check_two, 2, path, tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    logprob_T, _ = reference.plain_logprob_and_entropy(tmp_path / "hf", random_batch())
    torch.testing.assert_close(one["trained"].double(), logprob_T, rtol=0, atol=1e-4)
