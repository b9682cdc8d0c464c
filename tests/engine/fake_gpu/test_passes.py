"""What the engine does to a GPU, without one: no tensor is on the wrong device, and nothing in a step waits for it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.support.device_library import device_library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch itself has the device that is pretended here"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("fake_gpu")
    library = device_library(folder)
    command = [sys.executable, "-m", "tests.engine.fake_gpu.passes", str(folder)]
    environment = os.environ | {"RLFT_EMULATED_KERNELS": str(library)}  # which holds no kernels here
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_micro_batch_does_not_wait(seen):
    steps = {case: what for case, what in seen.items() if case.startswith("train")}
    assert len(steps) == 12
    assert {what for step in steps.values() for what in step if what.startswith("from")} == set()
    assert "linear_logprob_loss" in steps["train llama ppo"]
    assert "support_logits_backward" in steps["train supports"]


def test_inputs_of_blocks_go_to_the_host(seen):
    """Each input once, without a wait; nothing else of a block does."""
    assert seen["train offloaded"].count("to host") == len(seen["blocks"])
    assert "to host" not in seen["train llama ppo"]


def test_inference_waits_when_all_micro_batches_are_on_their_way(seen):
    first = seen["infer"].index("from device")
    assert seen["infer"][:first].count("linear_logprob") == seen["infer"].count("linear_logprob") > 1
    assert set(seen["infer"][first:]) == {"from device"}
    assert "from unpinned memory" not in seen["infer"]


def test_offloaded_weights_step_where_they_are(seen):
    assert seen["step of offloaded weights"] == ["from device", "multi_tensor_adamw_"]
