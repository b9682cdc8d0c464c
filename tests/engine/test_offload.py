"""Weights and optimizer state may live in CPU memory, always or between phases; nothing that is computed changes."""

import gc

import pytest
import torch

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.sharding import decoder_blocks, offload_inputs
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch


def run(path, **config) -> tuple[dict, dict]:
    engine = make_engine(path, config=config)
    batch = random_batch()
    logprob = engine.infer(batch, ("logprob",))
    batch = near_policy(batch, logprob["logprob"])
    engine.train_step(batch, policy_loss())
    with engine.train_mode():
        engine.train_step(batch, policy_loss())
        engine.infer(batch, ("logprob",))
    return logprob, reference.weights(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_as_without(dtype, tiny_model):
    path = tiny_model("qwen2-tied")
    plain = run(path, compute_dtype=dtype)
    for how in ("cpu_offload", "offload_between_phases"):
        for actual, expected in zip(run(path, compute_dtype=dtype, **{how: True}), plain, strict=True):
            reference.assert_equal(actual, expected)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_inputs_of_blocks_wait_elsewhere(mode, tiny_model, monkeypatch):
    """Each block saves a copy of its input and nothing else, and the gradients keep their bits."""
    batch = near_policy(random_batch(), torch.full((random_batch().num_tokens,), -5.5))
    plain = make_engine(tiny_model("llama"), config={"activation_checkpointing": mode})
    plain.train_step(batch, policy_loss())
    offloaded = make_engine(tiny_model("llama"), config={"activation_checkpointing": "offload"})
    assert offloaded.config.activation_checkpointing == "full"  # a CPU has nothing to move
    blocks = decoder_blocks(offloaded.model)
    offload_inputs(blocks, torch.device("cpu"))
    inputs, copies, copy = [], [], torch.Tensor.copy_
    for block in blocks:
        block.register_forward_pre_hook(
            lambda _, arguments: inputs.append((arguments[0].shape, {"non_blocking": True}))
        )

    def noted(self: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        copies.append((self.shape, options))
        return copy(self, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    offloaded.train_step(batch, policy_loss())
    monkeypatch.undo()
    assert copies == inputs
    assert len(copies) >= len(blocks)
    reference.assert_equal(reference.weights(offloaded), reference.weights(plain))


def test_moved_state_keeps_its_bits_and_stays_tied(tiny_model):
    engine = make_engine(tiny_model("llama-tied"))
    engine.train_step(random_batch(), policy_loss())
    before = {name: reference.full(tensor) for name, tensor in engine.state_tensors().items()}
    engine.to("cpu")
    engine.to(engine.device)
    reference.assert_equal({name: reference.full(t) for name, t in engine.state_tensors().items()}, before)
    model = engine.model.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_phases_nest(tiny_model, monkeypatch):
    """The innermost phase does not take from the outer what it still needs; only training needs the optimizer."""
    moves, move = [], FSDPEngine.to

    def recorded(engine: FSDPEngine, device: torch.device | str, **options: bool) -> None:
        moves.append((str(device), options))
        move(engine, device, **options)

    monkeypatch.setattr(FSDPEngine, "to", recorded)
    engine = make_engine(tiny_model("llama"), config={"offload_between_phases": True})
    weights, nothing, state = (
        (str(engine.device), {"params": params, "optimizer": optimizer})
        for params, optimizer in ((True, False), (False, False), (False, True))
    )
    away = ("cpu", {})
    with engine.eval_mode():
        engine.infer(random_batch(), ("logprob",))
        engine.train_step(random_batch(), policy_loss())
        assert moves == [away, weights, nothing, state]
    assert moves == [away, weights, nothing, state, away]


@pytest.mark.parametrize("params", [True, False])
def test_weights_and_optimizer_state_move_apart(params, tiny_model):
    engine = make_engine(tiny_model("llama"))
    engine.optimizer.initialize_state()
    state = engine.optimizer.state.values()
    engine.to("meta", params=params, optimizer=not params)
    here, there = engine.device.type, "meta"
    assert {x.device.type for x in engine.model.parameters()} == {there if params else here}
    assert {x.device.type for moments in state for x in moments.values()} == {here if params else there}


def test_both_kinds_at_once_are_refused():
    with pytest.raises(ValueError, match="leave offload_between_phases out"):
        EngineConfig(cpu_offload=True, offload_between_phases=True)
    with pytest.raises(ValueError, match=r"leave optimizer\.cpu_offload out"):
        EngineConfig(cpu_offload=True, optimizer=OptimizerConfig(cpu_offload=True))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}], ids=["f32", "bf16"])
def test_memory_is_returned(config, tiny_model):
    """Between phases less than a tenth of weights and optimizer state is left on the device."""
    gc.collect()  # engines of tests before
    before = torch.cuda.memory_allocated()
    engine = make_engine(tiny_model("llama"), config=config)
    engine.train_step(random_batch(), policy_loss())
    held = sum(tensor.numel() * tensor.element_size() for tensor in engine.state_tensors().values())
    assert torch.cuda.memory_allocated() - before >= held
    engine.to("cpu")
    assert torch.cuda.memory_allocated() - before < 0.1 * held
    engine.to("cuda")
    engine.train_step(random_batch(), policy_loss())
