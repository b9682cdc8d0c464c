"""How results of workers become one, without Ray: every worker here is a function."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlft_fast.cluster import DP_COMPUTE_PROTO, register
from rlft_fast.cluster.dispatch import bind, split_batch, split_rows
from tests.support.batches import make_batch


class Pair(NamedTuple):
    texts: list[str]
    numbers: torch.Tensor


@dataclass
class Both:
    pair: Pair
    table: np.ndarray


def answer(rows: list[int]) -> Any:
    """Columns of every kind, in every container."""
    numbers = torch.tensor(rows, dtype=torch.int64) * 10
    return {"both": Both(Pair([f"row {row}" for row in rows], numbers), np.array(rows)[:, None] + [0, 1]), "none": None}


@pytest.mark.parametrize("size", [1, 2, 3, 7])  # more workers than rows, too
def test_columns_of_rows_come_back_in_their_order(size):
    rows = [4, 0, 3, 1, 2]
    split = split_rows((rows,), size)
    found, expected = split.join([answer(*own) for own in split.arguments]), answer(rows)
    assert found["both"].pair.texts == expected["both"].pair.texts
    assert torch.equal(found["both"].pair.numbers, expected["both"].pair.numbers)
    assert np.array_equal(found["both"].table, expected["both"].table)
    assert found["none"] is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([[1, 2], [3, 4]], r"the result has 2 entries, expected .* for each of the 1 rows"),
        ([{"score": 1.0}, {"score": 2.0}], r"the result\['score'\] is of type float, expected a list"),
        ([{"a": [1, 2]}, {"b": [3]}], r"the result has the keys \['a'\] and \['b'\]"),
        ([[1, 2], np.array([3])], "the result is of the types list, ndarray"),
        ([torch.zeros(2, 3), torch.zeros(1, 4)], "the result has entries of several shapes or dtypes"),
    ],
)
def test_what_cannot_be_joined_is_named(results, message):
    with pytest.raises(ValueError, match=message):
        split_rows(([1, 2, 3],), 2).join(results)


def test_columns_of_a_batch_come_back_in_its_order():
    batch = make_batch(9)
    split = split_batch(batch, (), 24, 3, 1, trains=False)
    parts = [own[0].batch for own in split.arguments]

    def work(part):
        return ({"loss": 0.5}, Pair([str(x) for x in part.reward_B.tolist()], part.input_ids_T))

    metrics, pair = split.join([work(part) for part in parts])
    assert metrics == {"loss": 0.5}
    assert pair.texts == work(batch)[1].texts
    assert torch.equal(pair.numbers, batch.input_ids_T)
    with pytest.raises(ValueError, match=r"the result\['x'\] has .* entries by worker, expected one for each token"):
        split.join([{"x": part.input_ids_T[1:]} for part in parts])
    with pytest.raises(ValueError, match="the result is a Batch"):
        split.join(parts)


def test_arguments_are_those_of_the_method():
    class Some:
        @register(DP_COMPUTE_PROTO)
        def act(self, share, loss, scale=1.0, *, engine): ...

    call = bind(Some, "act", (1,), {"engine": "actor", "loss": 2})
    assert call == ((1, 2), {"engine": "actor"})
    assert call.with_values([3, 4, "critic"]) == ((3, 4), {"engine": "critic"})
    with pytest.raises(TypeError, match=r"Some\.act: missing a required argument: 'loss'"):
        bind(Some, "act", (1,), {"engine": "actor"})
    with pytest.raises(TypeError, match=r"Some\.act: got an unexpected keyword argument 'los'"):
        bind(Some, "act", (1, 2), {"engine": "actor", "los": 3})
