"""Environments as their authors write them, each behind one interface: `Environment`, or TRL's classes with tools."""

import asyncio
import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from rlft_fast.errors import brief

Message = dict[str, Any]
"""A role, with a content, or with calls of tools as transformers' chat templates take them."""


class Reply(NamedTuple):
    """What an environment answers to a message of the policy's."""

    messages: Sequence[Message]
    """For the policy, such as ``{"role": "user", "content": "too low"}``."""
    reward: float | None = None
    """Of this turn; None counts as 0. The reward of an episode is the sum over its turns."""
    done: bool = False
    """Whether the episode has ended. The policy then does not see the messages."""


class Environment(Protocol):
    """One episode. A class needs ``reset`` and ``step``; its methods may be async.

    The class is called with the configuration's ``environment.options``, once per episode.

    Attributes:
        tools: JSON schemas of the tools that the policy may call, as transformers' `get_json_schema` makes them. A
            class without the attribute has none.
    """

    def reset(self, **row: Any) -> str | Sequence[Message] | None:
        """Begins an episode.

        Args:
            row: the columns of the row that the episode is about, the prompt included.

        Returns:
            Words that are added to the prompt's last message, messages that follow it, or None.
        """
        ...

    def step(self, message: Message) -> Reply | tuple[Sequence[Message], float | None, bool]:
        """Answers the policy.

        Args:
            message: the policy's, with ``role``, ``content``, and ``tool_calls`` where it calls tools.
        """
        ...

    def close(self) -> None:
        """Ends the episode. Optional."""
        ...


class Door(Protocol):
    """An environment as the worker process calls it."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]: ...

    def step(self, message: Message) -> Reply: ...

    def end(self) -> float | None:
        """Ends the episode; returns a reward for the whole of it, where the environment gives one."""
        ...


class Doors(NamedTuple):
    """A class of environments."""

    open: Callable[[], Door]
    """Makes the environment of an episode."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the policy may call."""


def find_doors(spec: str, kind: Any, options: Mapping[str, Any], columns: Sequence[str]) -> Doors:
    """How a class of environments is used.

    Args:
        spec: name of the class, for messages.
        kind: the class.
        options: its arguments.
        columns: names of the columns that ``reset`` gets.

    Raises:
        ValueError: the class cannot be called with these arguments, or has no ``reset`` that takes these columns, or
            neither ``step`` nor a public method with hints and a docstring.
    """
    name = getattr(kind, "__qualname__", repr(kind))
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(f"the environment {name} has no method reset: see docs/environments.md for the two kinds")
    described = None if callable(getattr(kind, "step", None)) else _tools_of(kind)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ValueError(f"{spec} cannot be called with environment.options {dict(options)}: {error}") from None
    try:
        inspect.signature(kind.reset).bind(None, **dict.fromkeys(columns))
    except TypeError as error:
        raise ValueError(f"reset of {spec} cannot be called with the columns {columns} of a row: {error}") from None
    if described is not None:
        return Doors(lambda: ToolDoor(_made(kind, options, _run), _names(described)), described)
    tools = getattr(kind, "tools", None)
    if not isinstance(tools, (list, tuple)):  # its instances may have them
        tools = getattr(_made(kind, options, asyncio.run), "tools", None) or ()  # episodes have another loop
    if wrong := [tool for tool in tools if not isinstance(tool, Mapping)]:
        raise ValueError(
            f"tools of {spec} are JSON schemas, as transformers' get_json_schema makes them of functions, got "
            f"{brief(repr(wrong[0]), _SHOWN)}"
        )
    return Doors(lambda: MessageDoor(_made(kind, options, _run)), [*tools])


def find_tools(functions: Mapping[str, Callable[..., Any]]) -> Doors:
    """How functions are used as tools, which the policy may call.

    Args:
        functions: by the names that messages have.

    Raises:
        ValueError: two functions have the same name, or one has no hints or no docstring.
    """
    described = [_described(spec, function) for spec, function in functions.items()]
    own = dict(zip((tool["function"]["name"] for tool in described), functions.values(), strict=True))
    if len(own) < len(functions):
        raise ValueError(f"two of the tools {', '.join(functions)} have the same name: rename one of them")
    return Doors(lambda: ToolDoor(SimpleNamespace(reset=lambda **row: None, **own), _names(described)), described)


def _made(kind: Any, options: Mapping[str, Any], run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Any:
    """An environment. A client that an async one makes of itself may need the event loop.

    Args:
        kind: of the environment.
        options: its arguments.
        run: runs a coroutine.
    """

    async def inside() -> Any:
        return kind(**options)

    is_async = any(map(inspect.iscoroutinefunction, (kind.reset, getattr(kind, "step", None))))
    return run(inside()) if is_async else kind(**options)


def _names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


class _OwnDoor:
    def __init__(self, own: Any) -> None:
        self.own = own

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        return _messages(_called(self.own.reset, **row))

    def end(self) -> float | None:
        if callable(close := getattr(self.own, "close", None)):
            _called(close)
        return None


class MessageDoor(_OwnDoor):
    """An environment with ``reset`` and ``step``."""

    def step(self, message: Message) -> Reply:
        answer = _called(self.own.step, message)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise TypeError(f"step returned {brief(repr(answer), _SHOWN)}, expected (messages, reward, done)")
        messages, reward, done = answer
        return Reply(_messages(messages), reward, bool(done))


class ToolDoor(_OwnDoor):
    """A class of TRL's ``environment_factory``: public methods are tools, and a reply without a call is the last one.

    Its methods are used as TRL 1.16 does, but ``close`` is no tool, and is called at the end of an episode.

    Args:
        own: the environment.
        names: of its tools.
    """

    def __init__(self, own: Any, names: Set[str]) -> None:
        super().__init__(own)
        self._names = names

    def step(self, message: Message) -> Reply:
        calls = message.get("tool_calls") or []
        results = [self._result(call["function"]) for call in calls]
        return Reply(results, None, not calls)

    def _result(self, call: Mapping[str, Any]) -> Message:
        name = call["name"]
        return {"role": "tool", "name": name, "content": self._content(name, call["arguments"])}

    def _content(self, name: str, arguments: Mapping[str, Any]) -> str | list[Any]:
        if name not in self._names:
            return _error(f"there is no tool {name!r}, only {', '.join(sorted(self._names))}")
        try:
            result = _called(getattr(self.own, name), **arguments)
        except Exception as error:  # the policy reads it, and may try again
            return _error(f"{type(error).__name__}: {error}")
        return result if isinstance(result, str) or are_parts(result) else json.dumps(result, default=str)

    def end(self) -> float | None:
        reward = _called(self.own.get_reward) if callable(getattr(self.own, "get_reward", None)) else None
        super().end()
        return reward


_NO_TOOLS = ("reset", "get_reward", "close")
_SHOWN = 200  # characters of a value in a message


def _tools_of(kind: Any) -> list[dict[str, Any]]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    names = [name for name, _ in methods if not name.startswith("_") and name not in _NO_TOOLS]
    if not names:
        raise ValueError(
            f"the environment {kind.__qualname__} has neither a method step nor a public method that the policy can "
            "call as a tool"
        )
    return [_described(f"{kind.__qualname__}.{name}", _without_self(kind, name)) for name in names]


def _described(shown: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        with _torch_if_imported():
            return get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"the tool {shown} cannot be described to the policy ({error}): give every argument a type hint, and a "
            "line in the docstring's section Args"
        ) from error


@contextlib.contextmanager
def _torch_if_imported() -> Iterator[None]:
    """transformers imports torch to know hints of tensors. A function with such a hint has imported torch.

    The import takes 2 s, and 180 MB of every worker.
    """
    from transformers.utils import chat_template_utils as utils

    is_available = utils.is_torch_available
    utils.is_torch_available = lambda: "torch" in sys.modules
    try:
        yield
    finally:
        utils.is_torch_available = is_available


def _without_self(kind: Any, name: str) -> Callable[..., Any]:
    """A method with the arguments of a call; a static one has no other."""
    method = getattr(kind, name)
    if isinstance(inspect.getattr_static(kind, name), staticmethod):
        return method

    def tool() -> None: ...

    tool.__name__, tool.__doc__ = method.__name__, method.__doc__
    signature = inspect.signature(method)
    parameters = [*signature.parameters.values()][1:]
    tool.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    tool.__annotations__ = inspect.get_annotations(method, eval_str=True)
    return tool


def _called(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """What a function returns, or what comes of it where it is async.

    Another function runs outside of an event loop: it may run one itself, or refuse to be in one.
    """
    result = function(*args, **named)
    return _run(result) if inspect.isawaitable(result) else result


def _run(result: Awaitable[Any]) -> Any:
    return _loop().run_until_complete(result)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of the episode's process, so that a client lives from one call to the next."""
    return asyncio.new_event_loop()


def _messages(value: Any) -> list[Message]:
    """Messages; a text is words for the end of the last message, written as a message without a role."""
    if value is None or value == "":
        return []
    if isinstance(value, str) or are_parts(value):  # TRL takes parts for the end of the prompt, too
        return [{"content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(message, dict) for message in value):
        raise TypeError(
            f"got {brief(repr(value), _SHOWN)}, expected messages such as {{'role': 'user', 'content': '...'}}"
        )
    return [*value]


def are_parts(value: Any) -> bool:
    """Whether a value is a content of parts, as a message may have it: texts alone, or images with anything."""
    parts = value if isinstance(value, list) else []
    return bool(parts) and (any(map(is_image, parts)) or all(map(_is_text, parts)))


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def opening_words(observation: Any, prompt: Any) -> str | None:
    """What ``reset`` returns for the first observation: words at the end of the prompt, which any template takes."""
    if observation is None or observation == "":
        return None
    words = observation if isinstance(observation, str) else json.dumps(observation, default=str)
    is_empty = not prompt or prompt[-1].get("content") == ""
    return words if is_empty else f"\n\n{words}"


def _error(text: str) -> str:
    return json.dumps({"error": text})
