"""The number of threads that compute."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Kernels share their work among ``count`` threads inside the block; outside, tests run on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
