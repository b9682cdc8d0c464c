"""A language model as a judge, behind a server with OpenAI's chat completions."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rlft_fast.errors import brief
from rlft_fast.foreign import LARGEST_REWARD
from rlft_fast.rewards.scoring import Text, is_reward
from rlft_fast.templates import compile_template

_MOST_KEPT = 65_536  # scores


class LanguageModelJudge:
    """Asks for the score of a completion, and reads the score in the answer. Equal questions are asked once.

    Args:
        model: name of the model on the server.
        prompt: Jinja template of the question, which reads ``prompt``, ``completion`` and the row's columns.
        score: pattern whose group is the score; the last match in the answer counts.
        max_tokens: most tokens of the answer.

    Raises:
        ValueError: the template or the pattern cannot be used.
    """

    def __init__(self, model: str, prompt: str, score: str, max_tokens: int) -> None:
        self._render = compile_template(prompt, "reward.server.judge.prompt")
        try:
            self._score = re.compile(score)
        except re.error as error:
            raise ValueError(f"reward.server.judge.score is no pattern: {error}") from error
        if self._score.groups != 1:
            raise ValueError(f"reward.server.judge.score has {self._score.groups} groups, expected one: the score")
        self._options = {"model": model, "temperature": 0, "max_tokens": max_tokens}
        self._kept: dict[str, float] = {}

    def body(self, prompt: Text, completion: Text, columns: Mapping[str, Any]) -> str:
        """The request, as JSON.

        Raises:
            ValueError: the template cannot be applied.
        """
        try:
            question = self._render({**columns, "prompt": prompt, "completion": completion})
        except Exception as error:  # filters raise any error
            raise ValueError(f"reward.server.judge.prompt cannot be applied: {brief(error)}") from error
        return json.dumps({**self._options, "messages": [{"role": "user", "content": question}]})

    def read(self, content: bytes) -> float:
        """The score in the server's answer.

        Raises:
            ValueError: there is none.
        """
        try:
            choice = json.loads(content)["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its answer is no chat completion: {content[:80]!r}") from error
        text = text if isinstance(text, str) else ""
        if reason == "length" and not self._score.fullmatch(text.strip()):  # a number among the reasons is no score
            raise ValueError(
                f"its answer is cut off at reward.server.judge.max_tokens={self._options['max_tokens']}, before the "
                "score: raise it, or ask for a shorter answer"
            )
        try:
            score = float(self._score.findall(text)[-1])
        except (IndexError, ValueError) as error:
            raise ValueError(f"its answer names no score: {text[-80:]!r}") from error
        if not is_reward(score):
            raise ValueError(f"its score is {score:g}, expected a number of at most {LARGEST_REWARD:g} in size")
        return score

    def known(self, body: str) -> float | None:
        """The score of a request that was answered before."""
        return self._kept.get(body)

    def keep(self, body: str, score: float) -> None:
        """Keeps the score of a request; the oldest goes if there are too many."""
        self._kept[body] = score
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
