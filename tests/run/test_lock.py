"""A folder belongs to one run at a time."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlft_fast.cli import main
from rlft_fast.run.lock import NAME, locked, require_unlocked, running_since
from tests.run.counting import count, counting_config
from tests.support.machine.distributed import run_distributed
from tests.trainer.struck import FEWER_OPTIONS, write_config

HOLD = """
import runpy, sys, time
from pathlib import Path
with runpy.run_path(sys.argv[2])["locked"](Path(sys.argv[1])):  # the module alone, without torch
    print("locked", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has locked the folder of the run."""
    lock = Path(sys.modules[locked.__module__].__file__)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), str(lock)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_by_name_of_the_first(holder, tiny_model, tmp_path, capsys):
    config = write_config(tiny_model("llama"), tmp_path, FEWER_OPTIONS | {"steps": 1})
    for options in ([], ["--resume"]):
        assert main(["train", str(config), *options]) == 1
        message = (
            f"error: {tmp_path / 'run'} is in use by process {holder.pid} on {socket.gethostname()!r}, which has run"
        )
        assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]  # nothing was written
    holder.kill()
    holder.wait()
    assert main(["train", str(config)]) == 0  # what a killed run leaves is no lock
    assert not (tmp_path / "run" / NAME).exists()


def refused_run(rank: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"{'rank 0: ' * (rank == 1)}.*is in use by process"):
        count(folder)


@pytest.mark.dist
def test_two_processes_are_refused_together(holder, tmp_path):
    counting_config(tmp_path)  # writes the data
    run_distributed(refused_run, 2, tmp_path)


def test_whatever_the_file_says_is_refused_in_one_line(holder, tmp_path):
    for text in ("", "{", "[]", '{"pid": "x"}', '{"pid": 1, "host": "\\u001b[2J\\n", "since": []}', "\0" * 5000):
        (tmp_path / "run" / NAME).write_text(text)
        with pytest.raises(ValueError, match="is in use by") as caught:
            require_unlocked(tmp_path / "run")
        assert str(caught.value).isprintable()


def test_when_the_lock_was_taken(holder, tmp_path):
    os.utime(tmp_path / "run" / NAME, (5e8, 1e9))
    assert running_since(tmp_path / "run") == 1e9
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / NAME).exists()
    assert running_since(tmp_path / "run") is running_since(tmp_path) is None


def add_one(folder: Path, times: int) -> None:
    """Each time with the lock alone: reads, waits, writes."""
    counter = folder / "counter"
    while times:
        try:
            with locked(folder):
                value = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(value + 1))
                times -= 1
        except ValueError as error:
            assert "is in use" in str(error)  # noqa: PT017 (in a process of its own)


def test_the_file_may_go_between_opening_and_locking(tmp_path):
    (tmp_path / "counter").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_one, args=(tmp_path, 40)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "counter").read_text() == "160"
    assert not (tmp_path / NAME).exists()


def test_a_forked_process_that_lives_on_does_not_keep_the_lock(tmp_path):
    with locked(tmp_path):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
    try:
        require_unlocked(tmp_path)
        (tmp_path / NAME).touch()
        require_unlocked(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
