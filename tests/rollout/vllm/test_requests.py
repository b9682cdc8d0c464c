"""What vLLM would sample otherwise than asked is refused before it is asked, or asked for in another way."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rlft_fast.config import VLLMConfig
from rlft_fast.rollout import SampledModel, SamplingParams
from rlft_fast.rollout.vllm import model_fingerprint
from rlft_fast.rollout.vllm.adapter import place_for
from rlft_fast.rollout.vllm.requests import device_options, request_fields
from tests.support.runs.vllm_rollouts import HEADS, needs_vllm
from tests.support.tiny_models import save_tiny_model

MODEL = SampledModel(path="folder", dtype=torch.float32, device=torch.device("cpu"), vocab_size=256, eos_token_ids=(7,))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_vllm_takes_a_temperature(temperature):
    assert request_fields(SamplingParams(temperature=temperature), MODEL, [], [])["temperature"] == temperature


def test_a_temperature_that_vllm_would_raise_is_refused():
    with pytest.raises(ValueError, match=r"temperature is 0\.009, but vLLM would sample at 0\.01"):
        request_fields(SamplingParams(temperature=0.009), MODEL, [], [])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory with a path")
def test_adapters_go_where_they_fit(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free
    assert place_for(free // 2) is None
    assert place_for(free // 4) == shared


@needs_vllm
def test_a_folder_with_files_of_mistrals_own_format(tmp_path):
    """vLLM would read another configuration, tokenizer and weights than transformers."""
    from vllm import EngineArgs

    folder = save_tiny_model("mistral", tmp_path / "model", **HEADS)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    own = {"dim": 64, "n_layers": 3, "head_dim": 32, "hidden_dim": 48, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 259}
    (folder / "params.json").write_text(json.dumps(own | {"norm_eps": 1e-5}))
    assert EngineArgs(model=str(folder)).create_model_config().hf_config.model_type == "transformer"
    read = EngineArgs(model=str(folder), **device_options(VLLMConfig(), on_cpu=True)).create_model_config()
    assert model_fingerprint(read.hf_config) == model_fingerprint(AutoConfig.from_pretrained(folder))
    assert read.tokenizer_mode == "hf"
