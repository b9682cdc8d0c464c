import threading
import time

import pytest

from rlft_fast.world import DaemonThreads


def test_calls_are_made_in_their_order():
    threads, seen = DaemonThreads(1, "calls"), []
    futures = [threads.submit(seen.append, number) for number in range(20)]
    assert [future.result(5) for future in futures] == [None] * 20
    assert seen == [*range(20)]
    threads.close()
    assert threads.join(5)


def test_what_a_call_raises_is_kept():
    threads = DaemonThreads(1, "calls")
    with pytest.raises(KeyboardInterrupt):
        threads.submit(lambda: exec("raise KeyboardInterrupt")).result(5)
    assert threads.submit(int, "7").result(5) == 7


def test_a_stuck_call_holds_nothing_up():
    """Calls behind it are cancelled, and Python does not wait for a daemon at its exit."""
    threads, release = DaemonThreads(1, "stuck"), threading.Event()
    stuck, behind = threads.submit(release.wait), threads.submit(int)
    time.sleep(0.02)
    threads.close()
    assert not threads.join(0.01)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "stuck"] == [True]
    release.set()
    assert threads.join(5)
    assert (stuck.result(), behind.cancelled()) == (True, True)
