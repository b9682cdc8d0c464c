"""Losses over whole sequences, and every aggregation: the same gradient whatever the cut, and that of the equations."""

import math
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch

from rlft_fast.data import Batch
from rlft_fast.rl import Aggregation, PolicyLoss, ValueLoss
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, random_batch
from tests.support.machine.distributed import run_distributed

AGGREGATIONS = get_args(Aggregation)
CAPS = [1000, 24]  # one micro-batch, several
LOSSES = {
    **{name: PolicyLoss(aggregation=name, max_response_tokens=16, entropy_coef=0.02) for name in AGGREGATIONS},
    "gspo": PolicyLoss(loss="gspo", clip_low=0.2, clip_high=0.2, aggregation="sequence-mean"),
    "gmpo": PolicyLoss(loss="gmpo", options={}, clip_low=0.1, clip_high=0.1, aggregation="sequence-mean"),
    "kl": PolicyLoss(kl_coef=0.1, kl_estimator="unbiased"),
}


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def batch(path) -> Batch:
    batch = random_batch()
    return near_policy(batch, make_engine(path).infer(batch, ("logprob",))["logprob"])


def gradients(path: Path, batch: Batch, loss: PolicyLoss | ValueLoss, cap: int = 1000, **config) -> dict:
    """Of one step, with what the step reports."""
    head = "value" if isinstance(loss, ValueLoss) else "logprob"
    engine = make_engine(path, head=head, max_tokens=cap, config=config)
    metrics = engine.train_step(batch, loss)
    return reference.gradients(engine) | {"metrics": torch.tensor(list(metrics.values()))}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_does_not_depend_on_cap_or_order(path, batch, name):
    shuffled = batch.select([3, 0, 6, 5, 1, 4, 2])
    cases = [(batch, CAPS[0]), *((shuffled, cap) for cap in CAPS)]
    first, *others = (gradients(path, each, LOSSES[name], cap) for each, cap in cases)
    for other in others:
        reference.assert_close(other, first, 1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_gradient_does_not_depend_on_cap(path, batch, aggregation):
    loss = ValueLoss(clip=0.2, aggregation=aggregation, max_response_tokens=16)
    whole, cut = (gradients(path, batch, loss, cap) for cap in CAPS)
    reference.assert_close(cut, whole, 1e-5)


# Metrics are means whatever the loss is divided by.
def test_aggregations_are_multiples_of_each_other_where_they_should_be(path, batch):
    engine_metrics = {}
    found = {}
    for name in AGGREGATIONS:
        engine = make_engine(path)
        engine_metrics[name] = engine.train_step(batch, PolicyLoss(aggregation=name, max_response_tokens=16))
        found[name] = reference.gradients(engine)
    num_tokens = int(batch.loss_mask_T.sum())
    factors = {"sequence-mean-token-sum": num_tokens / 7, "constant": num_tokens / (7 * 16), "token-sum": num_tokens}
    for name, factor in factors.items():
        scaled = {key: factor * gradient for key, gradient in found["token-mean"].items()}
        reference.assert_close(found[name], scaled, 1e-5)
        for key in ("policy_loss", "clip_share", "approx_kl", "ratio_max"):
            assert engine_metrics[name][key] == engine_metrics["token-mean"][key]
        expected = factor * engine_metrics["token-mean"]["loss"]
        assert engine_metrics[name]["loss"] == pytest.approx(expected, rel=1e-5)  # each term is scaled, then added


def test_gspo_is_the_loss_of_the_paper(path, batch):
    """One advantage per sequence: the mean over sequences of -min(s A, clip(s) A), differentiated by autograd."""
    advantage_B = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3, 1.0, -2.0])
    advantage_T = advantage_B.repeat_interleave(torch.from_numpy(batch.lengths))
    actual = gradients(path, batch.replace(advantage_T=advantage_T), LOSSES["gspo"], cap=24)
    model = reference.plain_model(path)
    logprob_T, _ = reference._at_targets(reference.plain_log_softmax(model, batch, 1.0), batch)
    losses = []
    for (start, end), advantage in zip(pairwise(batch.cu_seqlens.tolist()), advantage_B.tolist(), strict=True):
        active = batch.loss_mask_T[start:end]
        s = (logprob_T - batch.old_logprob_T)[start:end][active].mean().exp()
        losses.append(-torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage))
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    actual.pop("metrics")
    reference.assert_close(actual, expected, 2e-5)


def test_the_first_step_of_a_sequence_loss_is_on_policy(path):
    engine, batch = make_engine(path, max_tokens=24), random_batch()
    batch = batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
    metrics = engine.train_step(batch, LOSSES["gspo"])
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_share"] == 0.0
    assert math.isfinite(metrics["grad_norm"])


CASES = [(name, cap, size) for name in LOSSES for cap, size in ((24, 7), (1000, 1))]


def on_two_processes(rank: int, path: Path, batch: Batch, expected: Path) -> None:
    for name, cap, size in CASES:
        wanted = torch.load(expected / f"{name}-{cap}.pt")
        # A batch of one sequence leaves the second rank without any.
        reference.assert_close(gradients(path, batch.select(range(size)), LOSSES[name], cap), wanted, 1e-4)
    for name in ("gspo", "gmpo"):  # sequences that are shared by both ranks
        shared = gradients(path, batch, LOSSES[name], 24, sequence_parallel=2)
        reference.assert_close(shared, torch.load(expected / f"{name}-24.pt"), 1e-4)


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_compute_what_one_does(path, batch, tmp_path):
    for name, cap, size in CASES:
        torch.save(gradients(path, batch.select(range(size)), LOSSES[name], cap), tmp_path / f"{name}-{cap}.pt")
    run_distributed(on_two_processes, 2, path, batch, tmp_path)
