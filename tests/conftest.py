"""Fixtures shared by all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import MODELS, save_tiny_model

torch.set_num_threads(1)  # the models are so small that handing work to threads costs more than it saves


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model by name, see `tests.tiny_models.MODELS`. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("tiny_models")

    def path(name: str) -> Path:
        assert name in MODELS
        return folder / name if (folder / name).exists() else save_tiny_model(name, folder / name)

    return path
