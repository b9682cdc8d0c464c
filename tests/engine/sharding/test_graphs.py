"""Graphs of the backbone's passes, recorded on a CPU: replays have the bits of passes without graphs."""

import pytest
import torch

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.loss import Loss
from rlft_fast.engine.sharding import graphs, hand_over_gradients
from rlft_fast.models import final_hidden, load_policy
from rlft_fast.models.attention import functions
from rlft_fast.world import World
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch, value_loss
from tests.support.machine.tape import Tape, record_on_cpu

ON = {"cuda_graphs": True}


@pytest.fixture
def tape(monkeypatch) -> Tape:
    return record_on_cpu(monkeypatch, Tape())


def steps(engine: FSDPEngine, loss: Loss) -> list[dict[str, float]]:
    """Two steps of several micro-batches, with inference between the parts of the last one."""
    name = "value" if engine.head == "value" else "logprob"
    first = engine.train_step(random_batch(6), loss)
    engine.forward_backward(random_batch(6, seed=1), loss, is_last=False)
    inferred = [engine.infer(random_batch(6, seed=seed), (name,))[name] for seed in (2, 1, 2)]
    assert torch.equal(inferred[0], inferred[2])
    engine.forward_backward(random_batch(6, seed=2), loss)
    return [first, engine.optimizer_step(), {"inferred": inferred[1].double().sum().item()}]


CASES = {
    "policy": ("llama", {}, {}), "window": ("mistral", {}, {}), "critic": ("llama", {"head": "value"}, {}),
    "bfloat16 weights": ("llama", {}, {"param_dtype": "bfloat16"}),
    "recomputed": ("llama", {}, {"activation_checkpointing": "full"}),
    "frozen embedding": ("llama", {}, {"freeze": ("*embed_tokens*",)}),
}  # fmt: skip


@pytest.mark.thin(3)
@pytest.mark.parametrize(("model", "options", "config"), CASES.values(), ids=CASES)
def test_replays_have_the_bits_of_launches(model, options, config, tiny_model, tape):
    loss = value_loss() if options else policy_loss()
    found, states = [], []
    for in_graphs in (True, False):
        engine = make_engine(tiny_model(model), max_tokens=24, dtype="bfloat16", config=ON | config, **options)
        if not in_graphs:
            engine.model.run_backbone = final_hidden
        found.append(steps(engine, loss))
        states.append(reference.state_of({"engine": engine}))
    assert found[0] == found[1]
    reference.assert_equal(*states)
    assert tape.num_replayed > tape.num_recorded > 0


def test_both_gradients_of_a_tied_embedding_are_added_in_float32(tiny_model, tape, monkeypatch):
    """Launched passes add them in bfloat16 first."""
    path = tiny_model("qwen2-tied")
    found = []
    for settings in ({"dtype": "bfloat16", "config": ON}, {"dtype": "bfloat16", "config": ON}, {}):
        if not settings:
            monkeypatch.setattr(functions, "_has_varlen_kernel", lambda _: False)
        engine = make_engine(path, max_tokens=48, **settings)
        if len(found) == 1:
            engine.model.run_backbone = final_hidden
        for _ in range(2):  # the first records
            engine.zero_grad()
            engine.forward_backward(random_batch(), policy_loss())
        hand_over_gradients(engine.model)
        found.append({name: parameter.grad for name, parameter in engine.model.named_parameters()})
    replayed, launched, expected = found
    assert tape.num_replayed > 0
    (tied,) = {name for name in expected if not torch.equal(replayed[name], launched[name])}
    assert tied.endswith("embed_tokens.weight")
    error, launched_error = ((x[tied] - expected[tied]).norm().item() for x in (replayed, launched))
    assert error <= launched_error


def test_weights_that_move_are_recorded_again(tiny_model, tape):
    engine, other = (make_engine(tiny_model("llama"), max_tokens=48, dtype="bfloat16", config=ON) for _ in range(2))
    other.model.run_backbone = final_hidden
    batch, found = random_batch(6), []
    for each in (engine, other):
        each.train_step(batch, policy_loss())
        num_recorded = tape.num_recorded
        each.to("cpu")
        for parameter in each.model.parameters():
            parameter.data = parameter.data.clone()
        found.append([each.train_step(batch, policy_loss()) for _ in range(2)])
        assert tape.num_recorded > num_recorded or each is other
    assert num_recorded > 0
    assert found[0] == found[1]


def test_a_step_that_is_dropped_leaves_no_gradient(tiny_model, tape):
    engines = [make_engine(tiny_model("llama"), max_tokens=48, dtype="bfloat16", config=ON) for _ in range(2)]
    for engine in engines:
        engine.train_step(random_batch(), policy_loss())
    engines[0].forward_backward(random_batch(seed=1), policy_loss())
    engines[0].zero_grad()
    assert tape.num_replayed > 0
    assert engines[0].train_step(random_batch(), policy_loss()) == engines[1].train_step(random_batch(), policy_loss())


def test_a_pass_that_cannot_be_recorded_runs_without_a_graph(tiny_model, tape, monkeypatch):
    """Attention segment by segment reads lengths on the host."""
    monkeypatch.setattr(functions, "_has_varlen_kernel", lambda _: False)
    engine, plain = (make_engine(tiny_model("llama"), max_tokens=48, dtype="bfloat16", config=ON) for _ in range(2))
    plain.model.run_backbone = final_hidden
    with pytest.warns(UserWarning, match=r"cuda_graphs: a pass could not be recorded.*waits for the device") as warned:
        found = steps(engine, policy_loss())
    assert len(warned) == 1
    assert found == steps(plain, policy_loss())
    assert tape.num_replayed == 0


def test_a_backward_pass_after_another_forward_pass_is_refused(tiny_model, tape):
    """Recordings share the memory of activations."""
    engine = make_engine(tiny_model("llama"), dtype="bfloat16", config=ON)
    batch = random_batch()
    with engine.train_mode():
        for _ in range(2):
            first = engine.model(engine._inputs(batch), temperature=1.0).logprob.sum()
            engine.model(engine._inputs(batch), temperature=1.0)
        with pytest.raises(RuntimeError, match="run the backward pass before the next forward pass"):
            first.backward()


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_cpu_has_no_graphs(tiny_model):
    with pytest.raises(ValueError, match=r"cuda_graphs is set, but this process computes on a CPU.*leave it out"):
        make_engine(tiny_model("llama"), dtype="bfloat16", config=ON)


def test_processes_that_share_a_model_have_no_graphs():
    with pytest.raises(ValueError, match=r"for a single process, but there are 2: FSDP gathers weights.*leave it out"):
        graphs.require_graphs(EngineConfig(**ON), World(rank=0, size=2, device=torch.device("cuda", 0)))


@pytest.mark.parametrize(("model", "reason"), [("qwen3-moe", "has experts"), ("qwen2-vl", "has a vision tower")])
def test_other_models_have_no_graphs(model, reason, tiny_model):
    policy = load_policy(tiny_model(model))
    with pytest.raises(ValueError, match=f"dense models of text that run packed, but .* {reason}: leave it out"):
        graphs.run_in_graphs(policy, EngineConfig(**ON))
    policy.run_padded("has states")
    with pytest.raises(ValueError, match="runs padded: leave it out"):
        graphs.run_in_graphs(policy, EngineConfig(**ON))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"compute_dtype": "float32"}, "compute_dtype is float32, whose attention waits"),
        ({"cpu_offload": True}, "leave cpu_offload out"),
        ({"offload_between_phases": True}, "leave offload_between_phases out"),
        ({"float8": "rowwise"}, "leave float8 out"),
        ({"lora": {"rank": 4}}, "lora turns off"),
        ({"activation_checkpointing": "offload"}, "set activation_checkpointing to full"),
    ],
)
def test_settings_that_do_not_go_with_graphs(other, message):
    with pytest.raises(ValueError, match=f"cuda_graphs .*{message}"):
        EngineConfig(**ON, **other)


def test_a_module_of_ones_own_has_no_graphs():
    with pytest.raises(ValueError, match="cuda_graphs is for models of transformers in folders"):
        FSDPEngine.from_module(torch.nn.Linear(16, 16), EngineConfig(**ON))


@pytest.mark.gpu
def test_steps_on_a_gpu(tiny_model):
    """Attention adds gradients in any order there."""
    found = []
    for in_graphs in (True, False):
        engine = make_engine(tiny_model("llama"), max_tokens=24, dtype="bfloat16", config=ON)
        recorded = engine.model.run_backbone
        if not in_graphs:
            engine.model.run_backbone = final_hidden
        found.append([engine.train_step(random_batch(), policy_loss()) for _ in range(4)])
        assert not in_graphs or any(recorded._passes.values())
    for replayed, launched in zip(*found, strict=True):
        assert replayed["loss"] == pytest.approx(launched["loss"], rel=0.02)
        assert replayed["grad_norm"] == pytest.approx(launched["grad_norm"], rel=0.02)
