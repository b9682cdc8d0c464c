"""`zero_grad`, `forward_backward` and `optimizer_step` driven by hand: the same step as `train_step`, in any pieces."""

from dataclasses import replace

import pytest
import torch

from rlft_fast.config import LoraConfig
from rlft_fast.data import Batch, plan_batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.rl import PolicyLoss, loss_weights
from tests.engine.reference import (
    POLICY_LOSS,
    FailsLate,
    assert_equal,
    assert_same_steps,
    make_engine,
    policy_loss,
    random_batch,
    weights,
)
from tests.support.machine.distributed import run_distributed
from tests.support.numerics import assert_close_to_rounding

MAX_TOKENS = 40  # three micro-batches of one rank, two of each of two, and two in each half
WAYS = {
    "whole": {},
    "lora": {"config": {"lora": LoraConfig(rank=2)}},
    "offload": {"config": {"offload_between_phases": True}},
    "every micro-batch": {"config": {"reduce_every_micro_batch": True}},
}


def pieces_of_the_plan(batch: Batch, max_tokens: int, world_size: int) -> list[Batch]:
    """The micro-batches of all ranks that run at once, as batches with the weights of the whole."""
    weighted = batch.replace(loss_weight_T=loss_weights(batch.loss_mask_T, batch.cu_seqlens, "token-mean"))
    plan = plan_batch(batch, max_tokens, world_size)
    by_rank = [plan.micro_batches(rank) for rank in range(world_size)]
    return [weighted.select([i for indices in at_once for i in indices]) for at_once in zip(*by_rank, strict=True)]


def step_by_hand(engine: FSDPEngine, pieces: list[Batch], loss: PolicyLoss) -> dict[str, float]:
    engine.zero_grad()
    for piece in pieces:
        engine.forward_backward(piece, loss, is_last=piece is pieces[-1])
    return engine.optimizer_step()


def same(first: FSDPEngine, second: FSDPEngine) -> None:
    assert_equal(weights(first), weights(second))


def check_pieces(rank: int, path, options) -> None:
    batch, loss = random_batch(9), policy_loss()
    whole, one_call, by_plan, in_halves = (make_engine(path, max_tokens=MAX_TOKENS, **options) for _ in range(4))
    groups = whole.world.size // whole.config.sequence_parallel
    for _ in range(2):
        expected = whole.train_step(batch, loss)
        one_call.zero_grad()
        one_call.forward_backward(batch, loss)
        assert one_call.optimizer_step() == expected
        pieces = pieces_of_the_plan(batch, MAX_TOKENS, groups)
        assert len(pieces) > 1
        metrics = step_by_hand(by_plan, pieces, loss)
        assert metrics.keys() == expected.keys()
        weighted = batch.replace(loss_weight_T=loss_weights(batch.loss_mask_T, batch.cu_seqlens, "token-mean"))
        halves = [weighted.select(range(4)), weighted.select(range(4, 9))]
        metrics = step_by_hand(in_halves, halves, loss)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    same(one_call, whole)
    if groups == 1:
        same(by_plan, whole)
    assert_same_steps(by_plan, whole, 2)
    assert_same_steps(in_halves, whole, 2)


@pytest.mark.parametrize("way", WAYS)
def test_pieces_are_the_whole(way, tiny_model):
    check_pieces(0, tiny_model("llama"), WAYS[way])


@pytest.mark.dist
@pytest.mark.parametrize("options", [{}, {"config": {"sequence_parallel": 2}}], ids=["sharded", "sequence_parallel"])
@pytest.mark.thin(2)
def test_pieces_are_the_whole_on_two_processes(options, tiny_model):
    run_distributed(check_pieces, 2, tiny_model("llama"), options)


def test_losses_add_up_with_inference_between(tiny_model):
    """Two losses on two batches give the gradient of their sum, which without clipping is AdamW's first moment."""
    first, second = random_batch(5), random_batch(4, seed=1)
    losses = policy_loss(), replace(policy_loss("sequence-mean"), entropy_coef=0.5)
    moments = []
    for loss, batch in zip(losses, (first, second), strict=True):
        engine = make_engine(tiny_model("llama"))
        engine.train_step(batch, loss)
        moments.append({name: x for name, x in engine.state_tensors().items() if name.endswith("exp_avg")})
    engine = make_engine(tiny_model("llama"))
    before = engine.infer(first, ("logprob",))["logprob"]
    one = engine.forward_backward(first, losses[0], is_last=False)
    assert torch.equal(engine.infer(first, ("logprob",))["logprob"], before)
    other = engine.forward_backward(second, losses[1])
    metrics = engine.optimizer_step()
    assert metrics["loss"] == pytest.approx(float(one["loss"] + other["loss"]), rel=1e-6)
    assert metrics["ratio_max"] == max(float(one["ratio_max"]), float(other["ratio_max"]))
    for name, moment in engine.state_tensors().items():
        if name.endswith("exp_avg"):
            assert_close_to_rounding(moment, moments[0][name] + moments[1][name])


def test_outputs_of_every_call(tiny_model):
    first, second = random_batch(5), random_batch(4, seed=1)
    engine = make_engine(tiny_model("llama"))
    expected = [engine.infer(batch, ("logprob", "entropy")) for batch in (first, second)]
    outputs: list[dict] = [{}, {}]
    for batch, own in zip((first, second), outputs, strict=True):
        engine.forward_backward(batch, policy_loss(), is_last=batch is second, outputs=own)
        assert own == {}
    engine.optimizer_step()
    for own, inferred in zip(outputs, expected, strict=True):
        assert own.keys() == inferred.keys()
        assert all(torch.equal(own[name], inferred[name]) for name in own)


def test_a_step_without_reduced_gradients_is_an_error(tiny_model):
    engine = make_engine(tiny_model("llama"))
    with pytest.raises(
        ValueError, match="needs reduced gradients, but there was no forward_backward since the last step"
    ):
        engine.optimizer_step()
    engine.forward_backward(random_batch(), policy_loss(), is_last=False)
    with pytest.raises(ValueError, match="but the last one had is_last=False since the last step"):
        engine.optimizer_step()
    engine.forward_backward(random_batch(), policy_loss())
    engine.optimizer_step()
    with pytest.raises(ValueError, match="there was no forward_backward"):
        engine.optimizer_step()
    frozen = FSDPEngine(str(tiny_model("llama")), engine.config).initialize()
    for call in (
        frozen.zero_grad,
        frozen.optimizer_step,
        lambda: frozen.forward_backward(random_batch(), policy_loss()),
    ):
        with pytest.raises(ValueError, match="this engine is frozen"):
            call()


def test_a_call_that_fails_drops_the_calls_before(tiny_model):
    batch = random_batch()
    engine, expected = (make_engine(tiny_model("llama"), max_tokens=24, **WAYS["offload"]) for _ in range(2))
    engine.forward_backward(batch, policy_loss(), is_last=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward_backward(batch, FailsLate(**POLICY_LOSS, call=2))
    with pytest.raises(ValueError, match="there was no forward_backward"):
        engine.optimizer_step()
    assert engine.train_step(batch, policy_loss()) == expected.train_step(batch, policy_loss())
    same(engine, expected)


def test_gradients_that_are_not_finite_skip_the_whole_step(tiny_model):
    engine = make_engine(tiny_model("llama"))
    before = weights(engine)
    bad = random_batch().replace(advantage_T=torch.full((random_batch().num_tokens,), torch.inf))
    engine.forward_backward(random_batch(), policy_loss(), is_last=False)
    engine.forward_backward(bad, policy_loss())
    metrics = engine.optimizer_step()
    assert (metrics["skipped_steps"], engine.step) == (1, 0)
    assert all(torch.equal(x, before[name]) for name, x in weights(engine).items())
    engine.train_step(random_batch(), policy_loss())
    assert engine.step == 1
