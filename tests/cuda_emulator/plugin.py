"""A pytest plugin (`-p tests.cuda_emulator.plugin`): CPU tensors are computed by the CUDA kernels, in the emulator."""

import os

import pytest
import torch

from rlft_fast.ops import tiled_logprob, tiled_loss, tiles

# In the place of csrc/cpu, for every operator that both have; torch warns of that once.
torch.ops.load_library(os.environ["RLFT_EMULATED_KERNELS"])

# What a GPU does where a CPU has an algorithm or tiles of its own.
tiled_loss._ThreadTiles = tiled_loss._LargeGemms
tiles.TILE_COLUMNS = tiled_logprob.TILE_COLUMNS = tiles._GPU_COLUMN_MULTIPLE

# Tests of what CPUs promise and GPUs do not.
ON_A_CPU_ONLY = {
    "test_bad_input_is_named": "a GPU is not waited for to look at the values of tensors",
    "test_segment_sum_is_as_exact_as_its_output": "threads add in float32: kernels.py has the bound",
    "test_powers_may_leave_the_range_of_float32": "threads add in float32, as torch's do",
    "test_more_elements_than_an_int32_counts": "takes minutes",
    "memory": "weighs the CPU's algorithms",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = [item for item in items if any(name in item.name for name in ON_A_CPU_ONLY)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
