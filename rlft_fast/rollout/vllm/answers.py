"""What vLLM servers answer. An answer comes from outside: nothing of it is used before it is checked here.

pydantic checks types, ranges and finiteness; `read_part` checks what an answer must have in common with its request.
Fields that are not used here may hold anything.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlft_fast.rollout.types import Span
from rlft_fast.rollout.vllm.scheduling import ServerError

MAX_ANSWER_BYTES = 2**26  # the checksums of 500,000 weights
CUT_OFF = -9999.0  # a server's word for a log-probability of -inf, or nan
_MAX_TOKEN_BYTES = 512  # of one log-probability in an event, which has about 80
_MAX_SHARE = 1.001  # of probabilities together, after rounding to float32
_MAX_WORKERS = 1024
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 2, 2, 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class AnswerError(ServerError):
    """A server answers something else than what it was asked for."""


class Answer(BaseModel):
    """What has to be in the JSON of an answer, or of a header of weights."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


A = TypeVar("A", bound=Answer)
_Name = Annotated[str, Field(min_length=1, max_length=10_000)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Outcome(Answer):
    """Whether a route did what it was asked for."""

    success: bool = True


class _Model(Answer):
    id: _Name


class Models(Answer):
    """The models of a server."""

    data: Annotated[list[_Model], Field(min_length=1)]


class Facts(Answer):
    """See `rlft_fast.rollout.vllm.worker.WorkerExtension.facts`."""

    identity: _Name
    model: dict[str, Any]
    max_model_len: int
    logprobs_mode: str
    max_logprobs: int
    backend: str | None
    dtype: str
    has_tokenizer: bool


class WorkersFacts(Answer):
    """The facts of each worker of a server."""

    results: Annotated[list[Facts], Field(min_length=1, max_length=_MAX_WORKERS)]


class WorkersChecksums(Answer):
    """For each worker of a server the checksums of the weights by name."""

    results: Annotated[list[dict[str, str]], Field(min_length=1, max_length=_MAX_WORKERS)]


class WeightInfo(Answer):
    """The name of a server's weights."""

    weight_version: str | None


def read_answer(kind: type[A], content: bytes) -> A:
    """The checked content of an answer.

    Args:
        kind: what the answer has to be.
        content: JSON.

    Raises:
        AnswerError: the content is anything else.
    """
    if len(content) >= MAX_ANSWER_BYTES:
        raise AnswerError(f"{MAX_ANSWER_BYTES} bytes or more")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise AnswerError(
            f"{f'{place}: ' if place else ''}{problem['msg']}, got {_SHORT.repr(problem['input'])}"
        ) from None


# ---- samples --------------------------------------------------------------------------------------------------------


class _Likely(Answer):
    token_id: _TokenId
    logprob: float


class _Token(_Likely):
    top_logprobs: list[_Likely] = []


class _Logprobs(Answer):
    content: list[_Token] | None = None


class _Span(Answer):
    version: str
    start: int
    end: int


class _Choice(Answer):
    index: Literal[0]
    token_ids: list[_TokenId]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(Answer):
    error: Any = None
    choices: Annotated[list[_Choice], Field(max_length=1)] | None = None


@dataclass(frozen=True)
class Asked:
    """What a sample's answer has to fit.

    Args:
        max_tokens: most tokens of the answer.
        vocab_size: of the model.
        num_logprobs: likeliest tokens that were asked for with each token; 0: none.
        versions: of the weights that were sent, by their names.
        oldest: version of the weights that have to sample, or newer ones.
    """

    max_tokens: int
    vocab_size: int
    num_logprobs: int
    versions: Mapping[str, int]
    oldest: int

    @property
    def max_event_bytes(self) -> int:
        """Most bytes of one event of an honest answer."""
        return 2**16 + self.max_tokens * (self.num_logprobs + 2) * _MAX_TOKEN_BYTES


class Part(NamedTuple):
    """The next tokens of a sample."""

    likely: list[list[tuple[int, float]]]
    """For each token its id and log-probability, then those of the likeliest tokens where they were asked for."""
    finish_reason: Literal["stop", "length"] | None
    spans: tuple[Span, ...] = ()
    """Versions of the weights of all tokens of the answer, with its last part."""


def read_part(data: bytes, asked: Asked, num_before: int) -> Part:
    """One event of a sample's answer.

    Args:
        data: JSON.
        asked: what the answer has to fit.
        num_before: tokens of the answer's parts before.

    Raises:
        AnswerError: the event is no part of an answer to what was asked.
        ServerError: the server reports an error, or has given up the sample.
    """
    event = read_answer(_Event, data)
    if event.error is not None:
        raise ServerError(str(event.error)[:500])
    if event.choices is None:
        raise AnswerError("an event has no choices")
    if not event.choices:
        return Part([], None)
    (choice,) = event.choices
    if choice.finish_reason not in (None, "stop", "length"):
        raise ServerError(f"it gave up a sample: {choice.finish_reason[:100]}")
    num_tokens = num_before + len(choice.token_ids)
    if num_tokens > asked.max_tokens:
        raise AnswerError(f"{num_tokens} tokens, and at most {asked.max_tokens} were asked for")
    if num_tokens == asked.max_tokens and choice.finish_reason is None:
        raise AnswerError(f"no end with the last of {asked.max_tokens} tokens")
    likely = _likely(choice, asked)
    return Part(likely, choice.finish_reason, () if choice.finish_reason is None else _spans(choice, num_tokens, asked))


def _likely(choice: _Choice, asked: Asked) -> list[list[tuple[int, float]]]:
    content = [] if choice.logprobs is None else choice.logprobs.content or []
    if len(content) != len(choice.token_ids):
        raise AnswerError(f"{len(content)} log-probabilities of {len(choice.token_ids)} tokens")
    return [_row(token_id, token, asked) for token_id, token in zip(choice.token_ids, content, strict=True)]


def _row(token_id: int, token: _Token, asked: Asked) -> list[tuple[int, float]]:
    if token.token_id != token_id:
        raise AnswerError(f"the log-probability of token {token.token_id} came with token {token_id}")
    row = {token_id: token.logprob}
    row |= {other.token_id: other.logprob for other in token.top_logprobs if other.token_id != token_id}
    if max(row) >= asked.vocab_size:
        raise AnswerError(f"token {max(row)}, and the vocabulary has {asked.vocab_size}")
    num_told = len(token.top_logprobs)
    is_known = token.logprob > CUT_OFF  # of a logit that is nan, a server tells nothing but the token
    if num_told > asked.num_logprobs + 1 or (is_known and num_told < asked.num_logprobs):
        raise AnswerError(f"{num_told} likeliest tokens, and {asked.num_logprobs} were asked for")
    if len({other.token_id for other in token.top_logprobs}) < num_told:
        raise AnswerError("a token stands twice among the likeliest")
    if (share := sum(math.exp(min(logprob, 1.0)) for logprob in row.values())) > _MAX_SHARE:
        raise AnswerError(
            f"token {token_id} has log-probability {token.logprob:g}: probabilities of {share:g} together"
        )
    return list(row.items())


def _spans(choice: _Choice, num_tokens: int, asked: Asked) -> tuple[Span, ...]:
    """Refuses an end that does not fit the answer, and an answer by other weights than were sent."""
    if not num_tokens or (choice.finish_reason == "length" and num_tokens < asked.max_tokens):
        raise AnswerError(f"it ended after {num_tokens} of {asked.max_tokens} tokens by {choice.finish_reason}")
    spans: list[Span] = []
    position, version = 0, asked.oldest
    for span in choice.weight_versions or []:
        if (own := asked.versions.get(span.version, -1)) < version:
            raise AnswerError(
                "it has other weights than this run sent to it: it was started again, or serves another run, too"
            )
        if span.start != position or span.end < position:
            break
        spans.append(Span(span.end - position, own))
        position, version = span.end, own
    if position != num_tokens:
        raise AnswerError(f"it names the weights of {position} of {num_tokens} tokens")
    return tuple(spans)
