"""Tokens without an advantage do not run where the loss reads nothing but the advantage: the same gradient for less."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlft_fast.data import Batch, share_prefixes
from rlft_fast.engine import FSDPEngine, weighted
from rlft_fast.rl import PolicyLoss
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, random_batch, random_image_batch, weights
from tests.support.machine.distributed import run_distributed

LOSSES = {
    "ppo": PolicyLoss(),
    "sequence-mean": PolicyLoss(aggregation="sequence-mean"),
    "constant": PolicyLoss(aggregation="constant", max_response_tokens=16),
    "gspo": PolicyLoss(loss="gspo", clip_low=0.2, clip_high=0.2, aggregation="sequence-mean"),
    "clip-cov": PolicyLoss(loss="clip-cov"),
}
IDLE = (0, 3, 4, 5)  # of 9 sequences; three with the same prompt are among them


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("llama")


def without_advantage(batch: Batch, sequences=IDLE) -> Batch:
    """The batch with advantages of 0 in these sequences and at a few other tokens."""
    advantage_T = batch.advantage_T.clone()
    bounds = batch.cu_seqlens.tolist()
    for b in sequences:
        advantage_T[bounds[b] : bounds[b + 1]] = 0.0
    advantage_T[::4] = 0.0
    return batch.replace(advantage_T=advantage_T, selected_T=(torch.arange(batch.num_tokens) % 3 == 0).float())


@pytest.fixture(scope="module")
def batch(path) -> Batch:
    batch = random_batch(9)
    return without_advantage(near_policy(batch, make_engine(path).infer(batch, ("logprob",))["logprob"]))


def one_step(path: Path, batch: Batch, loss: PolicyLoss, **config) -> tuple[dict, dict, dict]:
    """Metrics, gradients and outputs."""
    engine = make_engine(path, max_tokens=batch.max_seqlen + 2, config=config)
    outputs: dict = {}
    metrics = engine.train_step(batch, loss, outputs=outputs)
    return metrics, reference.gradients(engine), outputs


def check_same_gradient(rank: int, path: Path, batch: Batch, names: list[str], config: dict) -> None:
    for name in names:
        metrics, gradients, outputs = one_step(path, batch, LOSSES[name], **config)
        of_all, expected, all_outputs = one_step(path, batch, replace(LOSSES[name], every_token=True), **config)
        reference.assert_close(gradients, expected, 2e-5)
        assert metrics["loss"] == pytest.approx(of_all["loss"], rel=1e-4)
        weight_T = weighted(batch, LOSSES[name])[0].loss_weight_T
        assert 0.2 < (weight_T != 0).sum() / batch.loss_mask_T.sum() < 0.7
        entropy = (weight_T * all_outputs["entropy"]).sum().item()
        assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)  # a mean over the tokens that ran
        assert metrics["ratio_max"] <= of_all["ratio_max"]
        assert torch.equal(outputs["logprob"] != 0, weight_T != 0)
        torch.testing.assert_close(outputs["logprob"], all_outputs["logprob"].where(weight_T != 0, 0.0))


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_all_tokens(path, batch, name):
    check_same_gradient(0, path, batch, [name], {})


@pytest.mark.dist
@pytest.mark.parametrize("config", [{}, {"sequence_parallel": 2}], ids=["data", "sequence"])
@pytest.mark.thin(2)
def test_the_gradient_is_that_of_all_tokens_on_two_processes(path, batch, config):
    run_distributed(check_same_gradient, 2, path, batch, ["ppo", "gspo"], config)


def rows_that_run(engine: FSDPEngine, batch: Batch, loss: PolicyLoss) -> tuple[int, int]:
    """Rows of the backbone and rows of the head in a step."""
    rows, active = [], []

    def note(_, args) -> None:
        rows.append(len(args[0].input_ids_U))
        active.append(len(args[0].active_index_A))

    hook = engine.model.register_forward_pre_hook(note)
    engine.train_step(batch, loss)
    hook.remove()
    return sum(rows), sum(active)


def test_what_runs_is_what_the_advantages_need(path, batch):
    engine = make_engine(path)
    taught = batch.select([b for b in range(9) if b not in IDLE])
    used = taught.replace(loss_weight_T=(taught.advantage_T != 0).float())
    expected = len(share_prefixes(used).token_index_U), int((batch.loss_mask_T & (batch.advantage_T != 0)).sum())
    assert rows_that_run(engine, batch, LOSSES["ppo"]) == expected
    whole = len(share_prefixes(batch).token_index_U), int(batch.loss_mask_T.sum())
    assert rows_that_run(engine, batch, replace(LOSSES["ppo"], every_token=True)) == whole
    # A loss over whole sequences reads all tokens of the sequences that have an advantage somewhere.
    sequences = len(share_prefixes(taught).token_index_U), int(taught.loss_mask_T.sum())
    assert rows_that_run(engine, batch, LOSSES["gspo"]) == sequences


def test_a_batch_without_advantages_is_a_step_of_gradient_zero(path, batch):
    """Moments decay and move the weights, as they do where every token runs."""
    skips, runs = make_engine(path), make_engine(path)
    nothing = batch.replace(advantage_T=torch.zeros(batch.num_tokens))
    for step_batch in (batch, nothing):
        metrics = skips.train_step(step_batch, LOSSES["ppo"])
        runs.train_step(step_batch, replace(LOSSES["ppo"], every_token=True))
    assert metrics["grad_norm"] == metrics["loss"] == 0.0
    assert skips.step == runs.step == 2
    reference.assert_close(weights(skips), weights(runs), 1e-5)


def test_with_images_every_token_runs():
    """The planner counts rows of the text model, and the images of sequences without rows would add up in one call."""
    batch = without_advantage(random_image_batch(9))
    assert torch.equal(weighted(batch, LOSSES["ppo"])[0].active_T, batch.loss_mask_T)


def test_a_sequence_mean_is_over_the_tokens_that_run(path, batch):
    """In a batch whose own weights leave tokens out."""
    seen = []

    def noting(logprob_T, advantage_T, sequence_mean):
        seen.append((advantage_T, sequence_mean(advantage_T)))
        return -advantage_T * logprob_T

    weighted_batch = batch.replace(loss_weight_T=batch.loss_mask_T * (torch.arange(batch.num_tokens) % 3 > 0).float())
    make_engine(path, max_tokens=1000).train_step(weighted_batch, PolicyLoss(loss=noting))
    advantage_A, mean_A = seen[-1]
    active_T = weighted_batch.active_T
    expected = [
        x[mask].mean().expand(int(mask.sum()))
        for x, mask in zip(*(x_T.split(batch.lengths.tolist()) for x_T in (batch.advantage_T, active_T)), strict=True)
    ]
    assert torch.equal(advantage_A, batch.advantage_T[active_T])
    torch.testing.assert_close(mean_A, torch.cat(expected), equal_nan=True)


def test_inference_runs_for_all_tokens(path, batch):
    engine = make_engine(path, max_tokens=24)
    expected = engine.infer(batch, ("logprob",))["logprob"]
    found = engine.infer(weighted(batch, LOSSES["ppo"])[0], ("logprob",))["logprob"]
    assert torch.equal(found, expected)
