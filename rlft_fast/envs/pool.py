"""The trainer's side of environments: calls with a deadline to many episodes at once."""

import contextlib
import json
import math
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from rlft_fast.envs.server import FORK, KILL, PID, serve
from rlft_fast.isolation import WorkerProcess

_START_S = 120.0  # imports of the environment's module
_LONGEST_ANSWER = 4_000_000  # bytes of a line; contents are cut to far less
_CONTROL_S = 30.0  # a fork, or a kill
_NO_ANSWER = "it wrote something that is no answer"


Failure = Literal["raised", "timeout", "died", "no_answer"]
"""How an environment fails: it raises, takes too long, its process ends, or what it writes is no answer."""


class Failed(str):
    """Why an episode has no answer, in words.

    Attributes:
        kind: of failure.
    """

    kind: Failure

    def __new__(cls, words: str, kind: Failure) -> Self:
        own = super().__new__(cls, words)
        own.kind = kind
        return own


Answer = dict[str, Any] | Failed


class EnvironmentPool:
    """Environments of one class, each episode in a process of its own.

    Args:
        spec: module:Class, path/to/file.py:Class, or a name such as gymnasium:ID; or functions that are tools.
        options: arguments of the class.
        columns: names of the columns that ``reset`` gets.
        timeout_s: seconds for one call of an environment.
        most_characters: of the content of a message; the rest is left out.

    Attributes:
        name: for messages.
        tools: JSON schemas of the tools that the policy may call.
        seconds: by the number of an episode, how long each of its calls took until its answer was there [s]. The reader
            takes them out.

    Raises:
        ValueError: the class cannot be loaded, or is no environment.
    """

    def __init__(
        self, spec: str | Sequence[str], options: Mapping[str, Any], columns: Sequence[str], timeout_s: float,
        most_characters: int,
    ) -> None:  # fmt: skip
        self.name, self.timeout_s = _name_of(spec), timeout_s
        self._arguments = (spec if isinstance(spec, str) else [*spec], dict(options), [*columns], most_characters)
        self._worker: _Worker | None = None
        self._episodes: dict[int, _Episode] = {}
        self.seconds: defaultdict[int, list[float]] = defaultdict(list)
        self._next = 0
        self._turn = threading.RLock()  # of the worker, which forks and kills; several threads may play episodes
        self._worker = _Worker(*self._arguments)
        self.tools = self._worker.tools

    def open(self, count: int) -> list[int]:
        """Starts the processes of so many episodes; returns their numbers."""
        with self._turn:
            numbers = [*range(self._next, self._next + count)]
            self._next += count
            for number in numbers:
                self._episodes[number] = self._fork()
        return numbers

    def reset(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Begins episodes.

        Args:
            rows: for each episode the columns of its row.

        Returns:
            For each episode ``{"messages"}``, or why it failed; it has then ended.
        """
        return self._call({number: {"row": row} for number, row in rows.items()}, ("messages",))

    def step(self, messages: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Gives episodes the policy's messages.

        Returns:
            For each episode ``{"messages", "reward", "done"}``, or why it failed; it has then ended.
        """
        asked = {number: {"message": message} for number, message in messages.items()}
        return self._call(asked, ("messages", "reward", "done"))

    def end(self, numbers: Sequence[int]) -> dict[int, Answer]:
        """Ends episodes; episodes that have failed are left out.

        Returns:
            For each episode ``{"reward"}``, of the whole episode, or why it failed.
        """
        running = [number for number in numbers if number in self._episodes]
        answers = self._call({number: {"end": True} for number in running}, ("reward",))
        for number in running:
            if number in self._episodes:
                self._kill(number)
        return answers

    def close(self) -> None:
        """Kills all processes. The next call of `open` starts new ones."""
        for episode in self._episodes.values():
            episode.socket.close()
        self._episodes.clear()
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _fork(self) -> "_Episode":
        for _ in range(2):  # the worker may have been killed: a second one is tried
            if self._worker is None:
                self._worker = _Worker(*self._arguments)
            try:
                return self._worker.fork()
            except OSError:
                self._worker.kill()
                self._worker = None
        raise RuntimeError(f"the worker process of the environment {self.name} ends as soon as it starts")

    def _kill(self, number: int) -> None:
        with self._turn:
            episode = self._episodes.pop(number)
            episode.socket.close()
            if self._worker is not None and episode.worker is self._worker:
                try:
                    self._worker.end(episode.pid)
                except OSError:  # it was killed; `kill` ends what it has left
                    self._worker.kill()
                    self._worker = None

    def _call(self, asked: Mapping[int, dict[str, Any]], keys: tuple[str, ...]) -> dict[int, Answer]:
        started = time.monotonic()
        deadline = started + self.timeout_s
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for number, message in asked.items():
                episode = self._episodes[number]
                episode.begin(json.dumps(message, default=str).encode() + b"\n")
                selector.register(episode.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, number)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, events in selector.select(left):
                    episode = self._episodes[key.data]
                    if events & selectors.EVENT_WRITE and episode.write():
                        selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                    if events & selectors.EVENT_READ and (answer := episode.read(keys)) is not None:
                        answers[key.data] = answer
                        self.seconds[key.data].append(time.monotonic() - started)
                        selector.unregister(key.fileobj)
        for number in asked:
            if number not in answers:
                answers[number] = Failed(f"no answer within {self.timeout_s:g} s", "timeout")
                self.seconds[number].append(self.timeout_s)
        for number, answer in answers.items():
            if isinstance(answer, Failed):
                self._kill(number)
        return {number: answers[number] for number in asked}


class _Episode:
    """The trainer's end of an episode's socket. Its process may write anything, at any time, or never."""

    def __init__(self, own: socket.socket, pid: int, worker: "_Worker") -> None:
        self.socket, self.pid, self.worker = own, pid, worker
        own.setblocking(False)
        self._to_write = b""
        self._read = bytearray()

    def begin(self, data: bytes) -> None:
        self._to_write = data
        self._read.clear()

    def write(self) -> bool:
        """Writes what the socket takes; returns whether all is written."""
        with contextlib.suppress(OSError):  # an end is found by reading
            self._to_write = self._to_write[self.socket.send(self._to_write) :]
            return not self._to_write
        return True

    def read(self, keys: tuple[str, ...]) -> Answer | None:
        """Reads from the socket; returns the answer, or None while a part of it is missing."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return Failed("its process ended", "died")
        self._read += data
        if len(self._read) > _LONGEST_ANSWER:
            return Failed(f"it wrote more than {_LONGEST_ANSWER} bytes", "no_answer")
        if not data.endswith(b"\n"):
            return None
        try:
            answer = json.loads(self._read)
        except (ValueError, RecursionError):
            return Failed(_NO_ANSWER, "no_answer")
        return _checked(answer, keys)


def _name_of(spec: str | Sequence[str]) -> str:
    return spec if isinstance(spec, str) else ", ".join(spec)


def _checked(answer: Any, keys: tuple[str, ...]) -> Answer:
    """The answer, if `serve` can have sent it: the environment can write to the socket, too."""
    if isinstance(answer, dict) and isinstance(failure := answer.get("failure"), str):
        return Failed(failure, "raised")
    if not isinstance(answer, dict) or sorted(answer) != sorted(keys):
        return Failed(_NO_ANSWER, "no_answer")
    reward, messages = answer.get("reward"), answer.get("messages", [])
    if not (reward is None or (isinstance(reward, float) and math.isfinite(reward))):
        return Failed(f"its reward is {reward!r}, expected a finite number or None", "no_answer")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return Failed("its messages have no role or no text as content", "no_answer")
    return answer


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("content"), str)
        and isinstance(message.get("role", ""), str)
        and message.get("role") != "assistant"
    )


class _Worker(WorkerProcess):
    """The process that forks episodes."""

    def __init__(self, spec: str | list[str], options: dict[str, Any], columns: list[str], most: int) -> None:
        name = _name_of(spec)
        super().__init__(serve, spec, options, columns, most)
        self.control = socket.socket(fileno=socket.dup(self.connection.fileno()))
        self.control.settimeout(_CONTROL_S)
        try:
            if not self.connection.poll(_START_S):
                raise ValueError(f"the environment {name} was not imported within {_START_S:g} s")
            answer = json.loads(self.connection.recv_bytes(_LONGEST_ANSWER))
            if "failure" in answer:
                raise ValueError(f"the environment is {name}, which cannot be used: {answer['failure']}")
        except EOFError:
            self.kill()
            raise ValueError(f"the environment {name} ends its process while it is imported") from None
        except BaseException:
            self.kill()
            raise
        self.tools: list[dict[str, Any]] = answer["tools"]

    def fork(self) -> _Episode:
        """Starts the process of an episode; raises OSError if the worker has ended."""
        own, other = socket.socketpair()
        with other:
            socket.send_fds(self.control, [FORK], [other.fileno()])
            return _Episode(own, self._receive(), self)

    def end(self, pid: int) -> None:
        """Kills the process of an episode; raises OSError if the worker has ended."""
        self.control.sendall(KILL + PID.pack(pid))
        self._receive()

    def _receive(self) -> int:
        data = self.control.recv(PID.size)
        if len(data) != PID.size:
            raise ConnectionResetError("the worker has ended")
        return PID.unpack(data)[0]

    def kill(self) -> None:
        super().kill()
        self.control.close()
