"""patch_lm_head on tiny random models, against their own logits."""

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, TrainableTokensConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    InklingForCausalLM,
    InklingTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    Trainer,
    TrainingArguments,
)

from rlft_fast import patch_lm_head, unpatch_lm_head
from tests.support.accelerated import prepare_as_accelerate
from tests.support.machine.distributed import run_distributed
from tests.support.numerics import assert_close_to_rounding

V = 67
SIZES = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip

# Each for something that happens between the last block and the probabilities.
MODELS = {
    "nothing": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "softcap": (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "softcap by another name": (RecurrentGemmaForCausalLM, RecurrentGemmaConfig(
        **SIZES | {"num_hidden_layers": 3}, lru_width=16, logits_soft_cap=2.0, use_cache=False)),
    "multiplied": (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.25)),
    "divided": (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=3.0)),
    "multiplied by the divisor": (HyperCLOVAXForCausalLM, HyperCLOVAXConfig(**SIZES, logits_scaling=3.0)),
    "a mixture of layers": (FalconH1ForCausalLM, FalconH1Config(**SIZES | {"num_key_value_heads": 2},
        lm_head_multiplier=0.5, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)),
    "bias": (PhiForCausalLM, PhiConfig(**SIZES)),
    "dropout, other names": (GPT2LMHeadModel, GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2)),
    "hidden states are divided": (MiniCPM3ForCausalLM, MiniCPM3Config(**SIZES | {"num_key_value_heads": 2},
        dim_model_base=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8,
        head_dim=4)),
    "a module before the head": (ModernBertDecoderForCausalLM, ModernBertDecoderConfig(**SIZES, cls_token_id=1,
        sep_token_id=2)),
    "no call of the base model": (OPTForCausalLM, OPTConfig(vocab_size=V, hidden_size=16, ffn_dim=24,
        num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=12, init_std=0.3)),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class, config = MODELS[name]
    model = model_class(copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases start at 0, and a forgotten bias would not show
            nn.init.normal_(parameter, mean=parameter[0].item(), std=0.2)
    return model


def batch() -> dict[str, Tensor]:
    """Two sequences, the second with padding on the left."""
    input_ids = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :3] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def next_tokens(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    targets = input_ids.roll(-1, 1).masked_fill(attention_mask == 0, -100)
    targets[:, -1] = -100
    return targets


def plain_logprob(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits / temperature, -1)
    active = targets != -100
    logprob = log_p.gather(-1, targets.where(active, 0)[..., None])[..., 0]
    return logprob.where(active, 0), -(log_p.exp() * log_p).sum(-1).where(active, 0)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_and_gradients_are_those_of_the_logits(name):
    model, inputs = build(name), batch()
    targets = next_tokens(**inputs)
    logprob, entropy = plain_logprob(model(**inputs).logits, targets, 0.8)
    upstream = torch.randn(targets.shape)
    expected = gradients(model, (upstream * logprob + entropy).sum())

    assert patch_lm_head(model) is model
    result = model(**inputs, logprob_targets=targets, temperature=0.8, return_entropy=True)
    torch.testing.assert_close(result.logprob, logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.entropy, entropy, rtol=0, atol=1e-5)
    actual = gradients(model, (upstream * result.logprob + result.entropy).sum())
    assert actual.keys() == expected.keys()
    # Together: the gradient of a bias of keys is 0 but for rounding, of terms as large as the other gradients.
    assert_close_to_rounding(*(torch.cat([found[name].flatten() for name in expected]) for found in (actual, expected)))


def test_other_statistics():
    model, inputs = build("softcap"), batch()
    targets = next_tokens(**inputs)
    logits = model(**inputs).logits / 0.7
    probability = logits.softmax(-1)
    asked = dict.fromkeys(("return_sum_prob_squared", "return_top1", "return_mean_logits"), True)
    result = patch_lm_head(model)(**inputs, logprob_targets=targets, temperature=0.7, **asked)
    active = targets != -100
    assert torch.equal(result.top1, (probability.argmax(-1) == targets) & active)
    expected = probability.square().sum(-1).where(active, 0)
    torch.testing.assert_close(result.sum_prob_squared, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.mean_logits, logits.mean(-1).where(active, 0), rtol=1e-5, atol=1e-6)
    for name in asked:
        with pytest.raises(ValueError, match=f"{name} does not go with loss_fn.*leave one of them out"):
            model(**inputs, logprob_targets=targets, **{name: True}, loss_fn=lambda logprob, _: logprob)


def test_loss_in_three_gemms():
    model, inputs = build("softcap"), batch()
    targets, weight = next_tokens(**inputs), torch.randn(2, 7)
    logprob, _ = plain_logprob(model(**inputs).logits, targets)
    expected = gradients(model, (weight * logprob.square()).sum())

    patch_lm_head(model)
    result = model(
        **inputs, logprob_targets=targets, loss_fn=lambda logprob, _, weight: weight * logprob.square(),
        per_token=(weight,),
    )  # fmt: skip
    torch.testing.assert_close(result.loss, (weight * logprob.square()).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(result.logprob, logprob, rtol=0, atol=1e-5)
    for parameter, gradient in gradients(model, result.loss).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-5)


def test_the_output_has_the_keys_that_were_asked_for():
    model, inputs = patch_lm_head(build("nothing")), batch()
    targets = next_tokens(**inputs)
    everything = dict.fromkeys(("return_entropy", "return_sum_prob_squared", "return_top1", "return_mean_logits"), True)
    output = model(**inputs, logprob_targets=targets, **everything)
    assert [*output.keys()] == ["logprob", "entropy", "sum_prob_squared", "top1", "mean_logits"]
    assert all(value.shape == targets.shape for value in output.values())
    assert {name for name, value in output.items() if value.requires_grad} == {"logprob", "entropy"}
    assert {value.dtype for name, value in output.items() if name != "top1"} == {torch.float32}
    assert output.top1.dtype == torch.bool
    output = model(**inputs, logprob_targets=targets, loss_fn=lambda logprob, _: -logprob)
    assert [*output.keys()] == ["loss", "logprob"]
    assert output.loss.requires_grad
    assert not output.logprob.requires_grad


class ScoringTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(inputs["input_ids"], logprob_targets=inputs["labels"], loss_fn=lambda logprob, _: -logprob)
        return (output.loss, output) if return_outputs else output.loss


def test_a_trainer_gathers_the_output(tmp_path):
    """Trainer reads the fields of an output by their keys, and fails at a None."""
    model, ids = patch_lm_head(build("nothing")), batch()["input_ids"]
    rows = [{"input_ids": row, "labels": row.roll(-1)} for row in ids]
    prediction = ScoringTrainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)).predict(rows)
    with torch.no_grad():
        expected, _ = plain_logprob(unpatch_lm_head(model)(ids).logits, ids.roll(-1, 1))
    torch.testing.assert_close(torch.from_numpy(prediction.predictions), expected, rtol=0, atol=1e-5)


def test_logits_to_keep():
    model, inputs = patch_lm_head(build("divided")), batch()
    targets = next_tokens(**inputs)
    whole = model(**inputs, logprob_targets=targets).logprob
    last = model(**inputs, logprob_targets=targets[:, -3:], logits_to_keep=3).logprob
    assert torch.equal(last, whole[:, -3:])


@pytest.mark.parametrize("name", ["nothing", "softcap"])
def test_a_packed_row_keeps_its_sequences_apart(name):
    """The model's default, a cache, would let the second sequence attend to the first."""
    model, ids = build(name), batch()["input_ids"]
    targets = next_tokens(ids, torch.ones_like(ids))
    expected, _ = plain_logprob(torch.cat([model(row[None]).logits for row in ids]), targets)
    assert model.config.use_cache
    packed = {"input_ids": ids.view(1, -1), "position_ids": torch.arange(7).repeat(2)[None]}
    result = patch_lm_head(model)(**packed, logprob_targets=targets.view(1, -1))
    torch.testing.assert_close(result.logprob.view(2, 7), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_without_targets_nothing_changes(name, tmp_path):
    model, inputs = build(name), batch()
    logits, keys = model(**inputs).logits, list(model.state_dict())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    sequences = model.generate(**inputs, **options)

    patch_lm_head(model)
    model(**inputs, logprob_targets=next_tokens(**inputs))
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model.generate(**inputs, **options), sequences)
    assert list(model.state_dict()) == keys
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is MODELS[name][0]
    assert torch.equal(loaded(**inputs).logits, logits)


class WithTemperature(LlamaForCausalLM):
    """As verl's replaced forwards of models with images."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, temperature: float = 1.0, **inputs):
        output = super().forward(input_ids, labels=labels, **inputs)
        output.logits = output.logits / temperature
        return output


def logits_warnings(asked: int | None = None) -> list[int]:
    """The forwards, of twenty in training, that warn of logits; `asked` gets targets, the odd ones make no graph."""
    model, inputs = patch_lm_head(build("nothing")).train(), batch()
    warned = []
    for number in range(20):
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(number % 2 == 0):
            warnings.simplefilter("always")
            model(**inputs, **({"logprob_targets": next_tokens(**inputs)} if number == asked else {}))
        warned += [number] * sum("call model(..., logprob_targets=targets)" in str(each.message) for each in caught)
    return warned


def test_a_trainer_that_never_passes_targets_is_told_once():
    assert logits_warnings() == [14]  # the eighth that makes a graph
    assert logits_warnings(asked=12) == []


def test_a_forward_that_has_a_temperature_already():
    model, inputs = build("nothing"), batch()
    model.__class__ = WithTemperature
    targets = next_tokens(**inputs)
    logits, cool = model(**inputs).logits, model(**inputs, temperature=0.8).logits
    logprob, _ = plain_logprob(logits, targets, 0.8)

    patch_lm_head(model)
    assert list(inspect.signature(model.forward).parameters)[:2] == ["input_ids", "labels"]
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model(**inputs, temperature=0.8).logits, cool)
    result = model(**inputs, logprob_targets=targets, temperature=0.8)
    torch.testing.assert_close(result.logprob, logprob, rtol=0, atol=1e-5)


def through_a_file(model: PreTrainedModel) -> PreTrainedModel:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


PICKLES = [partial(lambda p, model: pickle.loads(pickle.dumps(model, p)), protocol) for protocol in (0, 2, 5)]


@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_a_file, *PICKLES])
def test_a_copy_computes_with_its_own_weights(make_copy):
    model, inputs = patch_lm_head(build("tied")), batch()
    reference = make_copy(model)
    assert type(reference) is type(model)
    targets = next_tokens(**inputs)
    before = model(**inputs, logprob_targets=targets).logprob
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(reference(**inputs, logprob_targets=targets).logprob, before)
    assert not torch.allclose(model(**inputs, logprob_targets=targets).logprob, before)
    assert reference.get_output_embeddings().weight is reference.get_input_embeddings().weight


def test_autocast():
    """Hidden states may come narrower than the head's weight; the head itself then computes in the weight's dtype."""
    model, inputs = patch_lm_head(build("tied")), batch()
    targets = next_tokens(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(**inputs, logprob_targets=targets).logprob
    torch.testing.assert_close(narrow, model(**inputs, logprob_targets=targets).logprob, rtol=0.05, atol=0.05)


# ---- sharded ---------------------------------------------------------------------------------------------------------


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13


def shard_by_blocks(model: PreTrainedModel, mesh: DeviceMesh) -> int:
    """Blocks and the rest, as FSDP2's tutorial does. Returns how many units gather their weights in a forward."""
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return len(model.model.layers) + 1


def shard_the_head(model: PreTrainedModel, mesh: DeviceMesh) -> int:
    """Also the head, whose weight is given back between forward and backward."""
    fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    return 1 + shard_by_blocks(model, mesh)


def shard_norm_and_head(model: PreTrainedModel, mesh: DeviceMesh) -> int:
    """Final norm and head in one unit, whose weights are given back between forward and backward."""
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=True)
    return 1 + shard_by_blocks(model, mesh)


def shard_as_accelerate(model: PreTrainedModel, mesh: DeviceMesh) -> int:
    prepare_as_accelerate(model, mesh)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return len({id(unit._get_fsdp_state()) for unit in units if any(True for _ in unit.parameters())})


def check_sharded(rank: int, mesh: DeviceMesh, name: str, shard: Callable[[PreTrainedModel, DeviceMesh], int]) -> None:
    """Rank r trains on sequence r; the mean over ranks is the mean over the batch."""
    inputs = batch()
    targets = next_tokens(**inputs)
    plain = build(name)
    logprob, _ = plain_logprob(plain(**inputs).logits, targets)
    expected = gradients(plain, logprob.sum() / 2)

    model = patch_lm_head(build(name))
    num_units = shard(model, mesh)
    own = {key: value[rank : rank + 1] for key, value in inputs.items()}
    gathered, original = [], getattr(dist, GATHER)
    setattr(dist, GATHER, lambda *args, **kwargs: gathered.append(1) or original(*args, **kwargs))
    result = model(**own, logprob_targets=targets[rank : rank + 1])
    setattr(dist, GATHER, original)
    assert len(gathered) <= num_units  # none twice; a root without weights of its own gathers nothing
    torch.testing.assert_close(result.logprob, logprob[rank : rank + 1], rtol=0, atol=1e-5)
    result.logprob.sum().backward()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.grad.full_tensor(), expected[parameter], rtol=1e-4, atol=1e-5)
    for _ in range(2):  # state that a pass leaves behind would show in the next pass
        model.zero_grad()
        loss = model(
            **own, logprob_targets=targets[rank : rank + 1], loss_fn=lambda logprob, _: logprob
        ).loss  # fmt: skip
        loss.backward()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.grad.full_tensor(), expected[parameter], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be unpatched"):
        unpatch_lm_head(model)


def check_rounded_outputs(mesh: DeviceMesh) -> None:
    """As accelerate shards under mixed precision."""
    inputs = batch()
    for adapts, output_dtype in product((False, True), (torch.bfloat16, torch.float32)):
        patched = patch_lm_head(build("nothing"))
        model = get_peft_model(patched, LoraConfig("CAUSAL_LM", r=2)) if adapts else patched
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output_dtype)
        for unit in (model,) if adapts else ([patched.model.norm, patched.lm_head], model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # once
            result = model(**inputs, logprob_targets=next_tokens(**inputs))
        assert result.logprob.dtype == output_dtype
        rounded = [str(warning.message) for warning in caught if "were rounded to" in str(warning.message)]
        assert [message.split("rounded to ")[1].split()[0] for message in rounded] == (
            ["torch.bfloat16"] if output_dtype == torch.bfloat16 else []
        )


def check_unrounded_inputs(mesh: DeviceMesh) -> None:
    """FSDP2 rounds floats that the root gets. In a wrapper around a patched model, it can only be told of."""
    inputs = batch()
    targets = next_tokens(**inputs)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    old = torch.linspace(-5, -4, targets.numel()).view_as(targets)
    for adapts, has_blocks in ((False, True), (True, True), (True, False)):
        patched = patch_lm_head(build("nothing"))
        model = get_peft_model(patched, LoraConfig("CAUSAL_LM", r=2)) if adapts else patched
        for unit in (*patched.model.layers, model) if has_blocks else (model,):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = model(
                **inputs, logprob_targets=targets, temperature=torch.full(targets.shape, 0.7),
                per_token=(old,), loss_fn=lambda logprob, _, x: x + 0 * logprob,
            )  # fmt: skip
        told = [str(warning.message) for warning in caught if "cast_forward_inputs=False" in str(warning.message)]
        if adapts:
            assert len(told) == 1
            continue
        assert told == []
        assert result.loss.item() == pytest.approx(float(old[targets != -100].sum()), rel=1e-6)
        expected = model(**inputs, logprob_targets=targets, temperature=0.7).logprob
        torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-6)


def check_patch_after_sharding(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="patch the model before it is sharded"):
        patch_lm_head(fully_shard(build("nothing"), mesh=mesh))


def check_everything_sharded(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for shard in (shard_by_blocks, shard_as_accelerate, shard_the_head, shard_norm_and_head):
        check_sharded(rank, mesh, "nothing", shard)
    for shard in (shard_by_blocks, shard_as_accelerate):
        check_sharded(rank, mesh, "tied", shard)
    check_rounded_outputs(mesh)
    check_unrounded_inputs(mesh)
    check_patch_after_sharding(mesh)


@pytest.mark.dist
def test_sharded():
    """Starting a process takes seconds, so all cases share a pair."""
    run_distributed(check_everything_sharded, 2)


# ---- undoing, and changes after the patch ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nobody_is_told_of_what_was_not_rounded(dtype):
    model, inputs = patch_lm_head(build("nothing").to(dtype)), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(**inputs, logprob_targets=next_tokens(**inputs)).logprob.dtype == dtype


def test_a_head_on_another_device(monkeypatch):
    """As a model that `device_map` splits over GPUs has it. Results are where the head is."""
    model, inputs = patch_lm_head(build("nothing")), batch()
    targets = next_tokens(**inputs)
    model.lm_head.to("meta")
    model.model.norm.register_forward_hook(lambda _, arguments, hidden: hidden.to("meta"))
    monkeypatch.setattr("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True)  # of the active rows
    result = model(
        **inputs, logprob_targets=targets, temperature=torch.full(targets.shape, 0.7),
        per_token=(torch.ones(targets.shape),), loss_fn=lambda logprob, _, x: x * logprob,
    )  # fmt: skip
    assert result.loss.is_meta
    assert result.logprob.is_meta
    assert result.logprob.shape == targets.shape


@pytest.mark.parametrize("name", ["nothing", "tied", "bias"])
def test_unpatch(name):
    model, inputs = build(name), batch()
    head, keys, logits = model.get_output_embeddings(), list(model.state_dict()), model(**inputs).logits
    parameters = [*model.parameters()]
    assert unpatch_lm_head(patch_lm_head(model)) is model
    assert type(model) is MODELS[name][0]
    assert type(model.get_output_embeddings()) is nn.Linear
    assert model.get_output_embeddings().weight is head.weight
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert list(model.state_dict()) == keys
    assert torch.equal(model(**inputs).logits, logits)
    with pytest.raises(ValueError, match=f"{type(model).__name__} with a Linear cannot be unpatched"):
        unpatch_lm_head(model)
    model.resize_token_embeddings(V + 5)
    targets = next_tokens(**inputs)
    expected, _ = plain_logprob(model(**inputs).logits, targets)
    result = patch_lm_head(model)(**inputs, logprob_targets=targets)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


def test_a_head_that_is_replaced_after_the_patch():
    model, inputs = patch_lm_head(build("nothing")), batch()
    targets = next_tokens(**inputs)
    model.lm_head = nn.Linear(16, V, bias=False)
    with pytest.raises(ValueError, match=r"lm_head of LlamaForCausalLM was replaced by a Linear .* again"):
        model(**inputs, logprob_targets=targets)
    expected, _ = plain_logprob(model(**inputs).logits, targets)
    result = patch_lm_head(model)(**inputs, logprob_targets=targets)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


def test_a_patched_head_is_not_resized():
    model = patch_lm_head(build("nothing"))
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(ValueError, match="head of LlamaForCausalLM is patched and cannot be resized: call unpatch"):
        model.resize_token_embeddings(V + 5)
    assert model.get_input_embeddings().num_embeddings == V


# ---- PEFT ------------------------------------------------------------------------------------------------------------


def adapted(name: str, config: PeftConfig, *, patch: bool) -> PeftModel:
    """With the same random adapters every time."""
    model = build(name)
    torch.manual_seed(0)
    model = get_peft_model(patch_lm_head(model) if patch else model, copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


LORA = partial(LoraConfig, "CAUSAL_LM", target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("name", "saved"),
    [("nothing", ["lm_head"]), ("tied", ["lm_head"]), ("tied", ["embed_tokens", "lm_head"])],
)  # fmt: skip
def test_a_copy_of_the_head_in_modules_to_save(name, saved):
    inputs = batch()
    targets, config = next_tokens(**inputs), LORA(modules_to_save=saved)
    plain, model = (adapted(name, config, patch=patch) for patch in (False, True))
    logprob, _ = plain_logprob(plain(**inputs).logits, targets)
    expected = gradients(plain, logprob.sum())
    result = model(**inputs, logprob_targets=targets)
    torch.testing.assert_close(result.logprob, logprob, rtol=0, atol=1e-5)
    actual = gradients(model, result.logprob.sum())
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(actual[parameter], gradient, rtol=1e-4, atol=1e-5)
    with plain.disable_adapter(), model.disable_adapter():
        logprob, _ = plain_logprob(plain(**inputs).logits, targets)
        torch.testing.assert_close(model(**inputs, logprob_targets=targets).logprob, logprob, rtol=0, atol=1e-5)


ADAPTERS = {
    "tokens": LORA(trainable_token_indices=[4, 5]),
    "tokens of both": LORA(trainable_token_indices={"embed_tokens": [4], "lm_head": [4]}),
    "tokens alone": TrainableTokensConfig(
        task_type="CAUSAL_LM", token_indices=[4, 5], target_modules=["embed_tokens"]
    ),
    "head": LORA(target_modules=["lm_head"]),
    "kept tied": LORA(modules_to_save=["lm_head"], ensure_weight_tying=True),
}  # fmt: skip
OF_THE_EMBEDDING = [("nothing", "tokens"), ("nothing", "tokens alone"), ("nothing", "kept tied")]


@pytest.mark.parametrize("name", ["nothing", "tied"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.thin(2)
def test_adapters_of_head_and_embedding(adapter, name):
    """Without targets nothing changes. With targets, an adapter that PEFT puts in place of the head is refused."""
    inputs = batch()
    targets = next_tokens(**inputs)
    plain, model = (adapted(name, ADAPTERS[adapter], patch=patch) for patch in (False, True))
    logits = plain(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, logits, rtol=0, atol=1e-5)
    if (name, adapter) in OF_THE_EMBEDDING:
        logprob, _ = plain_logprob(logits, targets)
        torch.testing.assert_close(model(**inputs, logprob_targets=targets).logprob, logprob, rtol=0, atol=1e-5)
        return
    advice = "leave ensure_weight_tying out" if adapter == "kept tied" else "leave the head out of target_modules"
    with pytest.raises(ValueError, match=rf"head of {type(model.get_base_model()).__name__} .*peft.*{advice}"):
        model(**inputs, logprob_targets=targets)


def test_virtual_tokens_before_the_sequences():
    inputs, config = batch(), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3)
    targets = next_tokens(**inputs)
    plain, model = (adapted("nothing", config, patch=patch) for patch in (False, True))
    expected, _ = plain_logprob(plain(**inputs).logits[:, 3:], targets)
    result = model(**inputs, logprob_targets=targets, logits_to_keep=7)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


# ---- what it refuses ------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a, self.b = nn.Linear(base_layer.in_features, 2), nn.Linear(2, base_layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def with_adapter() -> PreTrainedModel:
    model = build("nothing")
    model.lm_head = LoraLinear(model.lm_head)
    return model


def quantized() -> PreTrainedModel:
    model = build("nothing")
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear(16, V)
    return model


class Params4bit(nn.Parameter):
    """Of the name that bitsandbytes gives its quantized weights."""


class Linear4bit(nn.Linear):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = Params4bit(torch.zeros(plain.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)


def quantized_by_bitsandbytes() -> PreTrainedModel:
    model = build("nothing")
    model.lm_head = Linear4bit(model.lm_head)
    return model


def sharded_by_zero3() -> PreTrainedModel:
    """As under DeepSpeed's `zero.Init`: elements are elsewhere, and the parameter has an id."""
    model = build("nothing")
    model.lm_head.weight = nn.Parameter(torch.empty(0))
    model.lm_head.weight.ds_id = 0
    return model


def with_weight_norm() -> PreTrainedModel:
    model = build("nothing")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


def with_replaced_forward(part: str = "") -> PreTrainedModel:
    model = build("nothing")
    module = model.get_submodule(part)
    module.forward = torch.no_grad()(module.forward)
    return model


def test_the_advice_for_a_parametrized_head():
    model, inputs = with_weight_norm(), batch()
    targets = next_tokens(**inputs)
    expected, _ = plain_logprob(model(**inputs).logits, targets)
    nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
    result = patch_lm_head(model)(**inputs, logprob_targets=targets)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


def returning_tuples() -> PreTrainedModel:
    model = build("nothing")
    model.config.return_dict = False
    return model


BART = {"vocab_size": V, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.DataParallel(build("nothing")), TypeError, "got DataParallel: patch the model before wrapping"),
        (lambda: BartForConditionalGeneration(BartConfig(**BART)), ValueError, "is an encoder-decoder"),
        (lambda: LlamaModel(LlamaConfig(**SIZES)), ValueError, "LlamaModel has no lm_head"),
        (returning_tuples, ValueError, r"returns tuples .*set model\.config\.return_dict = True"),
        (with_adapter, ValueError, "has an adapter .*LoraLinear"),
        (quantized, ValueError, "is a torch.*quantized.*Linear.* not quantized"),
        (quantized_by_bitsandbytes, ValueError, "Linear4bit with a Params4bit weight, .*llm_int8_skip_modules"),
        (sharded_by_zero3, ValueError, r"DeepSpeed's ZeRO-3 \(its weight has shape \(0,\)\), .* stage 0 to 2"),
        (with_weight_norm, ValueError, "is a torch.*ParametrizedLinear.*: call torch.*remove_parametrizations for"),
        (lambda: patch_lm_head(build("nothing")), ValueError, "patched already"),
        (with_replaced_forward, ValueError, "forward of LlamaForCausalLM was replaced"),
        (partial(with_replaced_forward, "lm_head"), ValueError, "forward of LlamaForCausalLM was replaced"),
    ],
)
def test_what_cannot_be_patched(make, error, message):
    model = make()
    before = type(model)
    with pytest.raises(error, match=message):
        patch_lm_head(model)
    assert type(model) is before


def test_zero3_after_the_patch_is_refused():
    model, inputs = patch_lm_head(build("nothing")), batch()
    model.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError, match="head of LlamaForCausalLM is sharded by DeepSpeed's ZeRO-3"):
        model(**inputs, logprob_targets=next_tokens(**inputs))


def test_a_forward_that_is_replaced_after_the_patch():
    model, inputs = patch_lm_head(build("nothing")), batch()
    model.forward = partial(LlamaForCausalLM.forward, model)
    with pytest.raises(ValueError, match="replaced the forward of LlamaForCausalLM after patch_lm_head, and"):
        model(**inputs, logprob_targets=next_tokens(**inputs))


class Shifted(LlamaForCausalLM):
    def forward(self, *args, **inputs):
        outputs = super().forward(*args, **inputs)
        outputs.logits = outputs.logits + 0.01 * outputs.logits.square()
        return outputs


class WithForbiddenTokens(LlamaForCausalLM):
    """As Chameleon, which forbids tokens of images."""

    def forward(self, *args, **inputs):
        outputs = super().forward(*args, **inputs)
        outputs.logits[..., [7, 61, 62, 66]] = torch.finfo(outputs.logits.dtype).min
        return outputs


class TwiceThroughTheHead(LlamaForCausalLM):
    def forward(self, *args, **inputs):
        super().forward(*args, **inputs)
        return super().forward(*args, **inputs)


class Broken(LlamaForCausalLM):
    def forward(self, *args, **inputs):
        raise RuntimeError("out of\norder")


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (Shifted, r"Shifted turns raw logits \[-40.0, -1.0, 0.5, 40.0\] into \[-24.0, -0.99, 0.5025, 56.0\]: expected"),
        (WithForbiddenTokens, r"changes the logits of chosen tokens \(ids 7, 61, 62, \.\.\.; 4 of 67\)"),
        (TwiceThroughTheHead, "TwiceThroughTheHead calls its head 2 times in a forward, expected once"),
        (Broken, "forward of Broken cannot be tried on two tokens: RuntimeError: out of order"),
    ],
)
def test_a_forward_that_is_not_understood(model_class, message):
    model = model_class(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=message):
        patch_lm_head(model)
    assert type(model) is model_class


def test_a_vocabulary_with_rows_of_padding():
    """Inkling returns no logits of them. Without them, its head can be patched."""
    config = InklingTextConfig(**SIZES, unpadded_vocab_size=60, n_routed_experts=2, num_experts_per_tok=1)
    torch.manual_seed(0)
    model, ids = InklingForCausalLM(config).eval(), batch()["input_ids"] % 60
    expected, _ = plain_logprob(model(ids).logits, ids.roll(-1, 1))
    with pytest.raises(ValueError, match=r"60 logits of the 67 rows of its head.*resize_token_embeddings\(60\)"):
        patch_lm_head(model)
    model.resize_token_embeddings(60, mean_resizing=False)
    result = patch_lm_head(model)(ids, logprob_targets=ids.roll(-1, 1))
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


def test_the_model_counts_and_not_its_configuration():
    """transformers' Cohere2Vision has a logit_scale that its forward does not apply."""
    model, inputs = build("divided"), batch()
    model.config.logit_scale = 0.25
    targets = next_tokens(**inputs)
    expected, _ = plain_logprob(model(**inputs).logits, targets)
    result = patch_lm_head(model)(**inputs, logprob_targets=targets)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


def test_a_model_without_memory_is_patched_before_it_is_loaded():
    with torch.device("meta"):
        model = patch_lm_head(MODELS["multiplied"][0](MODELS["multiplied"][1]))
    loaded, inputs = build("multiplied"), batch()
    model.to_empty(device="cpu").load_state_dict(loaded.state_dict())
    for buffer, value in zip(model.buffers(), loaded.buffers(), strict=True):  # which no state_dict has
        buffer.copy_(value)
    targets = next_tokens(**inputs)
    expected, _ = plain_logprob(loaded(**inputs).logits, targets)
    result = model.eval()(**inputs, logprob_targets=targets)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)


def test_what_a_call_with_targets_refuses():
    model, inputs = patch_lm_head(build("nothing")), batch()
    targets = next_tokens(**inputs)
    with pytest.raises(ValueError, match="labels and logprob_targets"):
        model(**inputs, logprob_targets=targets, labels=targets)
    with pytest.raises(ValueError, match="loss_fn needs logprob_targets"):
        model(**inputs, loss_fn=lambda logprob, _: logprob)
    for bad in (targets[:, 1:], targets.T.contiguous()):
        with pytest.raises(ValueError, match=r"target has shape .* expected \(2, 7\)"):
            model(**inputs, logprob_targets=bad)
    swapped = torch.ones(7, 2)
    for options in ({"temperature": swapped}, {"loss_fn": torch.mul, "per_token": (swapped,)}):
        with pytest.raises(ValueError, match=r"has shape \(7, 2\), expected \(2, 7\)"):
            model(**inputs, logprob_targets=targets, **options)
    with pytest.raises(ValueError, match=r"has no keyword return_top_1 \(did you mean return_top1\?\)"):
        model(**inputs, logprob_targets=targets, return_top_1=True)
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True))
    for options in ({}, {"return_dict": False}):
        with pytest.raises(ValueError, match="auxiliary loss of MixtralForCausalLM"):
            (experts if options else patch_lm_head(experts))(**inputs, logprob_targets=targets, **options)
    result = experts(**inputs, logprob_targets=targets, output_router_logits=False)
    expected, _ = plain_logprob(experts(**inputs).logits, targets)
    torch.testing.assert_close(result.logprob, expected, rtol=0, atol=1e-5)
