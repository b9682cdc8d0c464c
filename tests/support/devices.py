"""Devices for tests of one op."""

import pytest
import torch

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, requires_gpu])]
# The package itself puts some work on a GPU if there is one. A test of such work counts as a gpu test there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_device = [pytest.mark.gpu] if torch.cuda.is_available() else []
