import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlft_fast.trainer.prompts import encode_rows


@pytest.fixture
def tokenizer():
    """It knows the letters of the digits, and has no token for another letter."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={x: int(x) for x in "0123456789"}, merges=[]))
    )


def test_rows_keep_their_order_and_their_texts(tokenizer):
    """Thousands of rows ask for no text, one, or two at once."""

    def asks(*texts):
        found = yield [*texts]
        return found

    def waits_for_nothing():
        return []
        yield

    def rows():
        for i in range(5000):
            yield [asks(f"{i}"), asks(f"{i}", f"{i + 1}"), asks(), waits_for_nothing()][i % 4]

    def ids(number):
        return [int(digit) for digit in str(number)]

    found = [*encode_rows(tokenizer, rows())]
    assert found == [[[ids(i)], [ids(i), ids(i + 1)], [], []][i % 4] for i in range(5000)]


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
