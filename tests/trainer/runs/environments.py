"""Environments of the runs whose policy talks. Each has a process that imports this file, and little beside."""

import os
import random
import signal
from typing import Any


class Letters:
    """Rewards each reply by its share of even bytes, and answers with a letter; three replies."""

    def reset(self, seed: int, **row: Any) -> str:
        self.draw, self.turns = random.Random(seed), 0
        return " Go."

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.turns += 1
        said = message["content"].encode()
        answer = {"role": "user", "content": self.draw.choice("xyz")}
        return [answer], sum(byte % 2 == 0 for byte in said) / max(len(said), 1) / 3, self.turns == 3


class Mortal(Letters):
    """`Letters`, whose process is killed in the second turn of the episodes of the first row."""

    def reset(self, seed: int, **row: Any) -> str:
        self.is_first = seed == 0
        return super().reset(seed, **row)

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        if self.is_first and self.turns == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(message)


class Lottery:
    """Draws a number, and ends with the first reply."""

    def reset(self, **row: Any) -> str:
        return f" {random.getrandbits(30)}"

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], 0.0, True


class Echo:
    """Takes the columns of its own rows alone, and answers with their letter."""

    def reset(self, prompt: list[dict[str, Any]], first: str, environment: str) -> None:
        assert environment == "echo"
        self.first = first

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [{"role": "user", "content": self.first}], 0.125, False


class Pictures:
    """Shows a picture after each of the first replies, another one for each row; three replies."""

    def reset(self, first: int, **row: Any) -> None:
        self.first, self.turns = first, 0

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        from PIL import Image

        self.turns += 1
        number = 10 * self.first + self.turns
        shown = Image.frombytes("RGB", (8, 12), bytes(i * (number + 3) % 256 for i in range(288)))
        content = [{"type": "image", "image": shown}, {"type": "text", "text": "?"}]
        said = message["content"].encode()
        share = sum(byte % 2 == 0 for byte in said) / max(len(said), 1) / 3
        return [{"role": "user", "content": content}], share, self.turns == 3
