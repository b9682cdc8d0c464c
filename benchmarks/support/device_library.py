"""Compiles what lets a torch without CUDA hold tensors of a GPU, see `benchmarks.support.fake_gpu`."""

import subprocess
from pathlib import Path

import torch

_SOURCE = Path(__file__).parents[2] / "tests/cuda_emulator/device.cpp"


def device_library(folder: Path) -> Path:
    """The library without kernels, for RLFT_EMULATED_KERNELS; it is compiled unless the folder has it. Takes g++."""
    library, torch_folder = folder / f"device-{torch.__version__}.so", Path(torch.__file__).parent
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{torch_folder / 'include'}", str(_SOURCE), "-o", str(library),
             f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"],
            check=True,
        )  # fmt: skip
    return library
