"""Fixtures shared by all tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Without a GPU, Triton kernels run in Triton's interpreter. This is read on import, and transformers imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The models are so small that handing work to threads costs more than it saves. Processes that tests start inherit it:
# the same bits need the same number of threads.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model by name, see `tests.support.tiny_models.ALL_MODELS`. Treat it as read-only."""
    # Imported here, so that the ops' tests need no more than the ops: torch.
    from tests.support.tiny_models import ALL_MODELS, save_tiny_model

    folder = tmp_path_factory.mktemp("tiny_models")

    def path(name: str) -> Path:
        assert name in ALL_MODELS
        return folder / name if (folder / name).exists() else save_tiny_model(name, folder / name)

    return path


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """FSDP in a single process makes a group of one, which must not reach the tests of another module."""
    yield
    if torch.distributed.is_initialized():
        from rlft_fast.world.collectives import leave_process_group

        leave_process_group()
