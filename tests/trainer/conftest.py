"""Fixtures of the trainer's tests."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A model of another architecture and size, with the policy's tokens, whose distributions are far from flat."""
    folder = save_tiny_model("qwen2", tmp_path_factory.mktemp("teacher"), num_hidden_layers=1)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain.get_output_embeddings().weight.mul_(4)
    plain.save_pretrained(folder)
    return folder
