from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.rl import Aggregation, loss_scale, loss_weights, response_lengths

# Two response tokens, none, one: sequence-mean must leave the middle sequence out of its count.
MASK = torch.tensor([True, True, False, False, False, True, False])
CU_SEQLENS = torch.tensor([0, 3, 5, 7], dtype=torch.int32)


def batch_masks() -> st.SearchStrategy[list[list[bool]]]:
    return st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=6)


def pack(masks: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0, *map(len, masks)]).cumsum(0).int()
    return torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool), lengths


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 3, 1 / 3, 0, 0, 0, 1 / 3, 0]),
        ("sequence-mean", [1 / 4, 1 / 4, 0, 0, 0, 1 / 2, 0]),
        ("sequence-mean-token-sum", [1 / 2, 1 / 2, 0, 0, 0, 1 / 2, 0]),
        ("constant", [1 / 20, 1 / 20, 0, 0, 0, 1 / 20, 0]),
        ("token-sum", [1, 1, 0, 0, 0, 1, 0]),
    ],
)
def test_weights_by_hand(mode, expected):
    weight_T = loss_weights(MASK, CU_SEQLENS, mode)
    assert weight_T.dtype == torch.float32
    assert weight_T.sum() == 1.0
    torch.testing.assert_close(weight_T * loss_scale(MASK, CU_SEQLENS, mode, 10), torch.tensor(expected).float())


@given(masks=batch_masks())
def test_weights_match_loops(masks):
    mask_T, cu_seqlens = pack(masks)
    num_tokens = sum(map(sum, masks))
    num_sequences = sum(any(mask) for mask in masks)
    token_mean = [flag / num_tokens if flag else 0.0 for mask in masks for flag in mask]
    sequence_mean = [1 / (sum(mask) * num_sequences) if flag else 0.0 for mask in masks for flag in mask]
    for mode, expected in [("token-mean", token_mean), ("sequence-mean", sequence_mean)]:
        weight_T = loss_weights(mask_T, cu_seqlens, mode)
        torch.testing.assert_close(weight_T, torch.tensor(expected))
        torch.testing.assert_close(weight_T.sum(), torch.tensor(1.0 if num_tokens else 0.0))


@pytest.mark.parametrize("mode", get_args(Aggregation))
# Nothing to learn from: every token masked, and a batch without any token.
@pytest.mark.parametrize("lengths", [[0, 3, 5], [0]])
def test_all_masked_batch_has_zero_weights(mode, lengths):
    weight_T = loss_weights(torch.zeros(lengths[-1], dtype=torch.bool), torch.tensor(lengths, dtype=torch.int32), mode)
    assert torch.equal(weight_T, torch.zeros(lengths[-1]))
    assert loss_scale(weight_T.bool(), torch.tensor(lengths, dtype=torch.int32), mode, 10) in (0.0, 1.0)


def test_response_lengths():
    assert response_lengths(MASK, CU_SEQLENS).tolist() == [2, 0, 1]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'batch-mean', expected one of token-mean, sequence-mean"):
        loss_weights(MASK, CU_SEQLENS, "batch-mean")
    with pytest.raises(ValueError, match="'constant' divides by max_response_tokens, which is None"):
        loss_scale(MASK, CU_SEQLENS, "constant", None)
    with pytest.raises(TypeError, match=r"loss_mask_T has dtype torch\.float32"):
        loss_weights(MASK.float(), CU_SEQLENS, "token-mean")
