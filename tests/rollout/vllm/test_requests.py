"""What vLLM would sample otherwise than asked is refused before it is asked."""

import pytest
import torch

from rlft_fast.rollout import SampledModel, SamplingParams
from rlft_fast.rollout.vllm.requests import request_fields

MODEL = SampledModel(path="folder", dtype=torch.float32, device=torch.device("cpu"), vocab_size=256, eos_token_ids=(7,))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_vllm_takes_a_temperature(temperature):
    assert request_fields(SamplingParams(temperature=temperature), MODEL, [], [])["temperature"] == temperature


def test_a_temperature_that_vllm_would_raise_is_refused():
    with pytest.raises(ValueError, match=r"temperature is 0\.009, but vLLM would sample at 0\.01"):
        request_fields(SamplingParams(temperature=0.009), MODEL, [], [])
