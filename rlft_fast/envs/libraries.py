"""Environments of other libraries, by the names that their libraries give them: ``gymnasium:ID`` and its like."""

import importlib
import json
from types import ModuleType
from typing import Any, ClassVar

from rlft_fast.envs.doors import Message, opening_words
from rlft_fast.envs.openenv import OpenEnv
from rlft_fast.envs.verl_tools import VerlTools

_Step = tuple[list[Message], float | None, bool]


class Gymnasium:
    """An environment of Gymnasium whose observations and actions are texts.

    ``reset`` gets the column ``seed`` of a row, and the other columns as ``options``. An action that is not in the
    action space costs a turn, and the policy reads what is expected.
    """

    name: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        gymnasium = _import("gymnasium", self.name)
        self.env = gymnasium.make(self.name, disable_env_checker=True, **options)
        for kind in ("observation", "action"):
            space = getattr(self.env, f"{kind}_space")
            if not isinstance(space, gymnasium.spaces.Text):
                raise ValueError(
                    f"gymnasium:{self.name} has the {kind} space {space}, but a policy reads and writes text: wrap the "
                    "environment so that both spaces are gymnasium.spaces.Text"
                )

    def reset(self, seed: int, prompt: Any = None, **row: Any) -> str | None:
        observation, _ = self.env.reset(seed=int(seed), options=row)
        return opening_words(observation, prompt)

    def step(self, message: Message) -> _Step:
        action = message["content"]
        if not self.env.action_space.contains(action):
            return _says(f"This is no action: expected {self.env.action_space}."), None, False
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return _says(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self.env.close()


class TextArena:
    """A game of TextArena for one player. ``reset`` gets the column ``seed`` of a row."""

    name: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        # The other variants repeat the whole game in each observation, which the policy has read already.
        name = self.name if self.name.endswith("-raw") else f"{self.name}-raw"
        self.env = _import("textarena", self.name).make(name, **options)
        try:
            self.env.reset(num_players=1, seed=0)
        except Exception as error:
            raise ValueError(f"textarena:{self.name} is no game for one player: {error}") from error

    def reset(self, seed: int, prompt: Any = None, **row: Any) -> str | None:
        self.env.reset(num_players=1, seed=int(seed))
        return opening_words(self._seen(), prompt)

    def step(self, message: Message) -> _Step:
        done, _ = self.env.step(message["content"])
        if not done:
            return _says(self._seen()), None, False
        rewards, _ = self.env.close()
        return [], float((rewards or {}).get(0, 0.0)), True

    def _seen(self) -> str:
        _, observation = self.env.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(text for sender, text, *_ in observation if sender != 0)  # 0: the policy itself


class ReasoningGym:
    """A problem of a reasoning-gym task, which one reply answers. ``reset`` gets the column ``seed`` of a row.

    The answer is the text within the last ``<answer>…</answer>``, or the whole reply. An answer that the task cannot
    read has the reward 0.
    """

    name: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        self.library, self.options = _import("reasoning_gym", self.name), options
        self._make(0)

    def reset(self, seed: int, prompt: Any = None, **row: Any) -> str | None:
        self.task = self._make(int(seed))
        self.entry = self.task[0]
        return opening_words(self.entry["question"], prompt)

    def step(self, message: Message) -> _Step:
        before, closed, _ = message["content"].rpartition("</answer>")
        answer = before.rpartition("<answer>")[2] if closed else message["content"]
        return [], self._score(answer.strip()), True

    def _score(self, answer: str) -> float:
        try:
            return float(self.task.score_answer(answer, self.entry))
        except Exception:
            self.task.score_answer(self.entry["answer"], self.entry)  # raises where the entry is at fault
            return 0.0

    def _make(self, seed: int) -> Any:
        return self.library.create_dataset(self.name, size=1, seed=seed, **self.options)


LIBRARIES: dict[str, type] = {
    "gymnasium": Gymnasium, "textarena": TextArena, "reasoning_gym": ReasoningGym, "openenv": OpenEnv,
    "verl": VerlTools,
}  # fmt: skip
"""Classes of environments by the word before the colon of a name. A subclass has the rest as its ``name``."""


def find_library(spec: str) -> type | None:
    """The class of environments that a name such as ``gymnasium:ID`` means; None: it is no name of a library's."""
    library, _, name = spec.partition(":")
    found = LIBRARIES.get(library)
    return type(found.__name__, (found,), {"name": name}) if found and name else None


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{module}:{name} needs {error.name}, which is not installed: pip install {module}") from error


def _says(observation: Any) -> list[Message]:
    words = observation if isinstance(observation, str) else json.dumps(observation, default=str)
    return [{"role": "user", "content": words}] if words else []
