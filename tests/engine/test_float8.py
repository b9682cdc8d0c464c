"""Linear layers in float8, which a CPU emulates: what float8 may cost in digits, and that all else stays as it is."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.engine.memory.engine import _FLOAT8, inference_bytes, plan_engine_memory
from rlft_fast.engine.memory.tracker import MemoryTracker
from rlft_fast.engine.sharding import build_model, float8_layers, multiply_in_float8
from rlft_fast.engine.sharding.float8 import _check_capability
from rlft_fast.rl import LikelihoodLoss, PolicyLoss
from tests.engine import reference
from tests.engine.memory.planned import save_config
from tests.engine.reference import make_engine, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import VOCAB_SIZE

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TORCHAO = find_spec("torchao")
needs_torchao = pytest.mark.skipif(TORCHAO is None, reason="no torchao: make test-peers")
emulated = pytest.mark.filterwarnings("ignore:float8 is emulated on a CPU")


def peers(test: Any) -> Any:
    return pytest.mark.peers(needs_torchao(emulated(test)))


def float8_engine(path: Path, recipe: str | None = "rowwise", **options: Any) -> FSDPEngine:
    config = {"float8": recipe} | options.pop("config", {})
    return make_engine(path, dtype="bfloat16", config=config, **options)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(TORCHAO is not None, reason="torchao is installed")
def test_without_torchao(tiny_model):
    with pytest.raises(
        ValueError, match="float8 is rowwise, which needs torchao: pip install torchao, or leave float8"
    ):
        float8_engine(tiny_model("llama"))


def test_the_oldest_gpu():
    for capability in ((8, 9), (9, 0), (12, 0)):
        _check_capability(capability, "NVIDIA")
    with pytest.raises(ValueError, match=r"float8 needs a GPU of compute capability 8\.9 .*, and NVIDIA A100 has 8\.0"):
        _check_capability((8, 0), "NVIDIA A100")


def test_products_are_rounded_to_bfloat16():
    with pytest.raises(
        ValueError, match=r"float8 is tensorwise and compute_dtype is float32.*set compute_dtype: bfloat"
    ):
        EngineConfig(float8="tensorwise", compute_dtype="float32")
    assert EngineConfig(float8="tensorwise").for_device("cpu").compute_dtype == "bfloat16"


def test_sizes_that_no_gemm_takes(tiny_model):
    config = EngineConfig(float8="rowwise", compute_dtype="bfloat16")
    model = build_model(str(tiny_model("deepseek-v3")), config, "logprob", trains=True)
    wrong = (
        r"multiples of 16, and DeepseekV3ForCausalLM has model\.model\.layers\.0\.self_attn\.q_a_proj \(32 to 12\), "
    )
    with pytest.raises(ValueError, match=wrong):
        multiply_in_float8(model, config, torch.device("cpu"))


def test_a_module_of_ones_own():
    with pytest.raises(ValueError, match="float8 is for models of transformers in folders"):
        FSDPEngine.from_module(nn.Linear(16, 16), EngineConfig(float8="rowwise"))


# ---- which layers ---------------------------------------------------------------------------------------------------

_ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
_MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


# Adapters stay in bfloat16, and so do routers, gates of shared experts, experts, the embedding, and heads.
@pytest.mark.parametrize(
    ("name", "lora", "expected"),
    [
        ("llama", None, {f"model.model.layers.{i}.{x}" for i in range(3) for x in _ATTENTION | _MLP}),
        (
            "llama-tied",
            {"rank": 4, "target_modules": ["q_proj"]},
            {f"model.model.layers.{i}.{x}" for i in range(3) for x in (_ATTENTION | _MLP) - {"self_attn.q_proj"}}
            | {f"model.model.layers.{i}.self_attn.q_proj.base_layer" for i in range(3)},
        ),
        (
            "qwen3-moe",
            None,
            {f"model.model.layers.{i}.{x}" for i in range(3) for x in _ATTENTION}
            | {f"model.model.layers.1.{x}" for x in _MLP},
        ),
    ],
)
def test_linear_layers_of_the_blocks(name, lora, expected, tiny_model):
    config = EngineConfig(**({} if lora is None else {"lora": lora}))
    model = build_model(str(tiny_model(name)), config, "logprob", trains=True)
    assert {name for name, _ in float8_layers(model)} == expected


def test_gates_of_shared_experts_stay(tiny_model):
    model = build_model(str(tiny_model("qwen3.5-moe")), EngineConfig(), "logprob", trains=True)
    linear = {name for name, x in model.model.named_modules() if type(x) is nn.Linear}
    assert any("shared_expert_gate" in name for name in linear)
    assert not any("gate" in name.split(".")[-1] for name, _ in float8_layers(model) if "gate_proj" not in name)


# ---- a GPU's shapes and memory ---------------------------------------------------------------------------------------


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens_on_a_gpu(recipe, tiny_model):
    """On tensors without elements, torch refuses the shapes that the GEMMs of a GPU do not take."""
    config = EngineConfig(float8=recipe, compute_dtype="bfloat16", param_dtype="bfloat16")
    model = build_model(str(tiny_model("llama")), config, "logprob", trains=True)
    multiply_in_float8(model, config, torch.device("cuda"))
    layer = model.get_submodule("model.model.layers.0.mlp.up_proj")
    for num_tokens in (1, 7, 16, 33):
        x = torch.empty(1, num_tokens, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
    a, scale = x.new_empty(16, 24, dtype=torch.float8_e4m3fn), x.new_empty(())
    with pytest.raises(RuntimeError, match="divisible by 16"):
        torch._scaled_mm(a, a.t(), scale, scale)


class Context:
    """Of an autograd function whose two passes are called one after the other."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


# More tokens than columns, as many, and fewer; more inputs than outputs and fewer; a number that has to be padded.
@peers
@pytest.mark.parametrize("sizes", [(4096, 256, 768), (4099, 768, 256), (512, 512, 512), (17, 256, 768)])
def test_casts_take_no_more_than_the_plan_says(sizes):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    (num_tokens, k, n), bfloat16 = sizes, torch.bfloat16
    for recipe in RECIPES:
        options = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
        layer = Float8Linear(k, n, bias=False, config=options, device="meta")
        with MemoryTracker("") as tracker, torch.no_grad():
            x, weight = torch.empty(num_tokens, k, dtype=bfloat16), torch.empty(n, k, dtype=bfloat16)
            kept, context = tracker.notes[-1].num_bytes, Context()
            tracker.mark(("forward",))
            y = matmul_with_hp_or_float8_args.forward(context, x, weight.t(), layer.linear_mm_config, options)
            gradient = torch.empty_like(y)
            tracker.mark(("backward",))
            found = matmul_with_hp_or_float8_args.backward(context, gradient)
        most = {moment: max(x.num_bytes for x in tracker.notes if x.moment == (moment,)) - kept
                for moment in ("forward", "backward")}  # fmt: skip
        casts = max(most["forward"] - y.nbytes, most["backward"] - 2 * y.nbytes - sum(x.nbytes for x in found[:2]))
        assert 0.5 * _FLOAT8 < casts / max(num_tokens * k, num_tokens * n, k * n) <= _FLOAT8, (recipe, casts)


def test_a_plan_counts_the_casts_of_the_largest_layer(tmp_path):
    path = str(save_config(tmp_path, width=256))
    model = build_model(path, EngineConfig(), "logprob", trains=True)
    largest = max(max(1024 * max(x.weight.shape), x.weight.numel()) for _, x in float8_layers(model))
    for plan in (partial(plan_engine_memory, head="value"), partial(inference_bytes, head="value")):
        configs = (EngineConfig(max_tokens=1024, float8=recipe) for recipe in (None, "rowwise"))
        plain, casts = (plan(path, config, 1, device_type="cuda") for config in configs)
        sizes = [x if isinstance(x, int) else x.total_bytes for x in (plain, casts)]
        assert sizes[1] - sizes[0] == _FLOAT8 * largest


# ---- numbers --------------------------------------------------------------------------------------------------------

_ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
_E4M3, _E5M2 = _ROUNDOFF.values()
# Of the operands of the three products by recipe: output, gradient of the input, gradient of the weight.
_ROUNDOFFS = {
    "tensorwise": ((_E4M3, _E4M3), (_E5M2, _E4M3), (_E5M2, _E4M3)),
    "rowwise": ((_E4M3, _E4M3), (_E4M3, _E4M3), (_E4M3, _E4M3)),
    "rowwise_with_gw_hp": ((_E4M3, _E4M3), (_E4M3, _E4M3), (0.0, 0.0)),
}


class RoundedProduct(torch.autograd.Function):
    """x Wᵀ whose operands are off by up to the format's unit roundoff, each number by a share drawn at random.

    The root mean square of this share is u / √3. Rounding to nearest has u / √3 for a mantissa of 1 alone, and over all
    mantissas m in [1, 2), whose density is 1 / (m ln 2), u / √3 · √(3 / (8 ln 2)) = 0.74 u / √3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.roundoffs = _ROUNDOFFS[recipe]
        return off(x, ctx.roundoffs[0][0]) @ off(weight, ctx.roundoffs[0][1]).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, of_input, of_weight = ctx.roundoffs
        left, right = off(gradient, of_weight[0]).flatten(0, -2), off(x, of_weight[1]).flatten(0, -2)
        return off(gradient, of_input[0]) @ off(weight, of_input[1]), left.T @ right, None


def off(x: Tensor, roundoff: float) -> Tensor:
    return x * (1 + roundoff * (2 * torch.rand_like(x) - 1))


def plain_results(path: Path, batch: Any, recipe: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients of -log π in float64; of rounded products with a recipe."""
    model = reference.plain_model(path)
    for name, layer in model.model.layers.named_modules():
        if recipe is not None and isinstance(layer, nn.Linear) and "proj" in name:
            layer.forward = lambda x, layer=layer: RoundedProduct.apply(x, layer.weight, recipe)
    logprob_T, _ = reference._at_targets(reference.plain_log_softmax(model, batch, 1.0), batch)
    (-logprob_T.sum() / batch.loss_mask_T.sum()).backward()
    return logprob_T.detach(), {f"model.{name}": x.grad for name, x in model.named_parameters()}


def errors(found: tuple[Tensor, dict[str, Tensor]], truth: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
    """Root mean square of the log-probabilities' error, and the gradients' error as a share of their norm."""
    apart = [(found[1][name].cpu().double() - x, x) for name, x in truth[1].items()]
    share = sum(x.square().sum() for x, _ in apart) / sum(x.square().sum() for _, x in apart)
    return torch.stack([(found[0].double() - truth[0]).square().mean(), share]).sqrt()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A model whose errors grow with those of its products in proportion: the tiny ones double them in each layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, bos_token_id=None, eos_token_id=256, pad_token_id=257,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("float8") / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def check_errors(recipe: str, llama: Path) -> None:
    """Against float64, no larger than those of products whose operands are off by the unit roundoff at random."""
    batch = random_batch(24)
    truth = plain_results(llama, batch, None)
    predicted = torch.stack([errors(plain_results(llama, batch, recipe), truth) for _ in range(4)]).mean(0)

    engine = float8_engine(llama, recipe, max_tokens=1000)
    logprob_T = engine.infer(batch, ("logprob",))["logprob"]
    engine.train_step(batch, LikelihoodLoss())
    found = errors((logprob_T, reference.gradients(engine)), truth)
    # Rounding to nearest is off by 0.74 times as much. bfloat16 alone would be off by a 32nd.
    assert (found <= predicted).all(), (found, predicted)
    assert (found >= predicted / 2).all(), (found, predicted)


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_format(recipe, llama):
    check_errors(recipe, llama)


@pytest.mark.gpu
@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_of_a_gpu(recipe, llama):
    """Its tensor cores may add with fewer digits, which is less than a rounding to float8."""
    check_errors(recipe, llama)


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_steps_follow_bfloat16(recipe, llama):
    """Within 5 % of what the loss falls by."""
    curves = []
    for each in (None, recipe):
        engine = float8_engine(llama, each, max_tokens=1000, optimizer={"learning_rate": 1e-3})
        curves.append([engine.train_step(random_batch(12), LikelihoodLoss())["loss"] for _ in range(20)])
    plain, ours = map(torch.tensor, curves)
    fall = plain[0] - plain[-1]
    assert fall > 1
    assert (ours - plain).abs().max() < 0.05 * fall, ours - plain


# ---- what stays as it is --------------------------------------------------------------------------------------------


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_and_exports_have_their_names_and_bits(recipe, tiny_model, tmp_path):
    path = tiny_model("llama")
    engine, plain = float8_engine(path, recipe), make_engine(path)
    reference.assert_equal(reference.weights(engine), reference.weights(plain))
    assert [name for name, _ in engine.named_weights(torch.bfloat16)] == [name for name, _ in plain.named_weights()]
    engine.train_step(random_batch(), policy_loss())
    export_hf(engine, tmp_path)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    reference.assert_equal(reference.weights(engine), exported)


# What runs again and where weights wait leaves the bits of two steps as they are.
SAME = {
    "selective": {"activation_checkpointing": "selective"}, "full": {"activation_checkpointing": "full"},
    "offload": {"offload_between_phases": True}, "on the CPU": {"cpu_offload": True},
}  # fmt: skip


def two_steps(path: Path, recipe: str, **options: Any) -> dict[str, Tensor]:
    """Weights after two steps, of which the second one follows an inference, and the log-probabilities of this one."""
    engine = float8_engine(path, recipe, **options)
    engine.train_step(random_batch(), policy_loss())
    inferred = engine.infer(random_batch(seed=1), ("logprob",))["logprob"]
    engine.train_step(random_batch(seed=1), policy_loss())
    return reference.weights(engine) | {"inferred": inferred}


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_settings_keep_the_bits(recipe, tiny_model):
    path = tiny_model("llama")
    expected = two_steps(path, recipe)
    for name, config in SAME.items():
        found = two_steps(path, recipe, config=config)
        assert [x for x in expected if not torch.equal(found[x], expected[x])] == [], name


@peers
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks(recipe, llama):
    """Compiled code rounds otherwise in bfloat16, and another rounding may become another number of float8."""
    batch, found = random_batch(24), {}
    for compiles in (False, True):
        engine = float8_engine(llama, recipe, max_tokens=1000, config={"compile": compiles})
        logprob_T = engine.infer(batch, ("logprob",))["logprob"]
        engine.train_step(batch, LikelihoodLoss())
        found[compiles] = logprob_T, reference.gradients(engine)
    wide = found[False][0].double(), {name: x.double() for name, x in found[False][1].items()}
    predicted = errors(plain_results(llama, batch, recipe), plain_results(llama, batch, None))
    assert (errors(found[True], wide) <= predicted).all()


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_train_beside_float8(recipe, tiny_model, tmp_path):
    engine = float8_engine(
        tiny_model("llama"), recipe, config={"lora": {"rank": 4}}, optimizer={"learning_rate": 0.05}, max_tokens=24
    )
    before = {name: x.clone() for name, x in engine.model.named_parameters()}
    for _ in range(3):
        engine.train_step(random_batch(), policy_loss())
    moved = {name for name, x in engine.model.named_parameters() if not torch.equal(x, before[name])}
    assert moved
    assert moved == {name for name in before if "lora_" in name}
    export_hf(engine, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    reference.assert_equal(reference.weights(engine), dict(exported.named_parameters()))
    with engine.disable_adapter():
        frozen = engine.infer(random_batch(), ("logprob",))["logprob"]
    plain = float8_engine(tiny_model("llama"), recipe, max_tokens=24)
    assert torch.equal(frozen, plain.infer(random_batch(), ("logprob",))["logprob"])


@peers
def test_a_log_probability_depends_on_its_micro_batch_with_one_scale_for_all_tokens(llama):
    """With a scale for each row, and on a CPU, it has the same bits in any micro-batch."""
    batch, different = random_batch(24), {}
    for recipe in RECIPES:
        one, many = (
            float8_engine(llama, recipe, config={"micro_batch_size": size}).infer(batch, ("logprob",))["logprob"]
            for size in (None, 1)
        )
        different[recipe] = (one - many).abs().max().item()
    assert different["tensorwise"] > 0.01
    assert different["rowwise"] == different["rowwise_with_gw_hp"] < 0.01


@peers
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_unchanged_policy_has_ratio_one(recipe, tiny_model):
    engine = float8_engine(tiny_model("llama"), recipe, max_tokens=24)
    batch = random_batch()
    batch = batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
    assert engine.train_step(batch, PolicyLoss())["ratio_max"] == 1.0


# ---- two processes --------------------------------------------------------------------------------------------------


def one_step(path: Path, recipe: str, num_sequences: int, **config: Any) -> dict[str, Tensor]:
    """Log-probabilities and gradients. Micro-batches of one sequence are the same ones on any number of ranks."""
    engine = float8_engine(path, recipe, config={"micro_batch_size": 1} | config)
    batch = random_batch(num_sequences)
    inferred = engine.infer(batch, ("logprob",))["logprob"]
    engine.train_step(batch, policy_loss())
    return {"inferred": inferred} | reference.gradients(engine)


def compare_with_one_process(rank: int, path: Path, folder: Path) -> None:
    for recipe in RECIPES:
        for num_sequences in (1, 7):  # of one sequence, the second rank has none
            expected = torch.load(folder / f"{recipe} {num_sequences}.pt")
            for config in ({}, {"shard_size": 1}):
                reference.assert_close(one_step(path, recipe, num_sequences, **config), expected, 1e-5)


@peers
@pytest.mark.dist
def test_two_processes_compute_what_one_does(tiny_model, tmp_path):
    path = tiny_model("llama")
    for recipe in RECIPES:
        for num_sequences in (1, 7):
            torch.save(one_step(path, recipe, num_sequences), tmp_path / f"{recipe} {num_sequences}.pt")
    run_distributed(compare_with_one_process, 2, path, tmp_path)
