"""Signals while the process writes to its console, and in a thread."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

import pytest

from rlft_fast.world import STOP, World, write_at_once


def stopped_while_printing(notify: Callable[[TextIO], None]) -> list[str]:
    """What a process has written that gets SIGTERM inside a print, while the reader of its pipe pauses."""
    read, write = os.pipe()
    lines: list[str] = []

    def stop_then_read() -> None:
        time.sleep(0.3)  # the pipe is full by then
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        with open(read) as reader:
            lines.extend(reader)

    reader = threading.Thread(target=stop_then_read)
    reader.start()
    try:
        with open(write, "w") as console, STOP.listening(lambda number: notify(console)):
            while not STOP.signal:
                print("step " * 200, file=console)
            print("saved", file=console)
    finally:
        reader.join()
    return lines


def test_a_signal_inside_a_print_is_noted_and_announced():
    lines = stopped_while_printing(lambda console: write_at_once(console, "stopping"))
    assert STOP.signal == signal.SIGTERM
    assert "stopping\n" in lines
    assert lines[-1] == "saved\n"


def test_a_thread_listens_to_no_signal():
    """Python gives signals to the main thread, and another thread cannot ask for them: it can train all the same."""

    def listen() -> bool:
        with STOP.listening(print):
            return signal.getsignal(signal.SIGINT) == before

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(listen).result()


def test_a_reason_stops_a_process_without_a_signal():
    with STOP.listening(print):
        STOP.raise_if_asked(World())
        STOP.reason = ValueError("the head is gone")
        with pytest.raises(ValueError, match="the head is gone"):
            STOP.raise_if_asked(World())
    with STOP.listening(print):
        STOP.raise_if_asked(World())
