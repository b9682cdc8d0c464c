"""The worker process of environments: it loads the class once, and forks a process for each episode.

A process of its own is what an environment can hang or end without harm to another episode. A fork shares the memory
of imports, and takes milliseconds.
"""

import base64
import contextlib
import gc
import io
import json
import os
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

from rlft_fast.envs.doors import Door, Doors, Message, are_parts, find_doors, find_tools, is_image
from rlft_fast.envs.libraries import find_library
from rlft_fast.isolation import outlive_requests_to_stop
from rlft_fast.plugins import load_function

FORK, KILL = b"f", b"k"
"""What the trainer asks the worker for: forks, with the episodes' sockets, or a kill, which a process id follows."""
MOST_FORKS = 64
"""Forks that are asked for at once; Linux takes 253 files with a message."""
PID = struct.Struct("!q")
"""Of a process of an episode, which says its own first."""


def serve(
    spec: str | list[str], options: Mapping[str, Any], columns: list[str], most_characters: int, control: Connection
) -> None:
    """Main loop of the worker.

    Of the environment's code it runs the import of its module, and the constructor where a class with ``step`` has no
    list ``tools``.

    Args:
        spec: module:Class, file.py:Class or a name of `find_library`; or functions that are tools.
        options: arguments of the class.
        columns: names of the columns of a row.
        most_characters: of a message's content; the rest is left out.
        control: to the trainer.
    """
    os.setsid()  # the terminal's signals do not reach it
    outlive_requests_to_stop()
    try:
        doors = _find(spec, options, columns)
    except BaseException as error:  # the module's code may also raise SystemExit
        control.send_bytes(json.dumps({"failure": f"{type(error).__name__}: {error}"[:2000]}).encode())
        return
    control.send_bytes(json.dumps({"tools": doors.tools}).encode())
    gc.freeze()  # a collection in an episode's process would copy the memory that it shares
    ending: list[int] = []  # killed, and not yet known to have ended
    with socket.socket(fileno=os.dup(control.fileno())) as asked:
        control.close()
        while True:
            what, files, _, _ = socket.recv_fds(asked, len(FORK), MOST_FORKS)
            if not what:
                return
            if what == KILL:
                ending += PID.unpack(asked.recv(PID.size, socket.MSG_WAITALL))
                _kill(ending[-1])
            while files:
                if os.fork() == 0:
                    asked.close()
                    for other in files[:-1]:  # another episode's, whose end the trainer has to see
                        os.close(other)
                    _run(files[-1], doors.open, most_characters)
                os.close(files.pop())
            ending = [pid for pid in ending if not _has_ended(pid)]


def _find(spec: str | list[str], options: Mapping[str, Any], columns: list[str]) -> Doors:
    if isinstance(spec, list):
        return find_tools({name: load_function("tool", name) for name in spec})
    return find_doors(spec, find_library(spec) or load_function("environment", spec), options, columns)


def _kill(pid: int) -> None:
    """Ends an episode's process and its group. `_has_ended` was not asked yet, so the id is not another process's."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    """Frees the id of a process that has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _run(file: int, open_door: Callable[[], Door], most_characters: int) -> NoReturn:
    """Main loop of an episode's process: a line of JSON in, a line of JSON out."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # 64 episodes print at once, and a million lines of one would fill a disk
        os.dup2(null, stream)
    os.write(file, PID.pack(os.getpid()))
    pid = os.getpid()
    own: list[Door] = []
    with os.fdopen(file, "rb", closefd=False) as lines:
        for line in lines:
            answer = _answer(json.loads(line), open_door, own, most_characters)
            if os.getpid() != pid:  # the environment forked: the answer would be read as the next message's
                break
            data = json.dumps(answer).encode() + b"\n"
            while data:
                data = data[os.write(file, data) :]
    os._exit(0)


_SEEDED = {"numpy.random": "seed", "torch": "manual_seed"}
"""Modules with a random state, and the function that begins it."""


def _seed(seed: int) -> None:
    """Begins the random states of Python, NumPy and torch.

    Those of the worker never change: all episodes of a run would draw the same numbers. States of an episode that
    nothing decides would make a run that nobody can repeat.
    """
    random.seed(seed)
    for name in _SEEDED.keys() & sys.modules.keys():
        _seed_module(sys.modules[name], seed)
    sys.meta_path.insert(0, _SeededImports(seed))


def _seed_module(module: ModuleType, seed: int) -> None:
    getattr(module, _SEEDED[module.__name__])(seed % 2**32)  # NumPy takes 32 bits


class _SeededImports(MetaPathFinder):
    """Seeds a module that an episode imports: ``import numpy`` does not import numpy.random, the first draw does."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _SEEDED else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_seed(module: ModuleType) -> None:
                execute(module)
                _seed_module(module, self.seed)

            spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec


def _answer(
    asked: dict[str, Any], open_door: Callable[[], Door], own: list[Door], most_characters: int
) -> dict[str, Any]:
    try:
        if "row" in asked:
            _seed(asked["seed"])
            own.append(open_door())
            return {"messages": _cut(own[0].reset(asked["row"]), most_characters)}
        if "message" in asked:
            reply = own[0].step(asked["message"])
            reward = None if reply.reward is None else float(reply.reward)
            return {"messages": _cut(reply.messages, most_characters), "reward": reward, "done": reply.done}
        reward = own[0].end()
        return {"reward": None if reward is None else float(reward)}
    except BaseException as error:
        return {"failure": f"it raised {type(error).__name__}: {error}"[:1000]}


def _cut(messages: Any, most: int) -> list[Message]:
    """The messages with texts of at most so many characters: a tokenizer takes minutes for megabytes.

    Images become files in base64.
    """

    def cut(content: Any) -> Any:
        if are_parts(content):
            if any(map(is_image, content)):
                return [_sent(part) if is_image(part) else _text(cut(_words(part))) for part in content]
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            content = json.dumps(content, default=str)
        return content if len(content) <= most else f"{content[:most]}… ({len(content) - most} characters left out)"

    return [message | {"content": cut(message["content"])} if "content" in message else message for message in messages]


def _text(words: str) -> Message:
    return {"type": "text", "text": words}


def _words(part: Any) -> Any:
    """The text of a part of a content that has images, too."""
    return part["text"] if isinstance(part, Mapping) and "text" in part else part


def _sent(part: Mapping[str, Any]) -> Message:
    """An image as the trainer takes it: as a file in base64, or with what is wrong with it."""
    image: Any = part.get("image")
    try:
        from PIL import ImageOps

        file = io.BytesIO()
        ImageOps.exif_transpose(image).convert("RGB").save(file, "PNG", compress_level=1)
    except Exception as error:  # Pillow may raise any error, and another object has none of its methods
        return {"type": "image", "mistake": f"{type(error).__name__}: {error} (expected an image of Pillow)"[:500]}
    return {"type": "image", "image": base64.b64encode(file.getvalue()).decode()}
