"""Sequences that a loss couples: they never part, and the gradient is autograd's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlft_fast.data import Batch, plan_batch
from tests.engine.reference import (
    TEMPERATURE,
    assert_close,
    gradients,
    make_engine,
    plain_log_softmax,
    plain_model,
    random_batch,
)
from tests.support.machine.distributed import run_distributed


class PairLoss:
    """-log sigmoid(log π(chosen) - log π(rejected)), summed over pairs (DPO, arXiv 2305.18290, without reference)."""

    aggregation, max_response_tokens = "token-mean", None
    fields = ("sequence_T", "unit_B", "reward_B")
    needs_sequences = False

    def per_token(self, fields):
        logprob_T, sequence_T, reward_B = fields["logprob_T"], fields["sequence_T"], fields["reward_B"]
        logprob_B = torch.zeros_like(reward_B).index_add(0, sequence_T, logprob_T)
        _, pair_B = fields["unit_B"].unique(return_inverse=True)
        sign_B = torch.where(reward_B > 0, 1.0, -1.0)
        margin = (
            torch.zeros(int(pair_B.max()) + 1).index_add(0, pair_B, sign_B * logprob_B) if len(pair_B) else logprob_B
        )
        # One token of each chosen sequence carries the loss of the pair.
        first_T = torch.ones_like(sequence_T).bool()
        first_T[1:] = sequence_T[1:] != sequence_T[:-1]
        loss_B = -logsigmoid(margin)[pair_B] * (reward_B > 0)
        return torch.where(first_T, loss_B[sequence_T], 0.0)

    def metrics(self, fields):
        return {"pairs": (fields["reward_B"] > 0).sum()}


def pairs(num_pairs: int = 5) -> Batch:
    batch = random_batch(2 * num_pairs)
    order = torch.randperm(2 * num_pairs, generator=torch.Generator().manual_seed(0))
    unit_B = (torch.arange(2 * num_pairs) // 2)[order.argsort()]
    reward_B = (torch.arange(2 * num_pairs) % 2).float()[order.argsort()]
    return batch.replace(unit_B=unit_B, reward_B=reward_B)


def plain_gradients(path, batch: Batch) -> dict[str, Tensor]:
    model = plain_model(path)
    log_softmax_TV = plain_log_softmax(model, batch, TEMPERATURE)
    index = batch.active_index_T
    logprob = log_softmax_TV[index, batch.target_T[index]]
    sequence = torch.searchsorted(batch.cu_seqlens.long(), index, right=True) - 1
    logprob_B = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, sequence, logprob)
    loss = torch.zeros((), dtype=torch.float64)
    for unit in range(batch.num_sequences // 2):
        members = (batch.unit_B == unit).nonzero().squeeze(1)
        chosen, rejected = sorted(members.tolist(), key=lambda b: -float(batch.reward_B[b]))
        loss = loss - logsigmoid(logprob_B[chosen] - logprob_B[rejected])
    loss.backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradient(rank: int, path, max_tokens: int) -> None:
    engine = make_engine(path, max_tokens=max_tokens, temperature=TEMPERATURE)
    batch = pairs()
    metrics = engine.train_step(batch, PairLoss())
    assert metrics["pairs"] == 5
    assert_close(gradients(engine), {name: g.float() for name, g in plain_gradients(path, batch).items()}, 1e-4)


@pytest.mark.parametrize("max_tokens", [44, 400])
def test_gradient_of_a_pairwise_loss(max_tokens, tiny_model):
    check_gradient(0, tiny_model("llama"), max_tokens)


@pytest.mark.dist
def test_gradient_of_a_pairwise_loss_on_two_processes(tiny_model):
    run_distributed(check_gradient, 2, tiny_model("llama"), 44)


@settings(max_examples=100)
@given(st.data(), st.integers(1, 12), st.integers(1, 4), st.integers(0, 40))
def test_units_never_part(data, num_sequences, world_size, spare):
    unit_B = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=num_sequences, max_size=num_sequences)))
    batch = random_batch(num_sequences, seed=spare).replace(unit_B=unit_B)
    lengths = [int(batch.lengths[unit_B.numpy() == unit].sum()) for unit in unit_B.unique().tolist()]
    plan = plan_batch(batch, max(lengths) + spare, world_size)
    micro_batches = [part for rank in range(world_size) for part in plan.micro_batches(rank)]
    assert sorted(np.concatenate(micro_batches).tolist()) == list(range(num_sequences))
    for unit in unit_B.unique():
        holding = [part for part in micro_batches if (unit_B[torch.from_numpy(part)] == unit).any()]
        assert len(holding) == 1


def test_a_unit_over_the_cap_is_named():
    batch = random_batch(4).replace(unit_B=torch.tensor([7, 7, 8, 7]))
    longest = int(batch.lengths.max())
    with pytest.raises(
        ValueError, match=rf"the unit of sequences 0, 1, 3 has \d+ tokens, more than max_tokens={longest}"
    ):
        plan_batch(batch, longest)


def test_ranks_that_share_sequences_cannot_couple_them(tiny_model):
    engine = make_engine(tiny_model("llama"))
    engine.config = engine.config.model_copy(update={"sequence_parallel": 2})
    with pytest.raises(ValueError, match="couples sequences, which ranks share where sequence_parallel is 2"):
        engine.forward_backward(pairs(), PairLoss())


class Spread:
    """(value - mean of the values of its sequence)², the mean over all sampled tokens."""

    aggregation, max_response_tokens, needs_sequences = "token-mean", None, True
    fields = ("loss_weight_T",)

    def per_token(self, fields, sequence_mean):
        return fields["loss_weight_T"] * (fields["new_value_T"] - sequence_mean(fields["new_value_T"])).square()

    def metrics(self, fields, sequence_mean):
        return {"mean": (fields["loss_weight_T"] * sequence_mean(fields["new_value_T"])).sum()}


@pytest.mark.parametrize("max_tokens", [24, 128])
def test_a_loss_of_values_gets_the_means_of_sequences(max_tokens, tiny_model):
    engine, batch = make_engine(tiny_model("llama"), head="value", max_tokens=max_tokens), random_batch()
    values = engine.infer(batch, ("value",))["value"].split(batch.lengths.tolist())
    masks = batch.loss_mask_T.split(batch.lengths.tolist())
    taught = [own[mask] for own, mask in zip(values, masks, strict=True) if mask.any()]
    metrics = engine.train_step(batch, Spread())
    spread = torch.cat([own - own.mean() for own in taught]).square().mean()
    assert spread > 1e-3
    assert metrics["loss"] == pytest.approx(spread.item(), rel=1e-4)
    assert metrics["mean"] == pytest.approx(torch.cat(taught).mean().item(), abs=1e-5)
