"""What answers the policy, turn by turn."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlft_fast.config.base import Section, rule
from rlft_fast.config.paths import FunctionName
from rlft_fast.config.resume import MayChange


class EnvironmentConfig(Section):
    """An environment, which answers the policy's messages until an episode ends."""

    name: FunctionName | None = None
    """module:Class or file.py:Class, with reset and step, or with tools as TRL's environment_factory takes it; or
    gymnasium:ID, textarena:ID, reasoning_gym:TASK, openenv:URL, verl:FILE.yaml."""
    tools: tuple[FunctionName, ...] = ()
    """Functions that the policy may call, each module:function or file.py:function, instead of a class."""
    options: dict[str, Any] = Field(default={})
    """Arguments of the class."""
    max_turns: PositiveInt = 8
    """Most messages of the policy in an episode."""
    history: Literal["keep", "template"] = "keep"
    """Thoughts of earlier messages: keep shows the policy all that it has written; template leaves out what the chat
    template leaves out."""
    timeout_s: MayChange[Annotated[PositiveFloat, Field(le=31_536_000)]] = 60.0
    """Seconds for one call of the environment. An episode over time or crashed is left out."""
    max_result_characters: PositiveInt = 4000
    """Most characters of a message of the environment's; the rest is left out."""

    @rule
    def _one_source(self) -> Iterator[str]:
        if (self.name is None) == (not self.tools):
            yield "give either name (a class) or tools (functions), not both"
        if self.tools and self.options:
            yield "options are arguments of the class that name gives: leave them out"
