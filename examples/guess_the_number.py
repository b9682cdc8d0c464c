"""A game as an environment: the policy guesses a number, and hears whether a guess is too low or too high.

    python examples/guess_the_number.py > numbers.jsonl    # makes the rows

A run plays it with these keys, and a chat model as ``model``:

    data: {path: numbers.jsonl, chat: true}
    environment: {name: examples/guess_the_number.py:GuessTheNumber}
    rollout: {max_new_tokens: 128}
"""

import json
import re
from typing import Any


class GuessTheNumber:
    def reset(self, number: int, **row: Any) -> None:
        self.number, self.guesses = number, 0

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        self.guesses += 1
        guess = re.search(r"\d{1,9}", message["content"])
        if guess is None:
            return [{"role": "user", "content": "Please say a number."}], 0.0, self.guesses == 5
        found = int(guess[0]) == self.number
        answer = "Too low." if int(guess[0]) < self.number else "Too high."
        return [{"role": "user", "content": answer}], float(found), found or self.guesses == 5


if __name__ == "__main__":
    for number in range(1, 21):
        print(json.dumps({"prompt": "Guess my number, from 1 to 20.", "number": number}))
