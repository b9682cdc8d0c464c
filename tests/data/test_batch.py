from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.data import Batch, Images, image_table
from rlft_fast.data.batch import new_rows

PER_TOKEN = [
    "old_logprob_T", "ref_logprob_T", "teacher_logprob_T", "rollout_logprob_T", "logprob_T", "entropy_T",
    "value_T", "advantage_T", "return_T", "loss_weight_T",
]  # fmt: skip


def random_batch(lengths: list[int]) -> Batch:
    """Every field filled, each token with numbers of its own."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    loss_mask = torch.rand(total, generator=generator) < 0.6
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    loss_mask[cu_seqlens[1:].long() - 1] = False
    return Batch(
        input_ids_T=torch.randint(1000, (total,), generator=generator),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths, default=0),
        loss_mask_T=loss_mask,
        reward_B=torch.rand(len(lengths), generator=generator),
        group_B=torch.arange(len(lengths)) // 2,
        support_TK=torch.randint(-1, 1000, (total, 3), generator=generator, dtype=torch.int32),
        meta={"step": [1]},
        **image_table(Images(str(i), {"pixel_values": torch.full((2,), float(i))}) for i in range(len(lengths))),
        **{name: torch.rand(total, generator=generator) for name in PER_TOKEN},
    )


def token_rows(batch: Batch, name: str) -> list[list[float]]:
    bounds = batch.cu_seqlens.tolist()
    return [getattr(batch, name)[i:j].tolist() for i, j in pairwise(bounds)]


def test_from_samples_aligns_with_positions():
    batch = Batch.from_samples(
        [[5, 6, 7], [8], [9, 10]],
        [[1, 2], [3, 4, 3], []],
        completion_masks=[[True, True], [True, False, True], []],
        rollout_logprobs=[[-0.5, -1.0], [-2.0, -9.0, -3.0], []],
        rewards=[1, 0.5, 0],
        groups=[0, 1, 1],
        meta={"step": 3},
    )
    assert batch.input_ids_T.tolist() == [5, 6, 7, 1, 2, 8, 3, 4, 3, 9, 10]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 11]
    assert batch.loss_mask_T.tolist() == [False, False, True, True, False, True, False, True, False, False, False]
    assert batch.rollout_logprob_T.tolist() == [0, 0, -0.5, -1.0, 0, -2.0, 0, -3.0, 0, 0, 0]
    assert batch.target_T.tolist() == [-100, -100, 1, 2, -100, 3, -100, 3, -100, -100, -100]
    assert batch.active_index_T.tolist() == [2, 3, 5, 7]
    assert batch.lengths.tolist() == [5, 4, 2]
    assert (batch.num_tokens, batch.num_sequences, batch.max_seqlen) == (11, 3, 5)
    assert batch.reward_B.tolist() == [1, 0.5, 0]
    assert batch.group_B.tolist() == [0, 1, 1]
    assert batch.meta == {"step": 3}


def test_supports_stand_where_tokens_are_predicted():
    """As wide as needed, whatever the width of each; not where the environment has spoken."""
    batch = Batch.from_samples(
        [[5, 6], [7]],
        [[1, 2], [3, 4, 3]],
        completion_masks=[[True, True], [True, False, True]],
        supports=[torch.tensor([[9, 1, -1], [2, -1, -1]]), torch.tensor([[-1, 3, 8, 6, -1], [5] * 5, [3] + [-1] * 4])],
    )
    nothing = [-1] * 4
    assert batch.support_TK.tolist() == [
        nothing, [9, 1, -1, -1], [2, -1, -1, -1], nothing,
        [-1, 3, 8, 6], nothing, [3, -1, -1, -1], nothing,
    ]  # fmt: skip
    empty = Batch.from_samples([[5, 6]], [[]], supports=[torch.zeros(0, 3)])
    assert empty.support_TK.tolist() == [[-1], [-1]]  # one column at least
    with pytest.raises(ValueError, match="token 2 is not among the 3 ids that it was sampled among"):
        Batch.from_samples([[5, 6]], [[1, 2]], supports=[torch.tensor([[9, 1, -1], [1, -1, -1]])])
    with pytest.raises(ValueError, match="tensor for every sample, or None for every sample"):
        Batch.from_samples([[5], [5]], [[1], [1]], supports=[torch.tensor([[1]]), None])
    with pytest.raises(ValueError, match="sample 0 has 2 completion tokens but 1 values"):
        Batch.from_samples([[5, 6]], [[1, 2]], supports=[torch.tensor([[9, 1, -1]])])
    with pytest.raises(ValueError, match=r"support_TK must have shape \(8, K\), got \(8,\)"):
        batch.replace(support_TK=torch.zeros(8, dtype=torch.int32))


def test_asking_at_the_end_is_at_the_last_token_of_each_sequence():
    batch = random_batch([2, 1, 3])
    asking = batch.asking_at_the_end()
    assert asking.active_index_T.tolist() == [1, 3, 7]
    assert [row[:-1] for row in token_rows(asking, "input_ids_T")] == token_rows(batch, "input_ids_T")
    assert asking.images_B == batch.images_B


def test_asking_at_the_end_is_before_padding():
    batch = Batch.from_samples([[9], [5, 9], [9, 9], [9, 5, 9, 9]], [[], [7], [], [9]])
    asking = batch.asking_at_the_end(9)
    assert [row[:-1] for row in token_rows(asking, "input_ids_T")] == [[9], [5, 9, 7], [9], [9, 5]]
    assert asking.active_index_T.tolist() == [0, 4, 6, 9]
    assert Batch.from_samples([], []).asking_at_the_end(9).num_sequences == 0


def test_from_no_samples():
    batch = Batch.from_samples([], [], rollout_logprobs=[], rewards=[], groups=[])
    assert (batch.num_tokens, batch.num_sequences, batch.max_seqlen) == (0, 0, 0)
    assert batch.target_T.shape == batch.active_index_T.shape == (0,)
    assert batch.select([]).cu_seqlens.tolist() == [0]


samples = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=5),
        st.lists(st.tuples(st.integers(0, 99), st.booleans(), st.floats(-20, 0, width=32)), max_size=5),
    ),
    max_size=6,
)


@given(samples)
def test_from_samples_against_loop(data: list):
    batch = Batch.from_samples(
        [prompt for prompt, _ in data],
        [[token for token, _, _ in completion] for _, completion in data],
        completion_masks=[[sampled for _, sampled, _ in completion] for _, completion in data],
        rollout_logprobs=[[logprob for _, _, logprob in completion] for _, completion in data],
    )
    for b, (prompt, completion) in enumerate(data):
        start = int(batch.cu_seqlens[b])
        active = [t - start for t in batch.active_index_T.tolist() if start <= t < batch.cu_seqlens[b + 1]]
        assert active == [len(prompt) - 1 + k for k, (_, sampled, _) in enumerate(completion) if sampled]
        for t in active:
            token, _, logprob = completion[t + 1 - len(prompt)]
            assert batch.target_T[start + t] == token
            assert batch.rollout_logprob_T[start + t] == logprob
    assert batch.rollout_logprob_T[~batch.loss_mask_T].count_nonzero() == 0


@given(st.lists(st.integers(1, 9), max_size=8), st.data())
def test_select_takes_sequences_in_order(lengths: list[int], data: st.DataObject):
    batch = random_batch(lengths)
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1))) if lengths else []
    selected = batch.select(indices)
    for name in ["input_ids_T", "position_ids_T", "loss_mask_T", "support_TK", *PER_TOKEN]:
        rows = token_rows(batch, name)
        assert token_rows(selected, name) == [rows[i] for i in indices]
    assert selected.max_seqlen == max((lengths[i] for i in indices), default=0)
    assert selected.reward_B.tolist() == [batch.reward_B[i].item() for i in indices]
    assert selected.group_B.tolist() == [i // 2 for i in indices]
    assert [int(own.inputs["pixel_values"][0]) for own in selected.images_B] == indices


@given(st.permutations(range(7)))
def test_select_is_undone_by_the_inverse(order: list[int]):
    batch = random_batch([3, 1, 4, 1, 5, 9, 2])
    restored = batch.select(order).select(torch.tensor(order).argsort())
    for name in ["input_ids_T", "position_ids_T", "cu_seqlens", "loss_mask_T", "support_TK", "reward_B", *PER_TOKEN]:
        assert torch.equal(getattr(restored, name), getattr(batch, name))


def test_absent_fields_stay_absent():
    batch = Batch.from_samples([[1, 2]], [[3]])
    for other in (batch.select([0]), batch.to("cpu"), batch.replace(max_seqlen=8)):
        assert other.value_T is None
        assert other.reward_B is None
        assert other.images_B == [None]


def test_meta_is_never_shared():
    given_meta = {"step": [1]}
    batch = random_batch([2, 3]).replace(meta=given_meta)
    others = [batch.select([0]), batch.replace(max_seqlen=9), batch.to("cpu")]
    given_meta["step"].append(2)
    batch.meta["step"].append(3)
    assert [other.meta for other in others] == [{"step": [1]}] * 3
    assert batch.meta == {"step": [1, 3]}


def test_to_moves_every_tensor_and_a_device_batch_refuses_to_wait():
    moved = random_batch([2, 3]).to("meta")
    assert moved.target_T.device.type == moved.value_T.device.type == moved.cu_seqlens.device.type == "meta"
    assert moved.images[1].inputs["pixel_values"].device.type == "meta"
    for wait in (lambda: moved.lengths, lambda: moved.active_index_T, lambda: moved.select([0])):
        with pytest.raises(ValueError, match=r"before to\(device\)"):
            wait()


@pytest.mark.gpu
def test_to_cuda_returns_the_same_numbers():
    batch = random_batch([2, 3])
    moved = batch.to("cuda")
    assert torch.equal(moved.target_T.cpu(), batch.target_T)
    assert torch.equal(moved.to("cpu").value_T, batch.value_T)


def test_frozen():
    with pytest.raises(AttributeError):
        random_batch([2]).max_seqlen = 3


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"value_T": torch.zeros(5, dtype=torch.float64)}, TypeError, r"value_T must be a tensor of torch.float32"),
        ({"input_ids_T": torch.zeros(5, dtype=torch.int32)}, TypeError, r"input_ids_T .* torch.int64, got torch.int32"),
        ({"reward_B": [1.0, 2.0]}, TypeError, r"reward_B .* got list"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, TypeError, r"cu_seqlens .* torch.int32"),
        ({"value_T": torch.zeros(4)}, ValueError, r"value_T must have shape \(5,\), got \(4,\)"),
        ({"reward_B": torch.zeros(2, 1)}, ValueError, r"reward_B must have shape \(2,\), got \(2, 1\)"),
        ({"value_T": torch.zeros(5, device="meta")}, ValueError, r"value_T is on meta"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"no sequences has cu_seqlens \[0\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)}, ValueError, r"number of tokens \(5\)"),
        ({"cu_seqlens": torch.tensor([1, 2, 5], dtype=torch.int32)}, ValueError, r"must rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 5, 5], dtype=torch.int32)}, ValueError, r"without an empty sequence"),
        ({"max_seqlen": 2}, ValueError, r"longest sequence has 3 tokens"),
        ({"loss_mask_T": torch.arange(5) == 1}, ValueError, r"last position"),
        ({"loss_mask_T": torch.arange(5) == 4}, ValueError, r"last position"),
        ({"image_B": torch.tensor([0, 2])}, ValueError, r"image_B has numbers outside \[-1, 2\)"),
    ],
)
def test_refuses_bad_fields(fields: dict, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        random_batch([2, 3]).replace(**fields)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"completions": [[1]]}, "got 2 prompts but 1"),
        ({"rollout_logprobs": [[-1.0], [-1.0, -2.0]]}, "sample 1 has 1 completion tokens but 2"),
        ({"completion_masks": [[], [True]]}, "sample 0 has 1 completion tokens but 0"),
        ({"rewards": [1.0]}, r"reward_B must have shape \(2,\)"),
    ],
)
def test_from_samples_refuses_unequal_lists(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        Batch.from_samples(**{"prompts": [[1], [2]], "completions": [[3], [4]], **arguments})


@pytest.mark.parametrize("arguments", [{"prompts": [[1.5], [2]]}, {"completions": [[3], ["4"]]}, {"groups": [0, 1.5]}])
def test_from_samples_cuts_no_fraction_off(arguments: dict):
    with pytest.raises(TypeError, match="must be integers"):
        Batch.from_samples(**{"prompts": [[1], [2]], "completions": [[3], [4]], **arguments})


@pytest.mark.parametrize("index", [-1, 2])
def test_select_refuses_indices_outside(index: int):
    with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
        random_batch([2, 3]).select([index])


@pytest.mark.parametrize("mask", [[True, False], torch.tensor([True, False]), np.array([1.0, 0.0])])
def test_select_refuses_masks_and_floats(mask: object):
    with pytest.raises(TypeError, match="must be integers"):
        random_batch([2, 3]).select(mask)


def test_select_takes_any_kind_of_integers():
    batch = random_batch([2, 3, 4])
    reversed_view = np.arange(3, dtype=np.int32)[::-1]
    for indices in (range(2, -1, -1), reversed_view, torch.tensor([2, 1, 0])):
        assert batch.select(indices).lengths.tolist() == [4, 3, 2]


# As many bytes as NumPy asks huge pages for, one byte fewer, none, and rows of several numbers.
@pytest.mark.parametrize(("num_rows", "dtype", "shape"), [
    (1 << 22, torch.bool, ()), ((1 << 22) - 1, torch.bool, ()), (0, torch.float64, ()), (300_001, torch.int32, (5,)),
])  # fmt: skip
def test_memory_for_columns(num_rows, dtype, shape):
    rows = new_rows(num_rows, dtype, *shape)
    assert (rows.shape, rows.dtype, rows.data_ptr() % 64) == ((num_rows, *shape), dtype, 0)
    assert rows.fill_(1).sum() == rows.numel()
