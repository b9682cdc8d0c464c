"""What a function changes of the process is as before after the call, and is named once."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from rlft_fast.foreign import ForeignCode

KEPT = []  # guards live as long as a function that is loaded


def enter(context) -> None:
    KEPT.append(context)
    context.__enter__()


def state() -> dict[str, object]:
    """Read by other ways than the code under test, where there are any."""
    with contextlib.suppress(OSError):
        folder = os.readlink("/proc/self/cwd")
    return {
        "a gradient": (torch.ones(1, requires_grad=True) * 2).requires_grad,
        "an inference tensor": torch.ones(1).is_inference(),
        "a float": torch.tensor(1.0).dtype, "a device": torch.empty(0).device,
        "a product": (torch.ones(1, 1) @ torch.ones(1, 1)).dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "threads": torch.get_num_threads(), "precision": torch.get_float32_matmul_precision(),
        "precision of a backend": torch.backends.mkldnn.matmul.fp32_precision,
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "anomaly": torch.is_anomaly_enabled(), "recursion": sys.getrecursionlimit(), "folder": folder,
        "filters": [*warnings.filters], "streams": (sys.stdout, sys.stderr),
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0, "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }  # fmt: skip


CHANGES = {
    "gradient mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: enter(torch.inference_mode()),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "autocast": lambda: enter(torch.autocast("cpu", torch.bfloat16)),
    "deterministic mode": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "settings of cuDNN": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "working directory": lambda: os.chdir("/"),
    "warnings filters": lambda: warnings.simplefilter("ignore"),
    "standard streams": lambda: setattr(sys, "stdout", None),
    "signal handlers": lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGUSR1)],
    "alarm": lambda: signal.alarm(60),
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_put_back_and_named_once(kind):
    before = state()
    message = f"^judge of {kind} changes .*: {kind}, which is put back after each call"
    with pytest.warns(UserWarning, match=message), ForeignCode(f"judge of {kind}"):
        CHANGES[kind]()
    assert state() == before
    with warnings.catch_warnings(action="error"), ForeignCode(f"judge of {kind}"):
        CHANGES[kind]()
    assert state() == before


def test_all_changes_at_once():
    before = state()

    def change_all() -> None:
        for change in CHANGES.values():
            change()

    with pytest.warns(UserWarning, match="the judge of all changes") as warned, ForeignCode("the judge of all"):
        change_all()
    assert state() == before
    (warning,) = warned
    # Inference mode has no gradients.
    assert all(kind in str(warning.message) for kind in CHANGES if kind != "gradient mode")


def test_a_setting_by_torchs_new_name_is_put_back():
    before = state()
    with pytest.warns(UserWarning, match="precision of products"), ForeignCode("judge with a new name"):
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert state() == before


def test_nothing_is_said_of_a_function_that_changes_nothing():
    def change_for_a_while() -> None:
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), warnings.catch_warnings(action="ignore"):
            pass

    with warnings.catch_warnings(action="error"), ForeignCode("judge"):
        change_for_a_while()


def test_filters_that_an_import_adds_are_put_back_in_silence(tmp_path, monkeypatch):
    (tmp_path / "adds_a_filter.py").write_text("import warnings\nwarnings.simplefilter('ignore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = [*warnings.filters]
    with warnings.catch_warnings(action="error"):
        filters = [*warnings.filters]
        with ForeignCode("judge that imports"):
            import adds_a_filter  # type: ignore[import-not-found]  # noqa: F401
        assert warnings.filters == filters
    assert warnings.filters == before


def test_the_modes_of_the_caller_are_those_of_the_function():
    with torch.no_grad(), ForeignCode("judge"):
        assert not torch.is_grad_enabled()
    with torch.inference_mode(), ForeignCode("judge"):
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


def test_no_room_for_one_call_more_is_put_back():
    def squeeze() -> None:
        depth, frame = 0, sys._getframe()
        while frame := frame.f_back:
            depth += 1
        for limit in range(depth, depth + 50):
            with contextlib.suppress(RecursionError):
                return sys.setrecursionlimit(limit)

    before = sys.getrecursionlimit()
    with pytest.warns(UserWarning, match="recursion limit"), ForeignCode("a narrow judge"):
        squeeze()
    assert sys.getrecursionlimit() == before


def test_what_cannot_be_put_back_is_said(tmp_path):
    folder, home = tmp_path / "gone", os.getcwd()

    def leave_and_remove() -> None:
        os.chdir(home)
        folder.rmdir()

    folder.mkdir()
    os.chdir(folder)
    try:
        message = "working directory; working directory cannot be put back"
        with pytest.warns(UserWarning, match=message), ForeignCode("a judge that removes"):
            leave_and_remove()
    finally:
        os.chdir(home)


# The descriptor and the stream, of an own process: pytest has its own streams.
CLOSES = """
import os, sys
from rlft_fast.foreign import ForeignCode
print("before", flush=True)
with ForeignCode("judge"):
    CLOSE
with open(sys.argv[1], "w") as opened:  # would get the number of a closed descriptor
    print("after", flush=True)
    os.system("echo child")
    print("error", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(
    "close", ["sys.stdout.close(); sys.stderr.close()", "os.closerange(0, 3)", "os.dup2(os.open(os.devnull, 2), 1)"]
)
def test_closed_streams_are_open_again(close, tmp_path):
    command = [sys.executable, "-c", CLOSES.replace("CLOSE", close), str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.split() == ["before", "after", "child"], ended.stderr
    assert ended.stderr.endswith("\nerror\n")
    assert "standard descriptors" in ended.stderr or "standard streams" in ended.stderr
    assert "cannot be put back" not in ended.stderr
    assert (tmp_path / "file").read_text() == ""


def test_a_signal_is_told_from_an_exception_of_the_function():
    with pytest.raises(KeyboardInterrupt) as error, ForeignCode("judge") as call:
        raise KeyboardInterrupt
    assert not call.is_interrupted(error.value)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as error, ForeignCode("judge") as call:
            signal.raise_signal(signal.SIGINT)
        assert call.is_interrupted(error.value)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


def test_another_thread_and_an_event_loop():
    async def run() -> int:
        with ForeignCode("judge in a loop"):
            return 1

    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(run())))
    thread.start()
    thread.join()
    assert found == [1]


def test_a_call_costs_little():
    def once() -> float:
        started = time.process_time()
        for _ in range(20):
            with ForeignCode("judge"):
                pass
        return (time.process_time() - started) / 20

    assert min(once() for _ in range(5)) < 1e-3
