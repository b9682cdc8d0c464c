"""The engine on one process, against plain transformers in float64."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    MllamaForConditionalGeneration,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.engine.sharding import build
from rlft_fast.models import require_divisible_heads
from rlft_fast.models.probe import Surroundings
from rlft_fast.rl import PolicyLoss
from tests.engine import reference
from tests.engine.models.every_architecture import small_model
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch, value_loss
from tests.support.tiny_models import MODELS, VOCAB_SIZE, save_tiny_model

AGGREGATIONS = ["token-mean", "sequence-mean"]
LONGEST = int(random_batch().lengths.max())
# One micro-batch, several, and one for (nearly) every sequence.
CAPS = [1000, 48, LONGEST]


@pytest.fixture(scope="module")
def batch(tiny_model):
    batch = random_batch()
    logprob_T, _ = reference.plain_logprob_and_entropy(tiny_model("llama"), batch, reference.TEMPERATURE)
    return near_policy(batch, logprob_T.float())


# ---- inference ----------------------------------------------------------------------------------------------------


# 0.7 stands for every temperature but 1, which needs no scaling and might hide that it is forgotten.
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_infer_is_log_softmax_of_plain_transformers(tiny_model, name, temperature):
    path, batch = tiny_model(name), random_batch()
    engine = make_engine(path, temperature=temperature, max_tokens=48, num_training_steps=None)
    outputs = engine.infer(batch, ("logprob", "entropy"))
    logprob_T, entropy_T = reference.plain_logprob_and_entropy(path, batch, temperature)
    torch.testing.assert_close(outputs["logprob"].double(), logprob_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs["entropy"].double(), entropy_T, rtol=0, atol=1e-5)
    assert outputs["logprob"].dtype == torch.float32
    assert not outputs["logprob"][~batch.loss_mask_T].any()


@pytest.mark.parametrize("head", ["logprob", "value"])
def test_a_model_with_other_numbers_if_it_is_packed_runs_padded(head, tmp_path, monkeypatch):
    """Its attention does not learn of the window, of which no name tells."""
    small_model("phimoe", PhimoeForCausalLM).save_pretrained(tmp_path)
    monkeypatch.setattr("rlft_fast.models.architectures._EXCEPTIONS", {})
    engine = make_engine(tmp_path, head=head, num_training_steps=None)
    assert "if it is packed (they differ by" in engine.facts.padded_because
    assert engine.model.deviation(torch.arange(3, 11)) < 1e-5
    with pytest.raises(ValueError, match="sequence_parallel=2 needs packed sequences, but PhimoeModel has other"):
        require_divisible_heads(engine.model.backbone, 2, engine.facts.padded_because)


def test_a_model_with_more_embeddings_than_logits(tmp_path):
    """Llama 3.2 Vision has embeddings of its images' tokens, and logits of the others."""
    plain = small_model("mllama", MllamaForConditionalGeneration)
    plain.save_pretrained(tmp_path)
    assert plain.get_input_embeddings().num_embeddings > len(plain.lm_head.weight)
    engine, ids = make_engine(tmp_path, num_training_steps=None), torch.tensor([[5, 6, 7, 8, 9]])
    found = engine.infer(Batch.from_samples([[5, 6]], [[7, 8, 9]]), ("logprob",))["logprob"][1:4]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits[0, 1:4].log_softmax(-1).gather(1, ids[0, 2:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_window", [True, False])
def test_windows_of_which_attention_does_not_learn_run_padded(has_window, tmp_path):
    """The window is longer than the tokens on which a loaded model is tried, and the sequences are longer still."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2,
        "use_sliding_window": has_window, "sliding_window": 10, "max_window_layers": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes)).save_pretrained(tmp_path)
    engine, batch = make_engine(tmp_path, num_training_steps=None), random_batch()
    because = "does not tell its attention of its sliding windows"
    assert engine.facts.padded_because == (because if has_window else "")
    expected, _ = reference.plain_logprob_and_entropy(tmp_path, batch)
    torch.testing.assert_close(engine.infer(batch, ("logprob",))["logprob"].double(), expected, rtol=0, atol=1e-5)


def test_a_policy_with_other_numbers_than_its_model_is_refused(tiny_model, monkeypatch):
    scaled = Surroundings(softcap=None, logit_scale=1.5, hidden_scale=1.0)
    monkeypatch.setattr("rlft_fast.models.heads.probe", lambda *_: scaled)
    with pytest.raises(
        ValueError, match=r"padded sequences differ by \d.* from those of LlamaForCausalLM's own forward on 8 tokens"
    ):
        make_engine(tiny_model("llama"))
    with pytest.warns(UserWarning, match="compare with float32"):
        make_engine(tiny_model("llama"), dtype="bfloat16")


def test_sum_of_squared_probabilities(tiny_model):
    path, batch = tiny_model("llama"), random_batch()
    engine = make_engine(path, max_tokens=24, temperature=0.7)
    found = engine.infer(batch, ("logprob", "sum_prob_squared"))["sum_prob_squared"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        log_softmax = reference.plain_log_softmax(model, batch, 0.7)
    wanted = log_softmax.exp().square().sum(-1) * batch.loss_mask_T
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


def test_infer_returns_the_order_of_the_batch(tiny_model):
    engine, batch = make_engine(tiny_model("llama"), max_tokens=LONGEST), random_batch()
    order = [3, 0, 6, 5, 1, 4, 2]
    values = engine.infer(batch, ("logprob",))["logprob"]
    shuffled = engine.infer(batch.select(order), ("logprob",))["logprob"]
    torch.testing.assert_close(shuffled, batch.replace(logprob_T=values).select(order).logprob_T, rtol=0, atol=1e-5)


def test_infer_without_a_response_token(tiny_model):
    batch = random_batch()
    silent = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    assert not make_engine(tiny_model("llama")).infer(silent, ("logprob",))["logprob"].any()


def test_new_critic_is_zero_everywhere(tiny_model):
    engine = make_engine(tiny_model("llama"), head="value")
    torch.nn.init.zeros_(engine.model.head.weight)
    values = engine.infer(random_batch(), ("value",))["value"]
    assert torch.equal(values, torch.zeros_like(values))


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_policy_gradient_is_that_of_a_padded_plain_model(tiny_model, batch, name, aggregation):
    path = tiny_model(name)
    plain = reference.PlainPolicy(path, batch)
    batch = near_policy(batch, plain.logprob_T.float())
    engine = make_engine(path, temperature=reference.TEMPERATURE, max_tokens=48)
    metrics = engine.train_step(batch, policy_loss(aggregation))
    assert 0.05 < metrics["clip_share"] < 0.95  # both branches of the loss are on trial
    expected = plain.gradients(batch, aggregation)
    reference.assert_close(reference.gradients(engine), expected, 2e-5)
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_value_gradient_is_that_of_a_padded_plain_model(tiny_model, batch, name, aggregation):
    path = tiny_model(name)
    engine = make_engine(path, head="value", max_tokens=48)
    metrics = engine.train_step(batch, value_loss(aggregation))
    assert 0.05 < metrics["value_clip_share"] < 0.95
    expected = reference.plain_value_gradients(path, batch, aggregation)
    reference.assert_close(reference.gradients(engine), expected, 2e-5)


@pytest.mark.parametrize("head", ["logprob", "value"])
def test_gradient_does_not_depend_on_cap_or_order(tiny_model, batch, head):
    loss = policy_loss("sequence-mean") if head == "logprob" else value_loss("sequence-mean")
    found = []
    for cap in CAPS:
        for order in (range(7), [3, 0, 6, 5, 1, 4, 2]):
            engine = make_engine(tiny_model("llama"), head=head, max_tokens=cap, temperature=reference.TEMPERATURE)
            engine.train_step(batch.select(list(order)), loss)
            found.append(reference.gradients(engine))
    for other in found[1:]:
        reference.assert_close(other, found[0], 1e-5)


def test_clipping_scales_the_whole_gradient(tiny_model, batch):
    free, clipped = (
        make_engine(tiny_model("llama"), optimizer={"max_grad_norm": limit}) for limit in (None, 0.01)
    )  # fmt: skip
    norm = free.train_step(batch, policy_loss())["grad_norm"]
    assert clipped.train_step(batch, policy_loss())["grad_norm"] == norm
    expected = {name: gradient * (0.01 / norm) for name, gradient in reference.gradients(free).items()}
    reference.assert_close(reference.gradients(clipped), expected, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_step_is_exactly_on_policy(tiny_model, tmp_path, dtype):
    # Attention dropout, because the policy that is updated must be the one that was inferred.
    path = save_tiny_model("qwen2-tied", tmp_path, attention_dropout=0.5)
    engine = make_engine(path, max_tokens=48, dtype=dtype, temperature=0.7)
    batch = random_batch()
    inferred, outputs = engine.infer(batch, ("logprob", "entropy")), {}
    batch = batch.replace(old_logprob_T=inferred["logprob"])
    metrics = engine.train_step(batch, PolicyLoss(), outputs=outputs)
    assert torch.equal(outputs["logprob"], inferred["logprob"])
    torch.testing.assert_close(outputs["entropy"], inferred["entropy"])
    assert metrics["ratio_max"] == 1.0
    assert metrics["approx_kl"] == 0.0
    assert metrics["clip_share"] == 0.0
    # The loss itself, and not only its metrics, reads its fields in float32: it is minus the mean advantage.
    mean_advantage = batch.advantage_T[batch.loss_mask_T].mean().item()
    assert metrics["loss"] == pytest.approx(-mean_advantage, rel=1e-5)


def test_bfloat16_is_near_float32(tiny_model, batch):
    exact, rounded = (make_engine(tiny_model("llama"), dtype=dtype) for dtype in ("float32", "bfloat16"))
    expected, actual = (engine.infer(batch, ("logprob",))["logprob"] for engine in (exact, rounded))
    assert 0 < (actual - expected).abs().max() < 0.15
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}  # their own data again
    losses = [engine.train_step(batch, policy_loss())["loss"] for engine in (exact, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    for take in (rounded.state_tensors, lambda: reference.weights(rounded)):
        with torch.no_grad():
            rounded._forward(rounded._inputs(batch), ("logprob",))  # leaves weights gathered, as a pass that fails does
        assert {tensor.dtype for tensor in take().values()} == {torch.float32}


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_step_is_adamw_of_the_gradient(tiny_model, batch):
    engine = make_engine(tiny_model("llama"), optimizer={"weight_decay": 0.1})
    before = reference.weights(engine)
    engine.train_step(batch, policy_loss())
    for name, gradient in reference.gradients(engine).items():
        name = name.removeprefix("model.")
        decayed = before[name] * (1 - 1e-3 * 0.1) if gradient.dim() > 1 else before[name]
        # At the first step both bias-corrected moments are the gradient itself.
        expected = decayed - 1e-3 * gradient / (gradient.abs() + 1e-4)
        torch.testing.assert_close(reference.weights(engine)[name], expected, rtol=0, atol=2e-6)


def test_step_is_torchs_clipping_and_adamw(tiny_model, batch):
    options = {"weight_decay": 0.1, "max_grad_norm": 0.05}
    engine = make_engine(tiny_model("llama"), optimizer=options)
    unclipped = make_engine(tiny_model("llama"))
    model = copy.deepcopy(engine.model)
    peer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        eps=1e-4,
    )
    unclipped.train_step(batch, policy_loss())
    for name, gradient in reference.gradients(unclipped).items():
        model.get_parameter(name).grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    peer.step()
    metrics = engine.train_step(batch, policy_loss())
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert norm > 0.1  # it is clipped
    for name, parameter in engine.model.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_training_fits_the_batch(tiny_model, batch):
    engine = make_engine(tiny_model("qwen2-tied"), max_tokens=48)
    losses = [engine.train_step(batch, value_or_policy)["loss"] for value_or_policy in [PolicyLoss(clip_high=9.0)] * 8]
    assert losses[-1] < losses[0] - 0.1
    assert engine.counters() == {"step": 8, "skipped_steps": 0}


# inf reaches the gradient as inf or nan; nan alone must not get through either.
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model, batch, bad, steps_before):
    engine, untouched = (
        make_engine(tiny_model("llama-tied"), optimizer={"schedule": "linear", "max_grad_norm": 1.0}) for _ in range(2)
    )  # fmt: skip
    for _ in range(steps_before):
        engine.train_step(batch, policy_loss())
        untouched.train_step(batch, policy_loss())
    before = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    metrics = engine.train_step(batch.replace(advantage_T=torch.full_like(batch.advantage_T, bad)), policy_loss())
    assert not math.isfinite(metrics["grad_norm"])
    assert metrics["skipped_steps"] == 1
    assert engine.counters() == {"step": steps_before, "skipped_steps": 1}
    reference.assert_equal(engine.state_tensors(), before)
    assert all(parameter.grad is None for parameter in engine.model.parameters())

    next_metrics, expected = (e.train_step(batch, policy_loss()) for e in (engine, untouched))
    assert next_metrics == expected | {"skipped_steps": 1}
    reference.assert_equal(engine.state_tensors(), untouched.state_tensors())


def test_two_engines_do_not_touch_each_other(tiny_model, batch):
    path = tiny_model("llama-tied")
    alone = make_engine(path)
    expected = [alone.train_step(batch, policy_loss()) for _ in range(2)]

    engine, other, critic = make_engine(path), make_engine(path), make_engine(path, head="value")
    frozen = reference.weights(other)
    actual = []
    for _ in range(2):
        critic.train_step(batch, value_loss())
        actual.append(engine.train_step(batch, policy_loss()))
    assert actual == expected
    reference.assert_equal(reference.weights(other), frozen)


def test_tied_weights_stay_tied(tiny_model, batch, tmp_path):
    engine = make_engine(tiny_model("qwen2-tied"))
    engine.train_step(batch, policy_loss())
    model = engine.model.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    names = [name for name, _ in engine.named_weights()]
    assert len(names) == len(set(names))
    assert not any("lm_head" in name for name in names)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_export_is_the_trained_model(tiny_model, batch, tmp_path, name):
    engine = make_engine(tiny_model(name))
    engine.train_step(batch, policy_loss())
    export_hf(engine, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert exported.state_dict().keys() == AutoModelForCausalLM.from_pretrained(tiny_model(name)).state_dict().keys()
    reference.assert_equal(dict(exported.named_parameters()), reference.weights(engine))
    assert load_file(tmp_path / "model.safetensors").keys() == reference.weights(engine).keys()
    engine.model.model.set_attn_implementation("sdpa")
    ids = batch.input_ids_T[None, :20]
    with torch.no_grad():
        assert torch.equal(exported(input_ids=ids).logits, engine.model.model(input_ids=ids).logits)
    # And it is a folder to go on from, tokenizer included.
    again = make_engine(tmp_path)
    reference.assert_equal(again.infer(batch, ("logprob",)), _packed(engine).infer(batch, ("logprob",)))


def _packed(engine: FSDPEngine) -> FSDPEngine:
    engine.model.model.set_attn_implementation("rlft_packed")
    return engine


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_changes_nothing(tiny_model, batch):
    engine, critic = make_engine(tiny_model("llama")), make_engine(tiny_model("llama"), head="value")
    frozen = make_engine(tiny_model("llama"), num_training_steps=None)
    before = reference.weights(engine)
    with pytest.raises(ValueError, match="frozen"):
        frozen.train_step(batch, policy_loss())
    with pytest.raises(ValueError, match="old_logprob_T"):
        engine.train_step(batch.replace(old_logprob_T=None), policy_loss())
    with pytest.raises(ValueError, match="max_tokens=4"):
        make_engine(tiny_model("llama"), max_tokens=4).infer(batch, ("logprob",))
    with pytest.raises(ValueError, match=r"a logprob head gives logprob, .*routed_experts, not value"):
        engine.infer(batch, ("value",))
    with pytest.raises(ValueError, match="a value head gives value, not entropy"):
        critic.infer(batch, ("entropy",))
    reference.assert_equal(reference.weights(engine), before)
    assert engine.step == 0


@pytest.mark.parametrize(("dtype", "wrapped"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_step_that_fails_leaves_nothing_to_the_next(dtype, wrapped, tiny_model, batch, monkeypatch):
    monkeypatch.setattr(build, "is_wrapped", lambda *_: wrapped)
    failed, fresh = (make_engine(tiny_model("llama"), max_tokens=24, dtype=dtype) for _ in range(2))
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.train_step(batch, reference.FailsLate(call=4))
    metrics = [engine.train_step(batch, policy_loss()) for engine in (failed, fresh)]
    assert metrics[0] == metrics[1]
    reference.assert_equal(reference.weights(failed), reference.weights(fresh))


def test_frozen_engine_needs_no_gradient_and_no_optimizer(tiny_model):
    engine = make_engine(tiny_model("llama"), num_training_steps=None)
    assert engine.optimizer is None
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    assert all(name.startswith("model.") for name in engine.state_tensors())
