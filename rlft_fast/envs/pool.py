"""The trainer's side of environments: calls with a deadline to many episodes at once."""

import contextlib
import errno
import json
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from rlft_fast.envs.server import FORK, KILL, MOST_FORKS, PID, serve
from rlft_fast.files import allow_many_open_files
from rlft_fast.foreign import LARGEST_REWARD
from rlft_fast.isolation import WorkerProcess

_START_S = 120.0  # imports of the environment's module
_LONGEST_ANSWER = 32_000_000  # bytes of a line, for images; words are cut to far less
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


class EnvironmentClass(NamedTuple):
    """A class of environments, and how it is called."""

    spec: str | Sequence[str]
    """module:Class, path/to/file.py:Class, or a name such as gymnasium:ID; or functions that are tools."""
    options: Mapping[str, Any]
    """Arguments of the class."""
    columns: Sequence[str]
    """Names of the columns that ``reset`` gets."""
    timeout_s: float
    """Seconds for one call of an environment."""
    most_characters: int
    """Of the content of a message; the rest is left out."""

    def __str__(self) -> str:
        return self.spec if isinstance(self.spec, str) else ", ".join(self.spec)


class EnvironmentPool:
    """Environments of several classes, each episode in a process of its own.

    Args:
        classes: by names.

    Attributes:
        tools: by the names of the classes, JSON schemas of the tools that the policy may call.
        seconds: by the number of an episode, the seconds from each of its calls to the answer. A player takes the
            seconds of an episode out when the episode has ended.

    Raises:
        ValueError: a class cannot be loaded, or is no environment.
    """

    def __init__(self, classes: Mapping[str, EnvironmentClass]) -> None:
        self.classes = dict(classes)
        self._workers: dict[str, _Worker] = {}
        self._episodes: dict[int, _Episode] = {}
        self.seconds: defaultdict[int, list[float]] = defaultdict(list)
        self._next = 0
        self._turn = threading.RLock()  # to fork, or to replace a worker; several threads may play episodes
        allow_many_open_files()  # each episode has a socket
        try:
            for name, own in self.classes.items():
                self._workers[name] = _Worker(own)
            self.tools = {name: worker.tools() for name, worker in self._workers.items()}
        except BaseException:
            self.close()
            raise

    def open(self, names: Sequence[str]) -> list[int]:
        """Starts the process of an episode for each name of a class; returns the numbers of the episodes."""
        with self._turn:
            numbers = [*range(self._next, self._next + len(names))]
            self._next += len(names)
            try:
                for name in dict.fromkeys(names):
                    own = [number for number, other in zip(numbers, names, strict=True) if other == name]
                    for start in range(0, len(own), MOST_FORKS):
                        some = own[start : start + MOST_FORKS]
                        self._episodes.update(zip(some, self._fork(name, len(some)), strict=True))
            except BaseException:
                self.drop(numbers)
                raise
        return numbers

    def reset(self, rows: Mapping[int, Mapping[str, Any]], seeds: Mapping[int, int] | None = None) -> dict[int, Answer]:
        """Begins episodes.

        Args:
            rows: for each episode the columns of its row.
            seeds: for each episode the seed of its random states, in [0, 2^63); None: its number.

        Returns:
            For each episode ``{"messages"}``, or why it failed; it has then ended.
        """
        seeds = dict(zip(rows, rows, strict=True)) if seeds is None else seeds
        return self._call({number: {"row": row, "seed": seeds[number]} for number, row in rows.items()}, ("messages",))

    def step(self, messages: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Gives episodes the policy's messages.

        Returns:
            For each episode ``{"messages", "reward", "done"}``, or why it failed; it has then ended.
        """
        asked = {number: {"message": message} for number, message in messages.items()}
        return self._call(asked, ("messages", "reward", "done"))

    def steps(self) -> "Steps":
        """Calls of `step` that one thread begins and awaits one by one."""
        return Steps(self)

    def end(self, numbers: Sequence[int]) -> dict[int, Answer]:
        """Ends episodes; episodes that have failed are left out.

        Returns:
            For each episode ``{"reward"}``, of the whole episode, or why it failed.
        """
        running = [number for number in numbers if number in self._episodes]
        answers = self._call({number: {"end": True} for number in running}, ("reward",))
        self._kill([number for number in running if number in self._episodes])
        return answers

    def drop(self, numbers: Sequence[int]) -> None:
        """Kills the processes of the episodes that have not ended."""
        self._kill([number for number in numbers if number in self._episodes])
        for number in numbers:
            self.seconds.pop(number, None)

    def close(self) -> None:
        """Kills all processes. The next call of `open` starts new ones."""
        episodes = [*self._episodes.values()]  # other threads may play meanwhile
        self._episodes.clear()
        for episode in episodes:
            episode.socket.close()
        for name in [*self._workers]:
            self._workers.pop(name).kill()

    def _fork(self, name: str, count: int) -> "list[_Episode]":
        for _ in range(2):  # the worker may have been killed: a second one is tried
            if name not in self._workers:
                self._workers[name] = _Worker(self.classes[name])
                self._workers[name].tools()
            try:
                return self._workers[name].fork(name, count)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # it is not the worker's fault
                    raise OSError(
                        error.errno,
                        f"no more episodes can begin beside {len(self._episodes)}, because each has an open file, and "
                        "the limit is reached: raise it (ulimit -n), or lower the number of prompts or samples",
                    ) from error
                self._workers.pop(name).kill()
        raise RuntimeError(f"the worker process of the environment {self.classes[name]} ends as soon as it starts")

    def _kill(self, numbers: Sequence[int]) -> None:
        """Has the processes of episodes killed, and does not wait for their end."""
        of_worker: defaultdict[_Worker, list[_Episode]] = defaultdict(list)
        for number in numbers:
            if (episode := self._episodes.pop(number, None)) is not None:  # `close` may have taken it
                episode.socket.close()
                of_worker[episode.worker].append(episode)
        for worker, episodes in of_worker.items():
            try:
                worker.end([episode.pid for episode in episodes])
            except OSError:  # it was killed; `kill` ends what it has left
                with self._turn:
                    if worker is self._workers.get(name := episodes[0].name):
                        self._workers.pop(name).kill()

    def _call(self, asked: Mapping[int, dict[str, Any]], keys: tuple[str, ...]) -> dict[int, Answer]:
        with _Calls(self, keys) as calls:
            calls.begin(asked)
            answers = calls.rest()
        return {number: answers[number] for number in asked}

    def _begin(self, number: int, asked: Mapping[str, Any]) -> "tuple[_Episode, float]":
        """The episode that is asked now, and the seconds that it has."""
        episode = self._episodes[number]
        episode.begin(json.dumps(asked, default=str).encode() + b"\n")
        return episode, self.classes[episode.name].timeout_s

    def _end(self, number: int, answer: Answer, seconds: float) -> None:
        """Notes a call's end."""
        self.seconds[number].append(seconds)
        if isinstance(answer, Failed):
            self._kill([number])


class _Calls:
    """Calls under way of one thread. An answer is there when it is read, and late when it is not there in time."""

    def __init__(self, pool: EnvironmentPool, keys: tuple[str, ...]) -> None:
        self._pool, self._keys = pool, keys
        self._selector = selectors.DefaultSelector()
        self._begun: dict[int, tuple[_Episode, float, float]] = {}  # the episode, when it was asked, and its limit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def __contains__(self, number: int) -> bool:
        """Whether an episode has been asked, and its answer has not been taken."""
        return number in self._begun

    def begin(self, asked: Mapping[int, Mapping[str, Any]]) -> None:
        """Asks episodes."""
        started = time.monotonic()
        for number, message in asked.items():
            episode, limit_s = self._pool._begin(number, message)
            self._begun[number] = episode, started, limit_s
            events = selectors.EVENT_READ | (0 if episode.write() else selectors.EVENT_WRITE)
            self._selector.register(episode.socket, events, number)

    def some(self) -> dict[int, Answer]:
        """The answers that are there. Waits for one if there is none, and a call is under way."""
        answers: dict[int, Answer] = {}
        while self._begun and not answers:
            due_s = min(started + limit_s for _, started, limit_s in self._begun.values())
            for key, events in self._selector.select(max(due_s - time.monotonic(), 0.0)):
                episode = self._begun[key.data][0]
                if events & selectors.EVENT_WRITE and episode.write():
                    self._selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                if events & selectors.EVENT_READ and (answer := episode.read(self._keys)) is not None:
                    answers[key.data] = self._ended(key.data, answer)
            if not answers:
                answers = self._late()
        return answers

    def rest(self) -> dict[int, Answer]:
        """The answers of all calls under way."""
        answers: dict[int, Answer] = {}
        while self._begun:
            answers |= self.some()
        return answers

    def _late(self) -> dict[int, Answer]:
        now = time.monotonic()
        late = {number: limit_s for number, (_, started, limit_s) in self._begun.items() if started + limit_s <= now}
        return {n: self._ended(n, Failed(f"no answer within {limit_s:g} s", "timeout")) for n, limit_s in late.items()}

    def _ended(self, number: int, answer: Answer) -> Answer:
        episode, started, limit_s = self._begun.pop(number)
        self._selector.unregister(episode.socket)
        self._pool._end(number, answer, min(time.monotonic() - started, limit_s))
        return answer


class Steps(_Calls):
    """Calls of `EnvironmentPool.step` that are under way."""

    def __init__(self, pool: EnvironmentPool) -> None:
        super().__init__(pool, ("messages", "reward", "done"))

    def give(self, messages: Mapping[int, Mapping[str, Any]]) -> None:
        """Gives episodes the policy's messages."""
        self.begin({number: {"message": message} for number, message in messages.items()})


class _Episode:
    """The trainer's end of an episode's socket. Its process may write anything, at any time, or never."""

    def __init__(self, own: socket.socket, name: str, pid: int, worker: "_Worker") -> None:
        self.socket, self.name, self.pid, self.worker = own, name, pid, worker
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


def _checked(answer: Any, keys: tuple[str, ...]) -> Answer:
    """The answer, if `serve` can have sent it: the environment can write to the socket, too."""
    if isinstance(answer, dict) and isinstance(failure := answer.get("failure"), str):
        return Failed(failure, "raised")
    if not isinstance(answer, dict) or sorted(answer) != sorted(keys):
        return Failed(_NO_ANSWER, "no_answer")
    reward, messages = answer.get("reward"), answer.get("messages", [])
    if not (reward is None or (isinstance(reward, float) and abs(reward) <= LARGEST_REWARD)):  # nor is NaN
        expected = f"a number of at most {LARGEST_REWARD:g} in size, or None"
        return Failed(f"its reward is {reward!r}, expected {expected}", "no_answer")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return Failed("its messages have no role, or neither text nor parts with images as content", "no_answer")
    return answer


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and _is_content(message.get("content"))
        and isinstance(message.get("role", ""), str)
        and message.get("role") != "assistant"
    )


def _is_content(content: Any) -> bool:
    """A text, or parts: texts, and images as files in base64 or with a mistake."""
    keys = {"text": ["text"], "image": ["image", "mistake"]}
    return isinstance(content, str) or (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict)
            and len(part) == 2
            and any(isinstance(part.get(key), str) for key in keys.get(str(part.get("type")), []))
            for part in content
        )
    )


class _Worker(WorkerProcess):
    """The process that forks episodes of a class."""

    def __init__(self, kind: EnvironmentClass) -> None:
        spec = kind.spec if isinstance(kind.spec, str) else [*kind.spec]
        super().__init__(serve, spec, dict(kind.options), [*kind.columns], kind.most_characters)
        self.kind = kind
        self.control = socket.socket(fileno=socket.dup(self.connection.fileno()))
        self.control.settimeout(_CONTROL_S)
        self._writing = threading.Lock()  # to `control`

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, when the class is loaded; raises ValueError if it cannot be used."""
        try:
            if not self.connection.poll(_START_S):
                raise ValueError(f"the environment {self.kind} was not imported within {_START_S:g} s")
            answer = json.loads(self.connection.recv_bytes(_LONGEST_ANSWER))
        except EOFError:
            raise ValueError(f"the environment {self.kind} ends its process while it is imported") from None
        if "failure" in answer:
            raise ValueError(f"the environment is {self.kind}, which cannot be used: {answer['failure']}")
        return answer["tools"]

    def fork(self, name: str, count: int) -> list[_Episode]:
        """Starts the processes of episodes of the class of this name; raises OSError if the worker has ended.

        One thread may call it at a time.
        """
        with contextlib.ExitStack() as failing:
            pairs = [socket.socketpair() for _ in range(count)]
            for own, _ in pairs:
                failing.enter_context(own)
            with contextlib.ExitStack() as given:
                others = [given.enter_context(other).fileno() for _, other in pairs]
                with self._writing:
                    socket.send_fds(self.control, [FORK], others)
            episodes = [_Episode(own, name, _pid_of(own), self) for own, _ in pairs]
            failing.pop_all()
        return episodes

    def end(self, pids: Sequence[int]) -> None:
        """Has the processes of episodes killed; raises OSError if the worker has ended."""
        with self._writing:
            self.control.sendall(b"".join(KILL + PID.pack(pid) for pid in pids))

    def kill(self) -> None:
        super().kill()
        with self._writing:
            self.control.close()


def _pid_of(own: socket.socket) -> int:
    """What a process says first on its episode's socket."""
    own.settimeout(_CONTROL_S)
    data = own.recv(PID.size)
    if len(data) != PID.size:
        raise ConnectionResetError("the worker has ended")
    return PID.unpack(data)[0]
