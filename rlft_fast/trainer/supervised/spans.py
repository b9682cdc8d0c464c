"""Where the assistant's words stand in a conversation, as a chat template renders it.

A template that marks them with ``{% generation %}`` is taken at its word. Of any other template, a message of the
assistant's is exchanged for a mark, and the conversation is rendered again: what stands behind the mark, from the end
token of the message on, stands behind the assistant's words, too. It is checked for every message. At the start it is
also proved that this text does not depend on the words.

Rows whose messages have the same roles share the renderings with marks: in a text that is exactly such a rendering with
the contents in place of its marks, the words stand where the marks stood, and answers begin as far before them.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlft_fast.errors import brief
from rlft_fast.trainer.prompts import MARK, RESULT_MARK, Conversation, Limits, Message, is_plain, render

T = TypeVar("T")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBES = (("Yes.", "No."), ("One, two.\nThree: four", '{"five": [6]}'))


class Span(NamedTuple):
    """Characters that are taught: the words of a message, and the end token behind them."""

    start: int
    end: int


class Written(NamedTuple, Generic[T]):
    """Texts, and what their tokens make."""

    texts: list[str]
    make: Callable[[Sequence[list[int]]], T]


class AssistantSpans:
    """Finds what the assistant says in conversations.

    Args:
        tokenizer: has the chat template.
        path: folder of the tokenizer, for messages.
        limits: of the template.

    Raises:
        ValueError: the template gives no way to tell the assistant's words from the rest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: str, limits: Limits) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self._end = _end_pattern(tokenizer)
        self._header = ""
        self._kinds: set[str] = set()  # of conversations: roles and variables
        self._skeletons: dict[str, _Skeleton | None] = {}  # of kinds that came twice; None: there is none
        try:
            self._prove()
        except Exception as error:  # a template is code of the model's and may raise any error
            raise ValueError(
                f"the chat template of {path} does not show where the assistant's words begin and end: {brief(error)}. "
                "Put {% generation %} and {% endgeneration %} around them in the template, or give rows with the "
                "columns prompt and completion, and data.chat: false"
            ) from error

    def find(self, conversation: Conversation, first: int = 0) -> tuple[str, list[Span]]:
        """The conversation as the model reads it, and what the assistant says in it.

        Args:
            conversation: that ends with a message of the assistant's.
            first: number of the first message that is taught.

        Raises:
            ValueError: a message cannot be told from the text around it.
            Exception: the template fails, see `Conversation.render`.
        """
        taught = [i for i, x in enumerate(conversation.messages) if x["role"] == "assistant" and i >= first]
        if self._marks_generation(conversation):
            text, spans = self._find_marked(conversation)
            if any(message["role"] == "assistant" for message in conversation.messages[:first]):
                earlier = replace(conversation, messages=conversation.messages[:first])
                spans = spans[len(self._find_marked(earlier)[1]) :]
        else:
            text = self._render(conversation)
            known = self._by_skeleton(conversation, text)
            spans = [self._find_one(conversation, text, i, known.get(i)) for i in taught]
            for i, (one, other) in zip(taught[1:], pairwise(spans), strict=True):
                if other.start < one.end:
                    raise ValueError(f"the chat template does not show where message {i}, of the assistant's, begins")
        calls = [call for i in taught for call in conversation.messages[i].get("tool_calls") or ()]
        said = "".join(text[span.start : span.end] for span in spans) if calls else ""
        for call in calls:
            name = call.get("function", call).get("name")
            if not isinstance(name, str) or name not in said:
                raise ValueError(f"the chat template does not show the call of the tool {name!r}: leave the row out")
        return text, spans

    # ---- templates with {% generation %} ------------------------------------------------------------------------

    def _marks_generation(self, conversation: Conversation) -> bool:
        return _marks_generation(self.tokenizer.get_chat_template(tools=conversation.tools))

    def _find_marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        spans: list[Span] = []  # of the last rendering, which `render` returns

        def template(messages: list[Message]) -> str:
            variables: dict[str, Any] = {**self.tokenizer.special_tokens_map, **conversation.variables}
            texts, found = render_jinja_template(  # the tokenizer would map characters to tokens by its own rules
                [messages], tools=conversation.tools, return_assistant_tokens_mask=True,
                chat_template=self.tokenizer.get_chat_template(tools=conversation.tools), **variables,
            )  # fmt: skip
            spans[:] = [Span(int(start), int(end)) for start, end in found[0]]
            return texts[0]

        with self.limits.one():
            text = render(template, conversation.messages)
        return text, spans

    # ---- other templates ----------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Raises an error for a template of which nothing is found, or whose text around the words depends on them."""
        user = {"role": "user", "content": "Is it so?"}
        asked = Conversation([user])
        prompt, bare = self._render(asked, opens=True), self._render(asked)
        self._header = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
        around: set[tuple[str, ...]] = set()
        for words in _PROBES:
            said = [{"role": "assistant", "content": text} for text in words]
            text, spans = self.find(Conversation([user, said[0], user, said[1]]))
            taught = [text[span.start : span.end] for span in spans]
            if missing := [own for own in words if not any(own in part for part in taught)]:
                raise ValueError(f"{missing[0]!r} is not where it is expected in {text!r}")
            if not any(map(self._end.search, taught)):
                raise ValueError(f"no end token follows the words in {text!r}, so the model would not learn to end")
            bounds = [0, *(bound for span in spans for bound in span), len(text)]
            around.add(tuple(text[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)))
        if len(around) > 1:
            raise ValueError("the text around the words depends on them")

    def _by_skeleton(self, conversation: Conversation, text: str) -> dict[int, Span]:
        """Where the answers of all messages of the assistant's stand in the text, if `_Skeleton` tells."""
        messages = conversation.messages
        roles = [message["role"] for message in messages]
        if conversation.tools or "tool" in roles or not all(map(is_plain, messages)):
            return {}
        key = repr((roles, conversation.variables))
        if key not in self._kinds:  # the only conversation of its kind would take longer
            self._kinds.add(key)
            return {}
        if key not in self._skeletons:
            self._skeletons[key] = self._skeleton(conversation)
        skeleton = self._skeletons[key]
        return {} if skeleton is None else skeleton.answers(text, [message["content"] for message in messages])

    def _skeleton(self, conversation: Conversation) -> "_Skeleton | None":
        """The skeleton of conversations of this kind; None: there is none."""
        marks = [f"{MARK}{i}x" for i in range(len(conversation.messages))]
        messages = [message | {"content": mark} for message, mark in zip(conversation.messages, marks, strict=True)]
        marked = replace(conversation, messages=messages)
        text = self._render(marked)
        if any(text.count(mark) != 1 for mark in marks):
            return None
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        places = {i: text.index(marks[i]) for i in said}
        return _Skeleton.of(
            text, marks, {i: place - self._start(marked, text, i, place) for i, place in places.items()}
        )

    def _find_one(self, conversation: Conversation, text: str, i: int, answer: Span | None) -> Span:
        """What message i says in the text of the conversation.

        Args:
            conversation: as it is rendered.
            text: of the conversation.
            i: number of the message.
            answer: where the answer stands, without what ends it; None: it is not known.
        """
        if answer is None:
            words = self._differing(conversation, text, i)
            answer = Span(self._start(conversation, text, i, words.start), words.end)
        if not answer.start <= answer.end:
            raise ValueError(f"the chat template does not show where message {i}, of the assistant's, begins")
        ends = self._end.match(text, answer.end)
        return Span(answer.start, answer.end if ends is None else ends.end())

    def _differing(self, conversation: Conversation, text: str, i: int) -> Span:
        """Where the text differs from the text with a mark in place of message i."""
        messages = conversation.messages
        mark = MARK
        while mark in text:
            mark += "x"
        marked = [*messages[:i], {"role": "assistant", "content": mark}, *messages[i + 1 :]]
        before, *after = self._render(replace(conversation, messages=marked)).split(mark)
        if len(after) != 1 or not text.endswith(after[0]) or not self._shows_result(conversation, marked, i):
            raise ValueError(f"the chat template does not show where message {i}, of the assistant's, ends")
        return Span(_num_equal(text, before), len(text) - len(after[0]))

    def _shows_result(self, conversation: Conversation, marked: list[Message], i: int) -> bool:
        """Whether the result of a tool is shown behind a message without the call. It would be taught otherwise."""
        if i + 1 == len(marked) or marked[i + 1]["role"] != "tool":
            return True
        result = marked[i + 1] | {"content": RESULT_MARK}
        return RESULT_MARK in self._render(replace(conversation, messages=[*marked[: i + 1], result, *marked[i + 2 :]]))

    def _start(self, conversation: Conversation, text: str, i: int, latest: int) -> int:
        """Where an answer in place of message i begins: behind the prompt that the generator would get.

        A template may open the answer otherwise in the prompt than in the history, or leave out earlier thoughts. Then
        the answer begins behind the last header of an answer that follows the earlier messages, or, without it, where
        the words differ from a mark.

        Args:
            conversation: as it is rendered.
            text: of the conversation.
            i: number of the message.
            latest: the first character in which the text differs from the text with a mark.
        """
        earliest = 0
        if conversation.messages[:i]:
            before = replace(conversation, messages=conversation.messages[:i])
            prompt = self._render(before, opens=True)
            if len(prompt) <= latest and text.startswith(prompt):
                return len(prompt)
            earliest = _num_equal(text, self._render(before))
        found = text.rfind(self._header, earliest, latest) if self._header else -1
        return latest if found < 0 else found + len(self._header)

    def _render(self, conversation: Conversation, *, opens: bool = False) -> str:
        """The text of a conversation.

        Args:
            conversation: to render.
            opens: whether the text ends where an answer begins.
        """

        def template(messages: list[Message]) -> str:
            text = self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools, tokenize=False, add_generation_prompt=opens,
                **conversation.variables,
            )  # fmt: skip
            assert isinstance(text, str)
            return text

        with self.limits.one():  # not around a conversation, of which each message is rendered again
            return render(template, conversation.messages)


class _Skeleton(NamedTuple):
    """The text of a conversation around the contents of its messages."""

    pieces: list[str]
    """Around N contents, N + 1."""
    order: list[int]
    """Numbers of the messages in the order of the text."""
    leads: dict[int, int]
    """For each message of the assistant's, characters from where an answer in its place begins to its content."""

    @classmethod
    def of(cls, text: str, marks: Sequence[str], leads: dict[int, int]) -> "_Skeleton":
        """The skeleton of a text in which each mark stands once."""
        order = sorted(range(len(marks)), key=lambda i: text.index(marks[i]))
        pieces = []
        for i in order:
            piece, _, text = text.partition(marks[i])
            pieces.append(piece)
        return cls([*pieces, text], order, leads)

    def answers(self, text: str, contents: Sequence[str]) -> dict[int, Span]:
        """Where each answer stands, if the text is the skeleton with the contents; else nothing."""
        filled, at = [], 0
        spans: dict[int, Span] = {}
        for piece, i in zip(self.pieces, self.order):  # noqa: B905 (one piece too many)
            at += len(piece)
            if i in self.leads:
                spans[i] = Span(at - self.leads[i], at + len(contents[i]))
            at += len(contents[i])
            filled += [piece, contents[i]]
        return spans if "".join([*filled, self.pieces[-1]]) == text else {}


@functools.cache
def _marks_generation(template: str) -> bool:
    return bool(_GENERATION.search(template))


def _end_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the special tokens that end a message: up to the end token where it is among them, else the first."""
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = sorted(tokens | {*map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
    if not special:
        return re.compile("(?!)")
    anyone, end = "|".join(map(re.escape, special)), re.escape(str(tokenizer.eos_token or special[0]))
    return re.compile(rf"\s*(?:(?:{anyone})*?{end}|(?:{anyone}))")


def _num_equal(text: str, other: str) -> int:
    """Characters that both texts begin with. Halves are compared at once: each answer asks for a whole conversation."""
    equal, most = 0, min(len(text), len(other))
    while equal < most:
        middle = (equal + most + 1) // 2
        if text[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


def cut_text(text: str, spans: Sequence[Span], *, joins: bool) -> "Written[tuple[list[int], bytes]]":
    """A text whose tokens make all its tokens, and of each 1 if it is taught, else 0.

    A generator gets the tokens of a prompt, and adds tokens to them. So the text is cut where spans begin and end, and
    its pieces are tokenized one by one. A tokenizer that adds a space to each piece gets the whole text, in which no
    token may reach over a cut.

    Args:
        text: of a conversation.
        spans: in order.
        joins: whether tokens of pieces, one after the other, are tokens of the whole text.

    Raises:
        ValueError: where the tokens are made: a token reaches over a cut.
    """
    bounds = [0, *chain.from_iterable(spans), len(text)]
    if joins:
        return Written([text[start:end] for start, end in pairwise(bounds)], _joined)
    return Written([text, *(text[:bound] for bound in bounds[1:])], partial(_cut, text, bounds))


def _joined(pieces: Sequence[list[int]]) -> tuple[list[int], bytes]:
    return [*chain.from_iterable(pieces)], alternating([*map(len, pieces)])


def _cut(text: str, bounds: Sequence[int], found: Sequence[list[int]]) -> tuple[list[int], bytes]:
    ids, *pieces = found
    cuts = [0]
    for bound, piece in zip(bounds[1:], pieces, strict=True):
        if ids[: len(piece)] != piece:
            raise ValueError(f"a token reaches over the beginning or end of words, behind {text[:bound][-40:]!r}")
        cuts.append(len(piece))
    return ids, alternating([b - a for a, b in pairwise(cuts)])


def alternating(sizes: Sequence[int]) -> bytes:
    """So many zeros, so many ones, and so on."""
    return b"".join([(b"\1" if i % 2 else b"\0") * size for i, size in enumerate(sizes)])
