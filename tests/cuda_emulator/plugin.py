"""A pytest plugin (`-p tests.cuda_emulator.plugin`): tests that need a GPU get the emulated one."""

from collections.abc import Generator

import pytest

from benchmarks.support import fake_gpu

fake_gpu.install()  # before the tests' modules look for a GPU
fake_gpu.interpret_triton()

NOT_EMULATED = {
    "memory": "there is no device memory to weigh",
    "cuda_graph": "there are no CUDA graphs",
    "opcheck": "wrapped tensors cannot be traced",
    "compile": "wrapped tensors cannot be traced",
    "test_tiny_steps_add_up_in_the_master": "Module.to cannot replace what a wrapped tensor holds",
    "test_agrees_with_torch": "load_state_dict cannot replace what a wrapped tensor holds",
    "test_continues_bit_for_bit": "torch.load cannot make wrapped tensors",
    "test_loads_what_torch_saved": "torch.load cannot make wrapped tensors",
    "more_elements_than_an_int32": "takes minutes",
    "50257": "takes minutes",
    "151936": "takes minutes",
    "same_bits_every_run": "takes minutes",
}
# Triton's interpreter is slow, and test_numbers.py already runs it with float32 on the CPU.
NOT_INTERPRETED = {"5003", "dtype0", "None-dtype1"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with fake_gpu.CudaDevice():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = [item for item in items if _is_left_out(item.name)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


def _is_left_out(test: str) -> bool:
    names = NOT_EMULATED.keys() | (NOT_INTERPRETED if "triton" in test else set())
    return any(name in test for name in names)
