"""Signals that ask a run to stop, and the places where all ranks leave a step together.

A signal reaches the ranks at different moments, and a rank that waits in a collective cannot leave it. So the handler
only notes the signal. All ranks exchange their notes in the same places: after every step, and between micro-batches
until the first optimizer step of a rollout. Sampling and reward functions run without a collective and may take
minutes, so a signal interrupts them at once.
"""

import contextlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

import torch

from rlft_fast.errors import Interrupted
from rlft_fast.world.world import World

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LeftEarlyError(RuntimeError):
    """A signal ended the work of this rank. The other ranks do not know it yet."""


class _Leave(KeyboardInterrupt):
    """Raised by the handler. It is no `Exception`, because a reward function may catch every `Exception`."""


class StopRequest:
    """The signal that this process has received, and whether the step under way can be left.

    Attributes:
        signal: number of the first signal; 0 before the first signal.
        reason: why a process that trains alone has to stop without a signal; None: it has not.
        can_leave: whether leaving now would lose only the step under way; the same on all ranks.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.reason: Exception | None = None
        self.can_leave = False
        self._is_alone = False
        self._notify: Callable[[int], None] = lambda number: None

    @contextlib.contextmanager
    def listening(self, notify: Callable[[int], None]) -> Iterator[None]:
        """Inside, SIGINT, SIGTERM and SIGHUP are noted. An ignored SIGTERM or SIGHUP (nohup) stays ignored.

        In another thread than the main thread, nothing is noted: Python handles signals in the main thread alone.

        Args:
            notify: called with the number of the first signal, inside of the handler. It must not print, because a
                print raises RuntimeError where the signal interrupted a print: see `write_at_once`.

        Raises:
            KeyboardInterrupt: Ctrl-C after the first signal.
        """
        self.signal, self.reason, self.can_leave, self._notify = 0, None, False, notify
        is_main = _is_main_thread()
        heard = [
            number
            for number in _SIGNALS
            if is_main and (signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT)
        ]
        handlers = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            self.can_leave = False
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal = number
        self._notify(number)
        if self._is_alone:
            raise _Leave

    def raise_if_asked(self, world: World) -> None:
        """Raises `Interrupted` on all ranks if any rank has a signal. Every rank must call it.

        Raises:
            Interrupted: there is a signal.
            Exception: the `reason`.
        """
        numbers = world.all_reduce({"signal_max": torch.tensor(float(self.signal))})
        if number := int(numbers["signal_max"]):
            raise Interrupted(number)
        if self.reason is not None:
            raise self.reason

    def leave_together(self, world: World) -> None:
        """`raise_if_asked`, but only if the step can be left, and in the main thread. Every rank must call it."""
        if self.can_leave and _is_main_thread():
            self.raise_if_asked(world)

    def leave_or_finish(self, world: World) -> None:
        """The last `leave_together` of a step. Afterwards weights change, so the step is finished."""
        self.leave_together(world)
        self.can_leave = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Work of this rank without a collective. A signal ends the work at once if the step can be left.

        Another thread than the main thread works on: Python handles signals in the main thread alone.

        Raises:
            LeftEarlyError: a signal ended the work. All ranks must call `leave_together` next.
        """
        if not _is_main_thread():
            yield
            return
        try:
            self._is_alone = self.can_leave
            if self._is_alone and self.signal:
                raise _Leave
            yield
        except _Leave:
            raise LeftEarlyError("a signal asked this process to stop") from None
        finally:
            self._is_alone = False


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def write_at_once(stream: TextIO, text: str) -> None:
    """Writes a line to the stream's descriptor, past its buffer, whose lock the interrupted code may hold.

    A stream without a descriptor of its own has no such lock, and is written as usual.
    """
    is_buffered = isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter)
    with contextlib.suppress(OSError):  # the line is a courtesy
        if is_buffered:
            os.write(stream.fileno(), f"{text}\n".encode(stream.encoding, "backslashreplace"))
        else:
            print(text, file=stream, flush=True)


STOP = StopRequest()
"""The stop request of this process. There is one per process, because signals are sent to processes."""
