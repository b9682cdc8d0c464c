"""Environments for tests: games, tools as TRL writes them, and ways for an environment to go wrong."""

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any


class GuessNumber:
    """Tells whether a guess is too low or too high; at most ``most`` guesses."""

    def __init__(self, most: int = 5) -> None:
        self.most, self.guesses = most, 0

    async def reset(self, answer: int, **row: Any) -> str:
        self.answer = answer
        return " Guess."

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.guesses += 1
        digits = "".join(c for c in message["content"] if c.isdecimal())[:9]
        if not digits:
            return [{"role": "user", "content": "a number, please"}], -0.1, False
        found, low = int(digits) == self.answer, int(digits) < self.answer
        words = "too low" if low else "too high"
        return [{"role": "user", "content": words}], float(found), found or self.guesses == self.most


class Modules:
    """What a worker has imported."""

    def reset(self, **row: Any) -> None: ...

    def imported(self, name: str) -> str:
        """Whether a module is imported.

        Args:
            name: of the module
        """
        return str(name in sys.modules)


class Shop:
    """A class for TRL's environment_factory."""

    def reset(self, **row: Any) -> str | None:
        self.basket: list[str] = []
        return None

    def add(self, item: str, count: int = 1) -> str:
        """Puts an item into the basket.

        Args:
            item: name of the item
            count: how many

        Returns:
            What is in the basket.
        """
        self.basket += [item] * count
        return ", ".join(self.basket)

    async def pay(self) -> dict[str, int]:
        """Pays the basket.

        Returns:
            The price.
        """
        return {"price": len(self.basket)}

    def get_reward(self) -> float:
        return float(len(self.basket))

    def close(self) -> None:
        self.basket = []


class Functions:
    """Rows and tools may have any names."""

    def reset(self, function: str, **row: Any) -> str:
        return f"Write {function}."

    def run(self, function: str) -> str:
        """Runs a function.

        Args:
            function: its name
        """
        return f"ran {function}"


class Strange:
    """Does what the policy says: hang, die, print, fork, raise."""

    def reset(self, **row: Any) -> None: ...

    def step(self, message: dict[str, Any]) -> Any:
        words = message["content"]
        if words == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
            while True:
                time.sleep(60)
        if words == "busy":
            (1 << 10_000_000_000) % 7  # in C, without the interpreter's lock being given
        if words == "die":
            os._exit(3)
        if words == "print":
            print("x" * 10_000_000)
            sys.stderr.write("y" * 10_000_000)
        if words == "long":
            return [{"role": "user", "content": "z" * 10_000_000}], 0.0, False
        if words == "raise":
            raise KeyError("no such door")
        if words == "exit":
            sys.exit("enough")
        if words == "nan":
            return [], float("nan"), False
        if words == "huge":
            return [], -1e31, False
        if words in ("parts", "data"):
            kind = {"type": "text"} if words == "parts" else {}
            return [{"role": "user", "content": [{**kind, "text": text} for text in ("a ", "b")]}], 0.0, False
        if words == "wrong":
            return "no tuple"
        if words == "says it is the assistant":
            return [{"role": "assistant", "content": "yes"}], 0.0, False
        if words == "leave a process":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return [{"role": "user", "content": str(child.pid)}], 0.0, False
        if words.startswith("wait"):
            time.sleep(float(words.removeprefix("wait") or 0.5))
        return [{"role": "user", "content": f"heard {words}"}], 0.5, False


class Dice:
    """Begins with a number that Python's own generator draws."""

    def reset(self, **row: Any) -> str:
        return f" {random.getrandbits(30)}"

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], 0.0, True


class NoReset:
    def step(self, message: dict[str, Any]) -> None: ...


class NoTools:
    def reset(self, **row: Any) -> None: ...


class NoHints:
    def reset(self, **row: Any) -> None: ...

    def look(self, where):
        return where


class Parrot:
    """Repeats what it hears, as words and not as messages. It does not begin where the row is silent."""

    def reset(self, silent: bool = False, **row: Any) -> None:
        if silent:
            raise RuntimeError("no voice")

    def step(self, message: dict[str, Any]) -> tuple[str, None, bool]:
        return message["content"], None, False


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: a number
        b: another
    """
    return a + b


def bare(a):
    return a


class Undescribed(Strange):
    tools = (add,)


class Gallery:
    """Shows what the policy asks for: pictures, or something that is none. Where a row asks, a picture begins."""

    def reset(self, first: bool = False, **row: Any) -> list[dict[str, Any]] | None:
        return [{"role": "user", "content": [{"type": "image", "image": painted(9)}]}] if first else None

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], None, bool]:
        asked = message["content"]
        shown = {"path": "a.png", "wide": painted(0).resize((20_000, 2)), "thin": painted(0).resize((1, 300))}
        image = {"type": "image", "image": shown[asked] if asked in shown else painted(len(asked))}
        more = [image] if asked == "two" else []
        words = {"type": "text", "text": "<|image_pad|>?" if asked == "spoken" else "?"}
        return [{"role": "tool" if asked == "tool" else "user", "content": [image, words, *more]}], None, False


def painted(number: int) -> Any:
    from PIL import Image

    return Image.frombytes(
        "RGB", (12 + number, 16), bytes(i * (number + 3) % 256 for i in range(3 * 16 * (12 + number)))
    )
