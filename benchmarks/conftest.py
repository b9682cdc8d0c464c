import pytest
import torch

from benchmarks.support.harness import NUM_THREADS


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(NUM_THREADS)
