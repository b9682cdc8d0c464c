"""Devices for tests of one op."""

import pytest
import torch

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
# The package itself puts some work on a GPU if there is one. A test of such work counts as a gpu test there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_device = [pytest.mark.gpu] if torch.cuda.is_available() else []
