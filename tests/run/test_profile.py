"""Traces of chosen steps, by torch's profiler."""

import gzip
import json

import pytest
import torch

from rlft_fast.config import Config, ConfigError, ProfileConfig
from rlft_fast.run import Phases
from rlft_fast.run.profile import profiled
from rlft_fast.world import World
from tests.support.runs.configs import MINIMAL


def test_a_trace_of_the_chosen_steps_and_ranks(tmp_path):
    config, world = ProfileConfig(steps=(2, 3), ranks=(0,)), World.current()
    for step in (1, 2):
        with profiled(config, tmp_path, step, world), Phases(world).timed("update"):
            torch.ones(3, 4) @ torch.ones(4, 5)
    with profiled(ProfileConfig(steps=(3,), ranks=(1,)), tmp_path, 3, world), profiled(None, tmp_path, 3, world):
        pass
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step_00000002_rank_0.json.gz"
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("ph") == "X"}
    assert spans["aten::mm"]["args"]["Input Dims"] == [[3, 4], [4, 5]]
    assert spans["update"]["ts"] <= spans["aten::mm"]["ts"]
    assert spans["aten::mm"]["dur"] <= spans["update"]["dur"]


def test_a_step_that_fails_leaves_no_trace(tmp_path):
    with pytest.raises(KeyError), profiled(ProfileConfig(steps=(1,)), tmp_path, 1, World.current()):
        raise KeyError
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_costs_a_warning(tmp_path):
    """The step inside is made. The error ended the run before its next save."""
    (tmp_path / "profile").touch()
    config, world = ProfileConfig(steps=(1,)), World.current()
    told = pytest.warns(UserWarning, match=r"^step 1: its trace is not kept: .*profile")
    with told, profiled(config, tmp_path, 1, world):
        pass
    with pytest.raises(FileNotFoundError), profiled(config, tmp_path, 1, world):
        raise FileNotFoundError  # of the step itself


def test_a_cluster_has_no_traces():
    with pytest.raises(
        ConfigError, match=r"^profile traces the processes of torchrun, and the run has a cluster section"
    ):
        Config.parse(MINIMAL | {"profile": {"steps": [1]}, "cluster": {}})
