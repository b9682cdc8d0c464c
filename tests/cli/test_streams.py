"""A command outlives its console: pipes that are closed, disks that are full, encodings that lack a character."""

import fcntl
import os
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SAYS = (
    "import sys; from pathlib import Path; from rlft_fast.cli.streams import keep_streams; keep_streams();"
    "print('π', 'x' * 100_000); print('error π', file=sys.stderr, flush=True); print('end', flush=True);"
    "Path(sys.argv[1]).write_text('done')"
)


def run(done: Path, encoding: str = "utf-8", **options) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run([sys.executable, "-c", SAYS, str(done)], env=environment, **options)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_a_console_lacks_are_escaped(encoding, tmp_path):
    ended = run(tmp_path / "done", encoding, capture_output=True)
    pi = "π" if encoding == "utf-8" else "\\u03c0"
    assert ended.returncode == 0
    assert ended.stdout.decode(encoding) == f"{pi} {'x' * 100_000}\nend\n"
    assert ended.stderr.decode(encoding) == f"error {pi}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_ends_nothing(tmp_path):
    with open("/dev/full", "wb") as full:
        ended = run(tmp_path / "done", stdout=full, stderr=full)
    assert (ended.returncode, (tmp_path / "done").read_text()) == (0, "done")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_pipe_ends_nothing(closed, tmp_path):
    read, write = os.pipe()
    os.close(read)
    other = "stderr" if closed == "stdout" else "stdout"
    ended = run(tmp_path / "done", **{closed: write, other: subprocess.PIPE})
    os.close(write)
    assert (ended.returncode, (tmp_path / "done").read_text()) == (0, "done")
    assert b"Exception ignored" not in getattr(ended, other)


def test_a_full_pipe_that_does_not_block_is_waited_for(tmp_path):
    """A program that shares a terminal or a pipe may have made it non-blocking."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with ThreadPoolExecutor() as executor, os.fdopen(read, "rb") as reader:
        ended = executor.submit(run, tmp_path / "done", stdout=write, stderr=subprocess.DEVNULL)
        ended.add_done_callback(lambda _: os.close(write))
        while _num_waiting(read) < 60_000 and not ended.done():  # of the 65,536 bytes that a pipe holds
            time.sleep(0.01)
        assert reader.read().decode() == f"π {'x' * 100_000}\nend\n"
    assert ended.result().returncode == 0


def _num_waiting(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_are_written_at_once_where_python_is_unbuffered(unbuffered):
    says = "import os; from rlft_fast.cli.streams import keep_streams; keep_streams(); print('line'); os._exit(0)"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    said = subprocess.check_output([sys.executable, "-c", says], env=environment)
    assert said == (b"line\n" if unbuffered else b"")


def test_streams_of_others_stay(capsys):
    from rlft_fast.cli.streams import keep_streams

    before = sys.stdout
    keep_streams()
    assert sys.stdout is before
