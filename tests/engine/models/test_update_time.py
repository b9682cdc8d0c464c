"""An update of padded models against transformers' own padded step, with less small models than those of the page."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from rlft_fast.models import PolicyModel
from tests.engine.models.update_time import EQUAL, MIXED, share_of_time

VOCAB_SIZE = 8192


def bloom() -> PreTrainedModel:
    """Masks of its own."""
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=256, n_layer=4, n_head=4, pad_token_id=0))


def lfm2() -> PreTrainedModel:
    """Convolutions."""
    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2, pad_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("build", [bloom, lfm2])
def test_padded_models_are_no_slower_than_transformers(build):
    """Measured: 0.3 with mixed lengths, and 1.0 with equal ones."""
    torch.manual_seed(0)
    policy = PolicyModel(build().eval())
    assert policy.padded_because
    assert share_of_time(policy, MIXED, VOCAB_SIZE) <= 0.7
    assert share_of_time(policy, EQUAL, VOCAB_SIZE) <= 1.3
