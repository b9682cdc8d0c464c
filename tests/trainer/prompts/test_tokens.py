import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlft_fast.trainer.prompts import encode_rows, joined


@pytest.fixture
def tokenizer():
    """It knows the letters of the digits, and has no token for another letter."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={x: int(x) for x in "0123456789"}, merges=[]))
    )


def test_rows_keep_their_order_and_their_texts(tokenizer):
    """Thousands of rows ask for no text, one, two at once, one after another, or both of a pair."""

    def asks(*texts):
        found = yield [*texts]
        return found

    def asks_again(text):
        (first,) = yield [text]
        (second,) = yield [f"{len(first)}"]
        return [first, second]

    def waits_for_nothing():
        return []
        yield

    def rows():
        for i in range(5000):
            yield [asks(f"{i}"), asks(f"{i}", f"{i + 1}"), asks_again(f"{i}"), waits_for_nothing(),
                   joined([asks(f"{i}"), asks_again(f"{2 * i}")])][i % 5]  # fmt: skip

    def ids(number):
        return [int(digit) for digit in str(number)]

    for i, found in enumerate(encode_rows(tokenizer, rows())):
        digits = [len(str(i))], [len(str(2 * i))]
        assert found == [[ids(i)], [ids(i), ids(i + 1)], [ids(i), digits[0]], [],
                         [[ids(i)], [ids(2 * i), digits[1]]]][i % 5]  # fmt: skip
    assert i == 4999


def test_a_row_alone_sees_that_its_text_cannot_be_tokenized(tokenizer):
    def row(text):
        try:
            (ids,) = yield [text]
        except TypeError:
            return "refused"
        return ids

    halves = {1000: "\ud83d", 3000: "\ud83d"}  # no text: half of a character
    found = [*encode_rows(tokenizer, (row(halves.get(i, "7")) for i in range(4000)))]
    assert [i for i, x in enumerate(found) if x == "refused"] == [*halves]
    assert [x for i, x in enumerate(found) if i not in halves] == [[7]] * 3998


def test_an_error_of_a_row_ends_the_reading(tokenizer):
    def row(i):
        yield ["1"]
        if i == 2500:
            raise ValueError("row 2500")
        return i

    found = []
    with pytest.raises(ValueError, match="row 2500"):
        found += encode_rows(tokenizer, map(row, range(5000)))
