"""An engine whose ranks get their shares of a planned batch does what it does with the whole batch, bit for bit."""

import pytest
import torch

from rlft_fast.data import Batch, Share, cut_shares, join_outputs, plan_batch
from rlft_fast.engine import weighted
from tests.engine.reference import make_engine, policy_loss, random_batch, weights
from tests.support.machine.distributed import run_distributed

MAX_TOKENS = 40  # three micro-batches of one rank, two of each of two


def own_share(batch: Batch, scale: float, engine) -> tuple[Share, list[Share]]:
    size = engine.config.sequence_parallel
    shares = [*cut_shares(batch, plan_batch(batch, MAX_TOKENS, engine.world.size // size), scale)]
    return shares[engine.world.rank // size], shares


def check_shares(rank: int, path, options) -> None:
    batch, loss = random_batch(9), policy_loss()
    whole, shared = (make_engine(path, max_tokens=MAX_TOKENS, **options) for _ in range(2))
    for _ in range(2):
        share, shares = own_share(*weighted(batch, loss), shared)
        kept: dict = {}
        expected: dict = {}
        assert shared.train_step(share, loss, outputs=kept) == whole.train_step(batch, loss, outputs=expected)
        inferred, of_all = shared.infer(share, ("logprob",))["logprob"], whole.infer(batch, ("logprob",))["logprob"]
        plan = plan_batch(batch, MAX_TOKENS, len(shares))
        places = batch.token_index(plan.rank_indices(shares.index(share)))
        assert torch.equal(inferred, of_all[places])
        assert torch.equal(kept["entropy"], expected["entropy"][places])
    for (name, x), y in zip(weights(whole).items(), weights(shared).values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.dist
@pytest.mark.parametrize("options", [{}, {"config": {"sequence_parallel": 2}}], ids=["data", "sequence"])
@pytest.mark.thin(2)
def test_shares_are_the_whole(tiny_model, options):
    run_distributed(check_shares, 2, tiny_model("llama"), options)


def test_one_rank(tiny_model):
    check_shares(0, tiny_model("llama"), {})


def test_a_share_without_denominators_is_refused(tiny_model):
    engine = make_engine(tiny_model("llama"), max_tokens=24)
    (share,) = cut_shares(random_batch(3), plan_batch(random_batch(3), 24))
    with pytest.raises(ValueError, match="loss_weight_T of the whole batch"):
        engine.train_step(share, policy_loss())


def test_outputs_are_joined_by_token_and_by_sequence():
    batch = random_batch(9)
    batch = batch.replace(reward_B=torch.rand(batch.num_sequences))
    plan = plan_batch(batch, 24, 3)
    shares = [*cut_shares(batch, plan)]
    assert torch.equal(join_outputs([s.batch.input_ids_T for s in shares], batch, plan), batch.input_ids_T)
    assert torch.equal(join_outputs([s.batch.reward_B for s in shares], batch, plan), batch.reward_B)
