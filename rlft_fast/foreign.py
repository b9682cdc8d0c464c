"""Calls of users' functions in the process of a run: what they change of the process is put back, and is named.

A function may set the default dtype, change the working directory or close standard output, and the rest of the run
would compute other numbers, or write elsewhere. `ForeignCode` puts back what can be read and set: a call costs about
0.2 ms. Changed environment variables, patched modules and threads that go on stay: a function that needs them belongs
in a process of its own.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Self

from rlft_fast.files import unfailing_stream

LARGEST_REWARD = 1e30
"""Of a reward that users' code gives: float32 holds it, and float64 its square."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (
    *_STOPPING, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_STREAMS = {"stdout": 1, "stderr": 2}
_FILTERS = "warnings filters"
_told: set[tuple[str, str]] = set()


class _Kind(NamedTuple):
    """A part of the process's state: its name in messages, and how it is read and set."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


class ForeignCode:
    """A context manager around a call of a function that is not ours.

    At its end the state of the process is as it was. The first time that a function changed a part of the state, a
    warning names both. Signal handlers belong to the main thread, and are put back there alone.

    Args:
        what: name of the function, for the warning.
        keeps: names of parts that the code may change for good.
        tells: whether to warn.

    Attributes:
        changed: names of the parts that the code has changed.
    """

    def __init__(self, what: str, keeps: tuple[str, ...] = (), *, tells: bool = True) -> None:
        self.what = what
        self.keeps = keeps
        self.tells = tells
        self.changed: list[str] = []
        self._heard = False

    def __enter__(self) -> Self:
        has_torch = "torch" in sys.modules  # importing torch takes seconds, and a worker process may do without it
        self._recursion_limit, self._num_modules = sys.getrecursionlimit(), len(sys.modules)
        self._descriptors = {number: _duplicate(number) for number in range(3)}
        kinds = _python_kinds() + (_torch_kinds() if has_torch else ())
        self._before = [(kind, kind.read()) for kind in kinds if kind.name not in self.keeps]
        self._leave_guard = _enter_guard() if has_torch else list
        self._handlers = self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        limit = sys.getrecursionlimit()  # the function may have left no room for one call more
        if "recursion limit" not in self.keeps:
            sys.setrecursionlimit(self._recursion_limit)
        self._unlisten()
        names = [] if sys.getrecursionlimit() == limit else ["recursion limit"]
        changed = [(kind, before) for kind, before in self._before if kind.read() != before]
        names += [*self._leave_guard(), *self._restore_descriptors(), *(kind.name for kind, _ in changed)]
        stays = []
        for kind, before in changed:
            with contextlib.suppress(Exception):  # a folder that is gone
                kind.write(before)
            if kind.read() != before:
                stays.append(kind.name)
        if len(sys.modules) > self._num_modules:  # the first import of a package may add filters, which is not told
            names = [name for name in names if name != _FILTERS]
        self.changed = names
        if self.tells:
            self._tell(names, stays)

    def is_interrupted(self, error: BaseException) -> bool:
        """Whether a signal raised the exception that ended the call, and not the function itself."""
        return self._heard and isinstance(error, KeyboardInterrupt)

    def _listen(self) -> dict[int, Any]:
        """Notes signals that ask to stop, before their own handlers run."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _STOPPING}
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}

        def hear(number: int, frame: FrameType | None) -> None:
            self._heard = True
            handlers[number](number, frame)

        self._hear = hear
        for number in handlers:
            signal.signal(number, hear)
        return handlers

    def _unlisten(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self._hear:  # else the function's own, which is put back with the others
                signal.signal(number, handler)

    def _restore_descriptors(self) -> list[str]:
        """A file that is opened next would get the number of a closed descriptor, and then what is printed."""
        changed = False
        for number, duplicate in self._descriptors.items():
            if duplicate is None:
                continue
            with contextlib.suppress(OSError):  # the function has closed the duplicate, too
                if _identity(number) != _identity(duplicate):
                    os.dup2(duplicate, number)
                    changed = True
                os.close(duplicate)
        return ["standard descriptors"] if changed else []

    def _tell(self, changed: list[str], stays: list[str]) -> None:
        new = [name for name in changed if (self.what, name) not in _told]
        _told.update((self.what, name) for name in new)
        if not new:
            return
        outcome = f"; {' and '.join(stays)} cannot be put back" if stays else ", which is put back after each call"
        warnings.warn(
            f"{self.what} changes the process of the run: {', '.join(new)}{outcome}. Reward functions get a "
            "process of their own with reward.timeout_s",
            stacklevel=3,
        )


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


def _has_alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0  # the time that is left changes by itself


def _stop_alarm(had_alarm: bool) -> None:
    if not had_alarm:  # it would interrupt the run
        signal.setitimer(signal.ITIMER_REAL, 0)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _streams() -> dict[str, tuple[Any, bool]]:
    found = {name: getattr(sys, name) for name in _STREAMS}
    return {name: (stream, getattr(stream, "closed", False)) for name, stream in found.items()}


def _set_streams(before: dict[str, tuple[Any, bool]]) -> None:
    for name, (stream, was_closed) in before.items():
        if getattr(stream, "closed", False) and not was_closed:
            encoding, shows_lines = getattr(stream, "encoding", None), getattr(stream, "line_buffering", True)
            stream = unfailing_stream(_STREAMS[name], encoding or "utf-8", shows_lines)
            before[name] = (stream, False)  # as good as the stream that was closed
        setattr(sys, name, stream)


def _python_kinds() -> tuple[_Kind, ...]:
    filters: Any = warnings.filters  # another thread may enter or leave warnings.catch_warnings(), and so exchange them

    def set_filters(before: list[Any]) -> None:
        filters[:] = before

    return (
        _Kind("alarm", _has_alarm, _stop_alarm),
        _Kind("signal handlers", _handlers, _set_handlers),
        _Kind("working directory", _working_directory, lambda path: path and os.chdir(path)),
        _Kind(_FILTERS, lambda: list(filters), set_filters),
        _Kind("standard streams", _streams, _set_streams),
        _Kind(
            "blocked signals",  # last, because a signal that waited raises where it is set free
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        ),
    )


def _duplicate(number: int) -> int | None:
    try:
        return os.dup(number)
    except OSError:  # it is closed
        return None


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _torch_kinds() -> tuple[_Kind, ...]:
    """torch's state of this thread and process, but for the modes of gradients."""
    import torch

    cudnn = torch.backends.cudnn

    def set_device(device: torch.device) -> None:
        torch.set_default_device(None if device == torch.device("cpu") else device)

    def set_autocast(before: dict[str, tuple[bool, torch.dtype]]) -> None:
        for device, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)

    def set_cudnn(flags: tuple[bool, bool]) -> None:
        cudnn.deterministic, cudnn.benchmark = flags

    return (
        _Kind("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Kind("default device", torch.get_default_device, set_device),
        _Kind("autocast", lambda: {device: _autocast(device) for device in ("cpu", "cuda")}, set_autocast),
        _Kind("deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _Kind("number of threads", torch.get_num_threads, torch.set_num_threads),
        _Kind("precision of products", _matmul_precision, _set_matmul_precision),
        _Kind("settings of cuDNN", lambda: (cudnn.deterministic, cudnn.benchmark), set_cudnn),
        _Kind("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    )


def _autocast(device: str) -> tuple[bool, Any]:
    import torch

    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _matmul_precision() -> tuple[str | None, list[str]]:
    """By torch's old name, which raises where a new name was set, and by its new names."""
    import torch

    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = None
    return old, [matmul.fp32_precision for matmul in _matmuls()]


def _set_matmul_precision(before: tuple[str | None, list[str]]) -> None:
    import torch

    old, new = before
    steps = [functools.partial(setattr, x, "fp32_precision", value) for x, value in zip(_matmuls(), new, strict=True)]
    if old is not None:  # the old name sets the new ones, too, and raises where they differ from it
        steps += [functools.partial(torch.set_float32_matmul_precision, old), *steps]
    for step in steps:
        step()


def _enter_guard() -> Callable[[], list[str]]:
    """Only a guard that is entered before can leave an inference mode that somebody else has entered.

    Returns:
        Leaves the guard, which puts back the modes of gradients, and returns what was changed.
    """
    import torch

    was_inference, had_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    guard = torch.inference_mode(was_inference)
    guard.__enter__()
    torch.set_grad_enabled(had_grad)

    def leave() -> list[str]:
        inference, grad = torch.is_inference_mode_enabled() != was_inference, torch.is_grad_enabled() != had_grad
        guard.__exit__(None, None, None)
        return ["inference mode"] if inference else ["gradient mode"] if grad else []

    return leave


def _matmuls() -> list[Any]:
    import torch

    mkldnn: Any = torch.backends.mkldnn
    return [torch.backends.cuda.matmul, mkldnn.matmul]
