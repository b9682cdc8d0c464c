"""Rows of the decoding loop: where they are, and what they continue."""

from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.rollout.decoding import place


@given(st.data())
def test_rows_continue_their_parents(data):
    """Of random branches and ends, pass by pass: a row has the tokens that its completions have in common."""
    running = {number: number // 4 for number in range(12)}  # three prompts of four completions
    texts = {number: (row,) for number, row in running.items()}
    held = [(row,) for row in range(3)]
    while running:
        left = data.draw(st.lists(st.sampled_from([*running]), max_size=len(running), unique=True).map(sorted))
        pairs = [(running[number], data.draw(st.integers(0, 2))) for number in left]
        placed = place(pairs)
        assert not {*placed.sources} & {*placed.targets}
        assert len(placed.sources) <= len(placed.parents)
        copied = dict(zip(placed.targets, placed.sources, strict=True))
        for row, parent in enumerate(placed.parents):
            assert held[copied.get(row, row)] == held[parent]
        held = [(*held[row], token) for row, token in zip(placed.parents, placed.tokens, strict=True)]
        running = dict(zip(left, placed.rows, strict=True))
        texts = {number: (*texts[number], token) for number, (_, token) in zip(left, pairs, strict=True)}
        assert len({*held}) == len(held) == len({*texts.values()})
        assert all(held[row] == texts[number] for number, row in running.items())
        if len(texts) and len(next(iter(texts.values()))) > 6:
            break


def test_few_rows_move():
    """Row 0 ends, and the last row takes its place; row 1 branches, and its first branch stays."""
    placed = place([(1, 7), (1, 8), (1, 7), (2, 9), (3, 5)])
    assert placed.rows == [1, 0, 1, 2, 3]
    assert (placed.parents, placed.tokens) == ([1, 1, 2, 3], [8, 7, 9, 5])
    assert (placed.sources, placed.targets) == ([1], [0])
    assert place([(0, 1), (3, 2)])._asdict() == {
        "rows": [0, 1], "parents": [0, 3], "tokens": [1, 2], "sources": [3], "targets": [1],
    }  # fmt: skip
