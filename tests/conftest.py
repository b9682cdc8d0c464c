"""Fixtures shared by all tests."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# A busy machine makes single examples slow, which is no failure.
hypothesis.settings.register_profile("rlft_fast", deadline=None)
hypothesis.settings.load_profile("rlft_fast")

# Under nohup a process ignores SIGHUP, and so do the runs that it starts. Tests send them this signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a GPU, Triton kernels run in Triton's interpreter. Triton reads the variable on import, and transformers
# imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The models are so small that handing work to threads costs more than it saves. Child processes inherit the number of
# threads, because equal bits need equal numbers of threads.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_runtest_setup() -> None:
    """Every test draws the same random numbers, whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model by name, see `tests.support.tiny_models.ALL_MODELS`. Treat it as read-only."""
    # Imported here, because tests of the ops need torch alone.
    from tests.support.tiny_models import ALL_MODELS, save_tiny_model

    folder = tmp_path_factory.mktemp("tiny_models")

    def path(name: str) -> Path:
        assert name in ALL_MODELS
        return folder / name if (folder / name).exists() else save_tiny_model(name, folder / name)

    return path


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """FSDP in a single process makes a group of one. The group must not reach the tests of another module."""
    yield
    if torch.distributed.is_initialized():
        from rlft_fast.world.process_group import leave_process_group

        leave_process_group()
