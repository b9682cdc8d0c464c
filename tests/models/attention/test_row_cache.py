"""The cache in place against transformers' own, and the models that take it."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    DynamicCache,
    MambaConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from rlft_fast.models.attention.row_cache import RowCache, takes_row_cache

WINDOW = 5
CONFIG = Qwen2Config(  # the first layer sees everything, the second a window
    num_hidden_layers=2, hidden_size=8, intermediate_size=8, vocab_size=8, num_attention_heads=2,
    num_key_value_heads=1, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1,
)  # fmt: skip


# New tokens of each pass: a prompt below, at, and above the window, and more tokens than the buffers have at first.
@pytest.mark.parametrize("passes", [[1] * 9, [3] + [1] * 6, [5] + [1] * 6, [11] + [1] * 140])
def test_keys_and_masks_are_those_of_transformers(passes):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    rows, seen = 3, 0
    ours, theirs = RowCache(model, most_rows=6, most_tokens=sum(passes)), DynamicCache(config=CONFIG)
    torch.manual_seed(0)
    for number, new in enumerate(passes):
        for layer in range(2):
            sizes = [cache.get_mask_sizes(new, layer) for cache in (ours, theirs)]
            assert sizes[0] == sizes[1]
            states = torch.randn(rows, 2, new, 4), torch.randn(rows, 2, new, 6)
            pairs = zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True)
            assert all(torch.equal(actual, expected) for actual, expected in pairs)
        seen += new
        assert ours.get_seq_length() == theirs.get_seq_length() == seen
        if number == 3:  # row 1 branches, row 0 leaves, and row 2 takes its place
            ours.copy_rows(torch.tensor([2, 1]), torch.tensor([0, 2]), most_rows=3)
            theirs.batch_select_indices(torch.tensor([2, 1, 1]))
        if number == 5:
            rows = 2
            ours.copy_rows(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), most_rows=2)
            theirs.batch_select_indices(torch.tensor([0, 1]))


@pytest.mark.parametrize("passes", [[3, 1, 1], [5, 7, 1], [11, 70, 1]])
def test_a_row_begins_another_cache(passes):
    """With other padding, behind rows that are copied, and also with what has left a window."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    torch.manual_seed(0)
    first = RowCache(model, most_rows=4, most_tokens=sum(passes), keeps_all=True)
    states = [[(torch.randn(2, 1, new, 4), torch.randn(2, 1, new, 6)) for _ in range(2)] for new in passes]
    for own in states:
        for layer in range(2):
            first.update(*own[layer], layer)
    first.copy_rows(torch.tensor([1]), torch.tensor([3]), most_rows=4)
    length = sum(passes) - 2  # the first two are padding
    rows = [first.row(3, 2), None]
    second = RowCache(model, most_rows=2, most_tokens=length + 2, keeps_all=True)
    second.begin(rows, [1, length], length)  # of the first row the last token is left out
    assert second.get_seq_length() == length
    assert second.row(1, 0)[0][0].abs().max() == 0
    for layer in range(2):
        for i in range(2):
            expected = torch.cat([own[layer][i][1] for own in states], 1)[:, 2:]
            assert torch.equal(rows[0][layer][i], expected)
            assert torch.equal(second.row(0, 1)[layer][i], expected[:, :-1])
        window = length if layer == 0 else min(length, WINDOW - 1)  # with the token to come it is full
        assert second.get_mask_sizes(1, layer) == (window + 1, length - window)


_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 8, "pad_token_id": 0}


# A recurrent state, layers of linear attention, and inputs for generation that the model prepares itself.
@pytest.mark.parametrize(
    "config",
    [MambaConfig(**_SIZES), Qwen3NextConfig(**_SIZES), CTRLConfig(vocab_size=8, n_embd=8, dff=8, n_layer=1, n_head=2)],
    ids=lambda x: x.model_type,
)
def test_models_with_more_than_keys_and_values_do_not_take_it(config):
    with torch.device("meta"):
        assert not takes_row_cache(AutoModelForCausalLM.from_config(config))


def test_encoders_do_not_take_it():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    assert not takes_row_cache(model)
