"""How a call is split among workers and joined again, without Ray: every worker here is a function."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.cluster.buffers import from_array, to_array
from rlft_fast.cluster.dispatch import DP_COMPUTE_PROTO, register, registered_methods, split_batch, split_rows
from rlft_fast.data import Share, share_prefixes
from rlft_fast.rl import PolicyLoss, loss_scale, loss_weights
from rlft_fast.rollout import Completion, to_samples
from tests.support.batches import make_batch


def work(share: Share) -> dict[str, torch.Tensor]:
    """What a model would give: a function of each token, and one of each sequence."""
    batch = share.batch
    return {"value_T": batch.input_ids_T.float() + batch.position_ids_T / 100, "reward_B": batch.reward_B * 2}


@given(st.integers(1, 17), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 99))
def test_any_batch_on_any_number_of_workers(num_sequences, num_groups, group, seed):
    batch = make_batch(num_sequences, seed)
    split = split_batch(batch, (), 24, num_groups * group, group, trains=False)
    shares = [arguments[0] for arguments in split.arguments]
    assert len(shares) == num_groups * group
    assert len({len(share.offsets) for share in shares}) == 1  # all meet at every micro-batch
    assert sum(share.batch.num_sequences for share in shares[::group]) == num_sequences  # each sequence goes once
    for share in shares:
        micro_batches = share.micro_batches()
        assert sum(micro_batch.num_sequences for micro_batch in micro_batches) == share.batch.num_sequences
        # The cap is on the rows that run: equal prompts run once.
        assert all(len(share_prefixes(micro_batch).token_index_U) <= 24 for micro_batch in micro_batches)
    joined = split.join([work(share) for share in shares])
    whole = work(Share(batch, np.array([0, num_sequences])))
    for name, values in whole.items():
        assert torch.equal(joined[name], values)


def test_the_denominators_are_those_of_the_whole_batch():
    batch, loss = make_batch(7), PolicyLoss(aggregation="sequence-mean")
    split = split_batch(batch, (loss,), 24, 3, 1, trains=True)
    shares = [share for share, given in split.arguments if given is loss]
    weight_T = split.join([{"weight_T": share.batch.loss_weight_T} for share in shares])["weight_T"]
    assert torch.equal(weight_T, loss_weights(batch.loss_mask_T, batch.cu_seqlens, loss.aggregation))
    scale = loss_scale(batch.loss_mask_T, batch.cu_seqlens, loss.aggregation, loss.max_response_tokens)
    assert {share.scale for share in shares} == {scale}


@given(st.integers(1, 9), st.integers(1, 3))
def test_rows_come_back_in_their_order(num_rows, size):
    prompts = [[row] for row in range(num_rows)]
    split = split_rows((prompts, "the same", [[row, row + 100] for row in range(num_rows)]), size)

    def answer(own, shared, seeds):
        assert shared == "the same"
        answers = [
            (i, Completion([prompt[0] + 1], [float(seed)], "stop"))
            for i, (prompt, both) in enumerate(zip(own, seeds, strict=True))
            for seed in both
        ]
        return to_samples(answers)

    samples = split.join([answer(*arguments) for arguments in split.arguments])
    assert samples.row_B.tolist() == [row for row in range(num_rows) for _ in range(2)]
    assert samples.token_ids_T.tolist() == [row + 1 for row in range(num_rows) for _ in range(2)]
    assert samples.logprob_T.tolist() == [seed for row in range(num_rows) for seed in (row, row + 100)]


def test_lists_of_different_numbers_of_rows_are_refused():
    with pytest.raises(ValueError, match=r"lists of \[1, 2\] rows"):
        split_rows(([[1], [2]], [[3]]), 2)


def test_only_registered_methods_are_called():
    class Some:
        @register(DP_COMPUTE_PROTO, engine="actor", trains=True)
        def update(self): ...

        def private(self): ...

    (name,) = found = registered_methods(Some)
    assert name == "update"
    assert (found[name].engine, found[name].trains) == ("actor", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_travel_as_buffers(dtype):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)[:, ::2]
    array, name = to_array(tensor)
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps((array, name), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1  # the elements are beside the pickle
    received = from_array(pickle.loads(sent, buffers=[bytes(buffer) for buffer in buffers]))
    assert received.dtype == dtype
    assert received.shape == tensor.shape
    assert torch.equal(received.float(), tensor.float())
    received[0] = 0  # it is the receiver's own
