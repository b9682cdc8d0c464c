"""Runs the files of tests in forked processes, each a file at a time.

Workers are forked when all tests are collected, so that modules are imported once, which takes ten seconds, and are in
memory once. Each worker of xdist imports and collects for itself.
"""

import contextlib
import os
import pickle
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest


class ForkedWorkers:
    """A pytest plugin. Workers take files in the order of the collected tests.

    A worker that dies fails the test that it ran. Another worker goes on with the rest of its file.

    Args:
        count: number of workers.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest has a message for what cannot be collected
        files = groupby(range(len(session.items)), key=lambda number: session.items[number].path)
        self.files = deque(deque(of_file) for _, of_file in files)
        config: Any = session.config
        self.folder = config._tmp_path_factory.getbasetemp()
        self.workers: dict[Connection, _Worker] = {}
        try:
            for _ in range(min(self.count, len(self.files))):
                self._begin(session)
            while self.workers:
                ready: list[Any] = wait([*self.workers])
                for connection in ready:
                    self._hear(session, self.workers[connection])
        finally:
            for worker in self.workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _begin(self, session: pytest.Session) -> None:
        ours, its = Pipe()
        name = f"worker-{len([*self.folder.iterdir()])}"
        (folder := self.folder / name).mkdir(mode=0o700)
        if pid := os.fork():
            its.close()
            self.workers[ours] = _Worker(pid, ours)
            return
        status = 1
        try:
            for other in (ours, *self.workers):
                other.close()
            _work(session, its, folder)
            status = 0
        except BaseException:
            its.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        finally:
            os._exit(status)

    def _hear(self, session: pytest.Session, worker: "_Worker") -> None:
        try:
            kind, content = pickle.loads(worker.connection.recv_bytes())
        except EOFError:
            self._end(session, worker)
            return
        hook = session.config.hook
        if kind == "file":
            worker.left = self.files.popleft() if self.files else deque()
            worker.connection.send_bytes(pickle.dumps([*worker.left]))
        elif kind == "warning":
            text, category, file, line, when, nodeid, location = content
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), file, line)
            arguments = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
            hook.pytest_warning_recorded.call_historic(kwargs=arguments)
        elif kind == "error":
            raise RuntimeError(f"a worker has failed: {content}")
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        else:
            getattr(hook, f"pytest_runtest_log{kind}")(nodeid=content[0], location=content[1])
            if kind == "finish":
                worker.left.popleft()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _end(self, session: pytest.Session, worker: "_Worker") -> None:
        del self.workers[worker.connection]
        _, status = os.waitpid(worker.pid, 0)
        if status == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        if not worker.left:
            raise RuntimeError(f"a worker has ended with {how} after its last test")
        item = session.items[worker.left.popleft()]
        words = f"the worker that ran this test has ended with {how}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if worker.left:
            self.files.appendleft(worker.left)
        if self.files:
            self._begin(session)


class _Worker:
    """A worker, and the numbers of the tests that it has not finished."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self.left: deque[int] = deque()


# ---- in a worker ----------------------------------------------------------------------------------------------------


def _work(session: pytest.Session, connection: Connection, folder: Path) -> None:
    config: Any = session.config
    config._tmp_path_factory._basetemp = folder
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    if capture.is_globally_capturing():
        capture.stop_global_capturing()  # into a file whose position all workers share
        capture.start_global_capturing()
        capture.suspend_global_capture()
    plugins.register(speaker := _Speaker(config))
    speaker.connection = connection  # now: a plugin that is registered hears of all earlier warnings again
    with contextlib.suppress(EOFError):  # whoever asked for the tests has ended
        while numbers := _ask(connection):
            _run([session.items[number] for number in numbers])
    session._setupstate.teardown_exact(None)


def _ask(connection: Connection) -> Sequence[int]:
    connection.send_bytes(pickle.dumps(("file", None)))
    return pickle.loads(connection.recv_bytes())


def _run(items: Sequence[pytest.Item]) -> None:
    """After the last test, fixtures of the session stay."""
    following: Iterable[Any] = [*items[1:], items[0].session]
    for item, following_item in zip(items, following, strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following_item)


class _Speaker:
    """Tells the process that has collected the tests what happens in a worker."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.connection: Connection | None = None

    def _send(self, kind: str, content: object) -> None:
        if self.connection is not None:
            self.connection.send_bytes(pickle.dumps((kind, content)))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("start", (nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("finish", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        of = warning_message
        content = (str(of.message), of.category.__name__, of.filename, of.lineno, when, nodeid, location)
        self._send("warning", content)
