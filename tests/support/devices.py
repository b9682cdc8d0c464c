"""The devices that tests of one op are run on."""

import pytest
import torch

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, requires_gpu])]
# For what runs where the package itself decides: on a GPU if there is one, whose machine then takes it for a gpu test.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_device = [pytest.mark.gpu] if torch.cuda.is_available() else []
