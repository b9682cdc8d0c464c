"""A reward server: each sample is one HTTP request, so a failure costs its own sample."""

import asyncio
import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlft_fast.errors import brief
from rlft_fast.rewards.judged import LanguageModelJudge
from rlft_fast.rewards.scoring import FAILED, Text, is_reward

_MOST_CONNECTIONS = 256
_LONGEST_ANSWER = 1 << 20  # bytes
_LONGEST_ERROR = 1 << 16  # bytes that are read of it
_SHOWN = 200  # characters of an error in a message
_FIRST_PAUSE_S = 0.2  # before the first retry; each further pause is twice as long
_LONGEST_PAUSE_S = 30.0  # 100 retries would otherwise take longer than any run
_NAMES = ("rewards", "reward", "scores", "score")


class _TransientError(Exception):
    """Asking again may help."""


class ServerReward:
    """A reward function that asks a server. It is called like a function, and is async.

    The request is a POST of JSON with lists of one element, as OpenRLHF's ``remote_rm_url`` gets them: ``query``, which
    is prompt and answer, ``prompts``, ``responses``, ``labels`` (the column answer, label or ground_truth), and all
    columns as ``columns``. With ``reward.conversational`` prompts and responses are messages, and there is no query.
    The answer is a number or null, alone, in a list, or in an object as rewards, reward, scores or score.

    Args:
        url: of the server.
        timeout_s: seconds for one request, its wait for a connection included.
        num_retries: further requests after a failed connection, a timeout, or a status 429 or 5xx.
        judge: asks a language model instead, as OpenAI's chat completions do.

    Raises:
        ValueError: aiohttp is not installed.
    """

    def __init__(self, url: str, timeout_s: float, num_retries: int, judge: LanguageModelJudge | None = None) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise ValueError("reward.server needs `pip install aiohttp`") from error
        from rlft_fast.config import REWARD_TOKEN_VARIABLE  # here: workers import this module, see `isolation`

        self._http = aiohttp
        # Read once: while a worker process is started, the environment lacks it.
        token = os.environ.get(REWARD_TOKEN_VARIABLE, "").strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url, self.timeout_s, self.num_retries, self.judge = url, timeout_s, num_retries, judge
        self._asking: dict[str, asyncio.Future[float | str | None]] = {}
        self.__qualname__ = f"the server {url}"

    async def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """B rewards, `FAILED` where the server gave none. A warning counts the failures and quotes the first."""
        session = self._http.ClientSession(
            timeout=self._http.ClientTimeout(total=self.timeout_s),
            connector=self._http.TCPConnector(limit=_MOST_CONNECTIONS),
            headers=self._headers,
        )
        async with session:
            answers = await asyncio.gather(
                *(
                    self._answer(session, prompt, completion, {name: values[i] for name, values in columns.items()})
                    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
                )
            )
        if failures := [answer for answer in answers if isinstance(answer, str)]:
            warnings.warn(
                f"{len(failures)} of {len(answers)} samples have no reward from {self.url}: {failures[0]}", stacklevel=2
            )
        return [FAILED if isinstance(answer, str) else answer for answer in answers]

    def check(self, prompt: Text, completion: Text, columns: Mapping[str, Any]) -> None:
        """Raises ValueError if no question to the judge can be made of a row with these columns."""
        if self.judge is not None:
            self.judge.body(prompt, completion, columns)

    async def _answer(
        self, session: Any, prompt: Text, completion: Text, columns: Mapping[str, Any]
    ) -> float | str | None:
        """A reward, or the reason why there is none."""
        if self.judge is None:
            return await self._reward(session, _body(prompt, completion, columns))
        try:
            body = self.judge.body(prompt, completion, columns)
        except ValueError as error:
            return brief(error)
        return await self._judged(self.judge, session, body)

    async def _judged(self, judge: LanguageModelJudge, session: Any, body: str) -> float | str | None:
        """As `_reward`, but a request that was answered, or is under way, is not sent again."""
        if (score := judge.known(body)) is not None:
            return score
        if (asking := self._asking.get(body)) is None:
            asking = self._asking[body] = asyncio.ensure_future(self._reward(session, body))
            asking.add_done_callback(lambda _: self._asking.pop(body))
        score = await asking
        if isinstance(score, float):
            judge.keep(body, score)
        return score

    async def _reward(self, session: Any, body: str) -> float | str | None:
        """A reward, or the reason why there is none."""
        read = _read if self.judge is None else self.judge.read
        pause = _FIRST_PAUSE_S
        for left in reversed(range(self.num_retries + 1)):
            try:
                return read(await self._ask(session, body))
            except ValueError as error:
                return brief(error)
            except (_TransientError, TimeoutError, self._http.ClientError) as error:
                if not left:
                    late = isinstance(error, TimeoutError)
                    return f"no answer within {self.timeout_s:g} s" if late else brief(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise AssertionError

    async def _ask(self, session: Any, body: str) -> bytes:
        headers = {"Content-Type": "application/json"}
        async with session.post(self.url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                content = bytearray()
                with contextlib.suppress(TimeoutError, self._http.ClientError):  # the status is known
                    await _read_into(content, response, _LONGEST_ERROR)
                is_transient = response.status == 429 or response.status >= 500
                kind = _TransientError if is_transient else ValueError
                raise kind(f"it answers with status {response.status}{_reason(bytes(content))}")
            content = bytearray()
            await _read_into(content, response, _LONGEST_ANSWER)
            if len(content) > _LONGEST_ANSWER:
                raise ValueError(f"its answer has more than {_LONGEST_ANSWER} bytes")
            return bytes(content)


async def _read_into(content: bytearray, response: Any, most: int) -> None:
    """Reads an answer, or at least `most` + 1 bytes of it."""
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > most:
            return


def _reason(content: bytes) -> str:
    """What a server says of an error: the ``error.message`` of OpenAI's and its like, or how its answer begins."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        said = error if isinstance(error, str) else error["message"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        said = None
    said = said if isinstance(said, str) else text
    return f": {brief(repr(said), _SHOWN)}" if said.strip() else ""


def _body(prompt: Text, completion: Text, columns: Mapping[str, Any]) -> str:
    label = next((columns[name] for name in ("answer", "label", "ground_truth") if name in columns), None)
    asked: dict[str, Any] = {"prompts": [prompt], "responses": [completion], "labels": [label], "columns": columns}
    if isinstance(prompt, str) and isinstance(completion, str):
        asked["query"] = [prompt + completion]
    return json.dumps(asked, default=str)


def _read(content: bytes) -> float | None:
    """The reward in an answer. Raises ValueError where there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its answer is not JSON: {content[:80]!r}") from error
    for _ in range(3):  # a list of an object with a list
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        elif isinstance(found, dict) and (names := [name for name in _NAMES if name in found]):
            found = found[names[0]]
    if found is None:
        return None
    if isinstance(found, bool) or not is_reward(found):
        raise ValueError(f"its answer is no reward: {content[:80]!r}")
    return float(found)
