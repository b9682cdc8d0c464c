"""Launches of an optimizer step with CUDA graphs, counted on a GPU that is not there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.support.device_library import device_library
from tests.engine.fake_gpu.test_passes import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch itself has the device that is pretended here"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
NUM_LAYERS = 24  # of Qwen2.5-0.5B


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, dict[str, dict[str, int]]]:
    folder: Path = tmp_path_factory.mktemp("fake_gpu")
    command = [sys.executable, "-m", "tests.engine.fake_gpu.launches", str(folder / "model"), "1", "2"]
    environment = os.environ | {"RLFT_EMULATED_KERNELS": str(device_library(folder))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_launches_less_than_a_fifth(counted):
    """A further layer adds as many launches as the second."""
    first, second = ({way: sum(found[layers].values()) for way, found in counted.items()} for layers in ("1", "2"))
    whole = {way: first[way] + (NUM_LAYERS - 1) * (second[way] - first[way]) for way in counted}
    assert whole["in graphs"] < 0.2 * whole["launched"]
    assert whole["decode in graphs"] < 0.01 * whole["decode launched"]


def test_the_backbone_is_two_launches_of_each_micro_batch(counted):
    """Beside copies of its inputs: no kernel of a layer is launched."""
    first, second = (counted["in graphs"][layers] for layers in ("1", "2"))
    assert first["replay of a graph"] == second["replay of a graph"] == 4
    more = {name for name in second if second[name] != first.get(name, 0)}
    assert more <= {"aten::_to_copy", "aten::_foreach_zero_", "rlft_fast::multi_tensor_adamw_"}  # of weights
    assert second["aten::mm"] == 4  # the head's


def test_a_decode_step_is_one_replay(counted):
    """Beside copies of tokens, positions and paddings, and the number of columns."""
    found = counted["decode in graphs"]
    assert found["1"] == found["2"] == {"replay of a graph": 1, "aten::copy_": 3, "aten::fill_": 1}
