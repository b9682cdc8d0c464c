"""Which shard sizes are accepted, and which one "auto" chooses."""

import pytest
import torch

from rlft_fast.engine.sharding.build import state_bytes
from rlft_fast.engine.sharding.mesh import device_memory, memory_limits, resolve_shard_size
from tests.engine.reference import make_engine

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "world_size", "expected"), [(-1, 6, 6), (1, 6, 1), (2, 6, 2), (3, 6, 3), (6, 6, 6), (-1, 1, 1)]
)
def test_sizes_that_divide(asked, world_size, expected):
    assert resolve_shard_size(asked, world_size, state_bytes=GIB, memory_bytes=GIB) == expected


@pytest.mark.parametrize(("asked", "world_size"), [(4, 6), (7, 6), (2, 1)])
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(asked, world_size):
    with pytest.raises(ValueError, match=rf"shard_size is {asked}, which does not divide the {world_size} ranks"):
        resolve_shard_size(asked, world_size, state_bytes=GIB, memory_bytes=GIB)


# 60 % of a device are for the state: 48 of 80 GiB.
@pytest.mark.parametrize(("state_gib", "expected"), [(10, 1), (48, 1), (49, 2), (96, 2), (97, 4), (140, 4), (300, 8)])
def test_auto_takes_the_fewest_ranks_that_hold_a_copy(state_gib, expected):
    assert resolve_shard_size("auto", 8, state_bytes=state_gib * GIB, memory_bytes=80 * GIB) == expected


def test_auto_that_fits_nowhere_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"400\.0 GiB of state, over all 8 ranks, take more than 60% of .* 80\.0 GiB"):
        resolve_shard_size("auto", 8, state_bytes=400 * GIB, memory_bytes=80 * GIB)


BFLOAT16 = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("config", [{}, BFLOAT16, {"lora": {"rank": 4}}], ids=["float32", "bfloat16", "lora"])
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16", "int8"])
def test_state_is_what_an_engine_holds(config, moment_dtype, trains, tiny_model):
    """Weights, and of those that train as many bytes of gradients, and what the optimizer keeps."""
    steps = 1 if trains else None
    optimizer = {"moment_dtype": moment_dtype}
    engine = make_engine(tiny_model("llama"), config=config, optimizer=optimizer, num_training_steps=steps)
    weights = [(p.numel(), p.element_size(), p.requires_grad) for p in engine.model.parameters()]
    held = sum(numel * width * (1 + has_gradient) for numel, width, has_gradient in weights)
    if engine.optimizer is not None:
        engine.optimizer.initialize_state()
        state = [x for moments in engine.optimizer.state.values() for x in moments.values() if x.dim()]  # no counters
        held += sum(x.numel() * x.element_size() for x in state)
    assert state_bytes(engine.model, engine.config) == held


def test_processes_share_the_memory_of_a_machine(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = device_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device_memory(torch.device("cpu")) == whole // 4


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/job/step\n", {"job/memory.max": "3000", "job/step/memory.max": "max"}, [3000]),
        ("0::/job/step\n", {"job/memory.max": "3000", "job/step/memory.max": "2000"}, [3000, 2000]),
        ("0::/\n", {"memory.max": "1000", "other/memory.max": "1"}, [1000]),  # a container is the root of its own
        ("0::/../other\n", {"memory.max": "1000", "other/memory.max": "1"}, [1000]),
        ("9:cpu:/job\n4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "2000", "job/memory.max": "1"}, [2000]),
        ("4:memory:/docker/1\n0::/\n", {"memory/memory.limit_in_bytes": "1000"}, [1000]),  # named as the host does
        ("", {}, []),
    ],
)
def test_limits_of_containers_and_jobs(tmp_path, groups, files, limits):
    process, mount = tmp_path / "groups", tmp_path / "mount"
    process.write_text(groups)
    for name, limit in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{limit}\n")
    assert memory_limits(process, mount) == limits


def test_another_system_limits_nothing(tmp_path):
    assert memory_limits(tmp_path / "missing", tmp_path) == []
