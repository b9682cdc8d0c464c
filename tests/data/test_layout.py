"""Layouts in which equal prefixes run once, against the plain batch."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlft_fast.data import Batch, Images, pad_sequences, plan_batch, share_prefixes

PROMPTS = [[1], [1, 2], [1, 2, 3], [4, 4, 4, 4, 4, 4, 4]]  # some begin like others, but are not equal


@st.composite
def batches(draw) -> Batch:
    """Few prompts, many samples; completions of 0 to 6 tokens that often agree, some with tokens of an environment."""
    completion = st.lists(st.sampled_from([3, 4]), max_size=6)
    samples = draw(st.lists(st.tuples(st.sampled_from(PROMPTS), completion, st.integers(0, 3)), max_size=9))
    completions = [tokens for _, tokens, _ in samples]
    masks = [[j >= first for j in range(len(tokens))] for _, tokens, first in samples]
    return Batch.from_samples([p for p, _, _ in samples], completions, completion_masks=masks)


def seen_tokens(batch: Batch, position: int) -> list[int]:
    """Tokens that a position attends to in the plain batch."""
    start = batch.cu_seqlens[batch.cu_seqlens <= position][-1]
    return batch.input_ids_T[start : position + 1].tolist()


@settings(max_examples=100)
@given(batch=batches())
def test_every_active_position_sees_the_same_tokens(batch):
    layout = share_prefixes(batch)
    token_U = batch.input_ids_T[layout.token_index_U]
    key_K = torch.arange(len(token_U)) if layout.key_index_M is None else layout.key_index_M
    seen: dict[int, list[int]] = {}
    for (begin, end), (first, last) in zip(
        pairwise(layout.cu_seqlens_q.tolist()), pairwise(layout.cu_seqlens_k.tolist()), strict=True
    ):
        assert end > begin
        for row in range(begin, end):
            seen[row] = token_U[key_K[first : last - (end - 1 - row)]].tolist()
    for position in batch.active_index_T.tolist():
        row = int(layout.row_T[position])
        assert seen[row] == seen_tokens(batch, position)
        assert batch.position_ids_T[layout.token_index_U[row]] == batch.position_ids_T[position]


def distinct_prefixes(batch: Batch) -> set[tuple[int, ...]]:
    """What a position sees that an active position sees, too, each token with all tokens before it."""
    seen = [seen_tokens(batch, position) for position in batch.active_index_T.tolist()]
    return {tuple(tokens[: i + 1]) for tokens in seen for i in range(len(tokens))}


@settings(max_examples=100)
@given(batch=batches(), seed=st.integers(0, 99))
def test_computed_tokens_are_the_distinct_tokens(batch, seed):
    """With weights of 0, too: tokens without a weight run for later tokens alone."""
    generator = torch.Generator().manual_seed(seed)
    weighted = batch.replace(loss_weight_T=torch.randint(3, (batch.num_tokens,), generator=generator).float())
    for some in (batch, weighted):
        layout = share_prefixes(some)
        assert len(layout.token_index_U) == len(distinct_prefixes(some))
        assert layout.token_index_U.unique().numel() == layout.token_index_U.numel()
        assert (layout.row_T[some.active_index_T] >= 0).all()


def test_a_group_runs_its_prompt_once_and_drops_last_tokens():
    batch = Batch.from_samples([[1, 2, 3]] * 3 + [[7]], [[4, 5], [6], [8, 9, 4], [5, 5]])
    layout = share_prefixes(batch)
    assert batch.input_ids_T[layout.token_index_U].tolist() == [1, 2, 3, 4, 8, 9, 7, 5]
    assert layout.cu_seqlens_q.tolist() == [0, 3, 4, 6, 8]
    assert layout.cu_seqlens_k.tolist() == [0, 3, 7, 12, 14]
    assert layout.key_index_M.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7]
    assert layout.row_T[batch.active_index_T].tolist() == [2, 3, 2, 2, 4, 5, 6, 7]


def test_turns_branches_and_system_messages_run_once():
    """Two prompts behind one system message; an episode of two turns, and a branch that leaves it in the second."""
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 9]]
    completions = [[4, 5, 6, 7], [4, 5, 6, 8, 9, 4], [4, 5]]
    batch = Batch.from_samples(prompts, completions, completion_masks=[[1, 0, 0, 1], [1, 0, 0, 1, 1, 1], [1, 1]])
    layout = share_prefixes(batch)
    assert batch.input_ids_T[layout.token_index_U].tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 9, 4]
    assert layout.cu_seqlens_q.tolist() == [0, 3, 6, 8, 10]
    assert layout.cu_seqlens_k.tolist() == [0, 3, 9, 17, 21]
    assert layout.key_index_M.tolist() == [0, 1, 2, *range(6), *range(8), 0, 1, 8, 9]
    assert layout.row_T[batch.active_index_T].tolist() == [2, 5, 2, 5, 6, 7, 8, 9]


@settings(max_examples=60)
@given(batch=batches())
def test_prefixes_that_all_begin_with_are_planned_once(batch):
    system = [7] * 50
    prompts = [[*system, *seen_tokens(batch, int(end) - 1)] for end in batch.cu_seqlens[1:]]
    longer = Batch.from_samples(prompts, [[5, 6]] * len(prompts))
    max_tokens = 52 + int(batch.lengths.max(initial=1))
    plan, alone = plan_batch(longer, max_tokens), plan_batch(longer, 10_000)
    if batch.num_sequences:
        assert alone.num_micro_batches == 1
    rows = [len(share_prefixes(longer.select(part)).token_index_U) for part in plan.micro_batches(0)]
    assert all(count <= max_tokens for count in rows)
    own = sum(len(prompt) + 1 - 50 for prompt in prompts)
    assert plan.num_micro_batches <= max(1, -(-2 * own // (max_tokens - 50)))


def test_different_prompts_need_no_keys_of_their_own():
    layout = share_prefixes(Batch.from_samples([[1], [2]], [[3, 3], [3]]))
    assert layout.key_index_M is None
    assert torch.equal(layout.cu_seqlens_q, layout.cu_seqlens_k)


def test_images_make_equal_tokens_different_prompts():
    samples = ([[1, 2]] * 2, [[3]] * 2)
    pixels = {"pixels": torch.zeros(1)}
    batch = Batch.from_samples(*samples, images=[Images("a", pixels), Images("b", pixels)])
    assert share_prefixes(batch).key_index_M is None
    assert len(share_prefixes(batch).token_index_U) == 4
    same = Batch.from_samples(*samples, images=[Images("a", pixels), Images("a", {"pixels": torch.zeros(1)})])
    assert len(share_prefixes(same).token_index_U) == 2


@settings(max_examples=100)
@given(batch=batches(), spare=st.integers(0, 30), world_size=st.integers(1, 3))
def test_plan_holds_every_sequence_once_under_the_cap(batch, spare, world_size):
    max_tokens = int(batch.lengths.max(initial=1)) + spare
    plan = plan_batch(batch, max_tokens, world_size)
    assert sorted(plan.indices.tolist()) == list(range(batch.num_sequences))
    for rank in range(world_size):
        for indices in plan.micro_batches(rank):
            assert len(share_prefixes(batch.select(indices)).token_index_U) <= max_tokens


@settings(max_examples=60)
@given(
    batch=batches(),
    spare=st.integers(0, 30),
    world_size=st.integers(1, 3),
    most=st.integers(1, 4),
    padded=st.booleans(),
)
def test_the_tighter_cap_counts(batch, spare, world_size, most, padded):
    """Of tokens and of sequences. Where tokens do not matter, as few micro-batches run as sequences allow."""
    largest = int(batch.lengths.max(initial=1))
    for max_tokens in (largest + spare, 1000):
        plan = plan_batch(batch, max_tokens, world_size, micro_batch_size=most, padded=padded)
        parts = [part for rank in range(world_size) for part in plan.micro_batches(rank)]
        assert sorted(np.concatenate(parts)) == list(range(batch.num_sequences))
        for part in parts:
            assert len(part) <= most
            if len(part):
                shown = batch.select(part)
                rows = len((pad_sequences if padded else share_prefixes)(shown).token_index_U)
                assert rows <= max_tokens
    alone = Batch.from_samples([[i] for i in range(7)], [[9, 9]] * 7)
    assert plan_batch(alone, 1000, micro_batch_size=most).num_micro_batches == -(-7 // most)


@pytest.mark.parametrize("padded", [False, True])
def test_a_unit_of_too_many_sequences_is_refused(padded):
    batch = Batch.from_samples([[1]] * 4, [[2]] * 4).replace(unit_B=torch.tensor([5, 5, 7, 7]))
    assert plan_batch(batch, 100, micro_batch_size=2, padded=padded).num_micro_batches == 2
    with pytest.raises(ValueError, match=r"a unit has 2 sequences that stay together, more than micro_batch_size=1: "):
        plan_batch(batch, 100, micro_batch_size=1, padded=padded)


def num_keys(batch: Batch) -> int:
    return int(share_prefixes(batch).cu_seqlens_k[-1])


# One prompt; many with a long system message in common; and two turns of many episodes.
@pytest.mark.parametrize("kind", ["prompt", "system", "turns"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_short_sequences_behind_a_long_prefix_have_few_keys(kind, world_size):
    """Their rows alone would fit into one micro-batch, whose keys would be as many as those of 64 long sequences."""
    long, count, cap = [*range(1000)], 64, 1200
    prompts = [[*long, *([7, i] if kind == "system" else [])] for i in range(count)]
    answers = [[i % 8, 6, i, 5] if kind == "turns" else [i, 5] for i in range(count)]
    masks = [[1, 0, 1, 1]] * count if kind == "turns" else None
    batch = Batch.from_samples(prompts, answers, completion_masks=masks)
    assert len(share_prefixes(batch).token_index_U) <= cap
    assert num_keys(batch) > 64_000
    plan = plan_batch(batch, cap, world_size)
    parts = [batch.select(part) for rank in range(world_size) for part in plan.micro_batches(rank)]
    assert sum(part.num_sequences for part in parts) == count
    assert max(len(share_prefixes(part).token_index_U) for part in parts) <= cap
    # A prompt that several sequences have is a segment of its own, of at most half of their paths.
    assert max(map(num_keys, parts)) <= 1.5 * 8 * cap
    assert len(parts) <= -(-num_keys(batch) // (8 * cap)) + world_size


def test_a_unit_of_many_keys_stays_whole():
    batch = Batch.from_samples([[*range(1000)]] * 64, [[i, 5] for i in range(64)])
    plan = plan_batch(batch.replace(unit_B=torch.arange(64) % 2), 1200)
    assert [len(part) for part in plan.micro_batches(0)] == [32, 32]


def test_plan_keeps_groups_together():
    lengths = [5, 3, 6, 4]
    prompts = [[i, i, i, i] for i in range(8) for _ in lengths]
    completions = [[10 + length] * length for _ in range(8) for length in lengths]
    batch = Batch.from_samples(prompts, completions)
    order = np.random.default_rng(0).permutation(batch.num_sequences)
    shuffled = batch.select(order)
    rows = 4 + sum(lengths) - len(lengths)
    plan = plan_batch(shuffled, 2 * rows)
    assert plan.num_micro_batches == 4
    assert [len(share_prefixes(shuffled.select(part)).token_index_U) for part in plan.micro_batches(0)] == [
        2 * rows
    ] * 4
    # Shared by many ranks, a group is cut rather than left to one of them; and where groups cannot be dealt out evenly.
    most = max(len(plan_batch(batch, 1000, 16).rank_indices(rank)) for rank in range(16))
    assert most == 2
    three = batch.select(range(12))
    assert [len(plan_batch(three, 1000, 2).rank_indices(rank)) for rank in range(2)] == [6, 6]


def test_plan_names_a_sequence_over_the_cap():
    batch = Batch.from_samples([[1], [1]], [[2], [2] * 9])
    with pytest.raises(ValueError, match="sequence 1 has 10 tokens, more than max_tokens=9"):
        plan_batch(batch, 9)


def test_a_plan_takes_few_bytes_per_token():
    prompts = [[i] * 400 for i in range(250) for _ in range(8)]
    batch = Batch.from_samples(prompts, [[7] * 600] * len(prompts))
    tracemalloc.start()  # NumPy's arrays are in it
    try:
        plan_batch(batch, 10_000, 64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * batch.num_tokens  # two copies of the mask; an index of the active positions alone takes 5


@settings(max_examples=60)
@given(batch=batches())
def test_a_padded_sequence_is_the_sequence(batch):
    layout = pad_sequences(batch)
    rows = batch.input_ids_T[layout.token_index_U].view(-1, layout.padded_length)
    for position in batch.active_index_T.tolist():
        sequence, place = divmod(int(layout.row_T[position]), layout.padded_length)
        assert rows[sequence, : place + 1].tolist() == seen_tokens(batch, position)
    assert len(rows) == len({int(b) for b in torch.searchsorted(batch.cu_seqlens, batch.active_index_T, right=True)})


# Lengths as of real completions: most are short. Ten ranks get few sequences each.
@pytest.mark.parametrize(("world_size", "most_padding"), [(1, 1.15), (4, 1.25), (10, 1.4)])
def test_padded_micro_batches_have_similar_lengths(world_size, most_padding):
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 200).clip(2, 1000).astype(int)
    batch = Batch.from_samples([[1]] * 200, [[2] * int(n) for n in lengths])
    plan = plan_batch(batch, 2000, world_size, padded=True)
    assert sorted(plan.indices.tolist()) == list(range(200))
    rows = np.zeros((world_size, plan.num_micro_batches), int)
    for rank in range(world_size):
        for i, indices in enumerate(plan.micro_batches(rank)):
            rows[rank, i] = len(pad_sequences(batch.select(indices)).token_index_U)
    assert rows.max() <= 2000
    assert rows.max(0).sum() * world_size <= most_padding * lengths.sum()  # ranks wait for each other in each step


def test_padded_units_stay_together_or_are_refused():
    batch = Batch.from_samples([[1]] * 4, [[2] * n for n in (3, 9, 4, 8)])
    batch = batch.replace(unit_B=torch.tensor([5, 5, 7, 7]))
    assert sorted(map(sorted, plan_batch(batch, 18, 2, padded=True).micro_batches(0))) == [[0, 1]]
    with pytest.raises(ValueError, match="unit of sequences 0, 1 takes 2 x 9 tokens when padded, more than max_tokens"):
        plan_batch(batch, 17, padded=True)
