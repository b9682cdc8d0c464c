"""A rank that is killed, or that fails, is named by those that are left."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlft_fast.engine import CheckpointError, CheckpointManager
from rlft_fast.engine.sharding.mesh import device_mesh
from rlft_fast.errors import RunError
from rlft_fast.world import World, collective_timeout, init_distributed, naming_lost_ranks
from rlft_fast.world.failures import LostRankError
from rlft_fast.world.process_group import _local_gpu, leave_process_group
from tests.support.machine.distributed import run_distributed, start_processes

pytestmark = pytest.mark.dist

SCRIPT = """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    from rlft_fast.world import init_distributed, naming_lost_ranks
    from rlft_fast.world.failures import LostRankError

    world = init_distributed(timeout_minutes=1)
    try:
        with naming_lost_ranks(world, patience_s=5.0):
            for step in range(100):
                if world.rank == 1 and step == 3:
                    {end}
                dist.all_reduce(torch.ones(1))
    except LostRankError as error:
        print(f"rank {{world.rank}}: {{error}}", flush=True)
        os._exit(3)
"""


UNGUARDED = """
    import os, signal
    import torch
    import torch.distributed as dist
    from rlft_fast.world import init_distributed

    world = init_distributed(timeout_minutes=1)
    for step in range(100):
        if world.rank == 1 and step == 3:
            {end}
        dist.all_reduce(torch.ones(1))
"""


def run_ranks(end: str, tmp_path: Path, world_size: int = 3, script: str = SCRIPT) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    path = tmp_path / "ranks.py"
    path.write_text(textwrap.dedent(script).format(end=end))
    environment = os.environ | {
        "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_600 + os.getpid() % 300),
        "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
def test_killed_rank_is_named(tmp_path):
    results = run_ranks("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert results[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank][0] == 3, results[rank][1]
        assert f"rank {rank}: rank 1 ended without a word (killed" in results[rank][1]
        assert "--resume" in results[rank][1]


@pytest.mark.slow
def test_a_script_that_catches_nothing_shows_the_first_error(tmp_path):
    for end, reason in (
        ("raise ValueError('no such reward')", "rank 1 ended with ValueError: no such reward"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 ended without a word (killed"),
    ):
        (code, output), _ = run_ranks(end, tmp_path, world_size=2, script=UNGUARDED)
        assert code == 1
        assert reason in output.strip().splitlines()[-1]


@pytest.mark.slow
def test_reason_of_a_failed_rank_is_passed_on(tmp_path):
    results = run_ranks("raise ValueError('no such reward')", tmp_path)
    assert "ValueError: no such reward" in results[1][1]
    for rank in (0, 2):
        assert "rank 1 ended with ValueError: no such reward" in results[rank][1]


def test_error_with_a_cause_of_its_own_is_no_lost_rank():
    world = World(store=dist.HashStore())
    with pytest.raises(RunError, match=r"^the judge: connection timed out$"), naming_lost_ranks(world):
        raise RunError("the judge: connection timed out")


def test_a_lost_rank_behind_another_error_is_named():
    """As a checkpoint says it, which would seem to be damaged."""
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4")
    error = CheckpointError("cannot load checkpoint step_3")
    error.__cause__ = lost
    world = World(store=dist.HashStore())
    with pytest.raises(LostRankError, match="failed on every rank"), naming_lost_ranks(world, patience_s=0.1):
        raise error


def check_an_end_of_torchrun(_: int) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "as under torchrun", "WORLD_SIZE": "1"}
    read, write = os.pipe()  # which is at its end when nobody can write to it any more
    if (torchrun := os.fork()) == 0:
        try:
            if os.fork() == 0:
                init_distributed()
                os.write(write, b"joined")
            time.sleep(20)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb", buffering=0) as ended:
        assert ended.read(6) == b"joined"
        os.kill(torchrun, signal.SIGKILL)
        os.waitpid(torchrun, 0)
        assert select.select([ended], [], [], 10)[0], "the process goes on"
        assert ended.read(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells of a parent's end on Linux alone")
def test_a_single_process_ends_with_its_torchrun():
    start_processes(check_an_end_of_torchrun, 1)


def check_abort(rank: int) -> None:
    """Rank 1 fails on its own, and neither waits for the others nor lets them wait."""
    if rank == 1:
        leave_process_group(failed=True)
        assert not dist.is_initialized()
        return
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))


def test_a_process_that_fails_leaves_alone():
    run_distributed(check_abort, 2)


def test_processes_without_a_gpu_of_their_own_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert _local_gpu(4) == 3
    with pytest.raises(ValueError, match="LOCAL_RANK is 3, but this process sees 2 GPUs"):
        _local_gpu(2)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="LOCAL_RANK is not set"):
        _local_gpu(2)


def check_timeouts(rank: int, directory: Path) -> None:
    expected = collective_timeout()
    assert expected != dist.default_pg_timeout
    world = replace(World.current(), device=torch.device("cpu"))
    groups = [world.sequence_group(2), *device_mesh(shard_size=1, world=world).get_all_groups()]
    manager = CheckpointManager(directory, world=world)
    assert manager.load({}) is None
    assert [collective_timeout(group) for group in (*groups, manager._group)] == [expected] * 4


def test_all_groups_wait_as_long_as_the_whole(tmp_path):
    run_distributed(check_timeouts, 2, tmp_path)


def test_an_error_whose_text_cannot_be_made_is_no_lost_rank():
    class MuteError(RuntimeError):
        def __str__(self):
            raise OSError

    world = replace(World(), store=dist.HashStore())
    with pytest.raises(MuteError), naming_lost_ranks(world):
        raise MuteError
    assert world.store.get("end/0") == b"MuteError: (MuteError cannot be shown: str() raises OSError)"
