"""The tokens between two replies of a policy: what a chat template has behind a reply, up to where the next begins.

No token of a reply is ever made again from text. The conversation is rendered with a mark in place of the policy's last
words. What follows the mark, without the end token that the policy has sampled itself, is tokenized alone. At the start
it is proved, for the template at hand, that this text depends neither on the words nor on the turns before them, and
that it becomes the same tokens alone as behind an end token.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlft_fast.errors import brief
from rlft_fast.trainer.episodes.calls import Parsed, parse
from rlft_fast.trainer.episodes.forms import HERMES
from rlft_fast.trainer.episodes.styles import PlainStyle, Style, find_styles, name_of
from rlft_fast.trainer.prompts import (
    MARK,
    RESULT_MARK,
    Conversation,
    ImageReader,
    Limits,
    Message,
    PromptImages,
    with_words,
)

_PROBES = ("Yes.", "One, two.\nThree: four", "<think>\nWell.\n</think>\n\n5")


class Suffix(NamedTuple):
    """What stands before a reply."""

    token_ids: list[int]
    opens_thought: bool
    """Whether the reply begins within a thought."""


def choose_suffixes(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], end_token_ids: Sequence[int],
    image_reader: ImageReader | None = None,
) -> "Suffixes":  # fmt: skip
    """The suffixes of the first style that the chat template proves, see `Suffixes`."""
    for style in find_styles(tokenizer, tools, [str(tokenizer.decode([i])) for i in end_token_ids]):
        try:
            return Suffixes(tokenizer, style, end_token_ids, image_reader)
        except ValueError:
            if isinstance(style, PlainStyle):
                raise
    raise AssertionError("the last style is a plain one")


class Suffixes:
    """Makes the tokens behind a prompt's last message, and behind a reply.

    Args:
        tokenizer: of the policy.
        style: of tools, calls and results.
        end_token_ids: tokens that end a reply.
        image_reader: of the policy; None: messages have no images.

    Attributes:
        why_no_images: why messages can have no images; empty: they can, with a reader.

    Raises:
        ValueError: the chat template does not tell what follows a reply.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, style: Style, end_token_ids: Sequence[int],
        image_reader: ImageReader | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.style, self.limits = tokenizer, style, Limits(memory=False)
        self.image_reader = image_reader
        texts = {i: str(tokenizer.decode([i])) for i in end_token_ids}
        # An end token that text can become, too, tells nothing in a text.
        self._ends = {i: text for i, text in texts.items() if i in tokenizer.added_tokens_decoder}
        special = {x.content for x in tokenizer.added_tokens_decoder.values() if x.special}
        if image_reader is not None:
            special |= {image_reader.token, image_reader.placeholder}
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._stand_in = ""  # see `_find_stand_in`
        try:
            self._prove()
        except Exception as error:  # a template is code of the model's and may raise any error
            raise ValueError(
                f"the chat template does not tell what follows a reply, so an environment cannot answer it: "
                f"{brief(error)}"
            ) from error
        self.why_no_images = "" if image_reader is None else self._why_no_images(image_reader)

    def split_prompt(self, conversation: Conversation) -> tuple[str, str]:
        """The text of a conversation up to the end of its last message's words, and the rest, see `opening`.

        Raises:
            ValueError: the template does not show where the words end.
        """
        return self._split_opening(conversation, [])

    def opening(
        self, conversation: Conversation, messages: Sequence[Message], images: PromptImages | None = None
    ) -> Suffix:
        """What stands from the end of the prompt's last words to where the first reply begins, see `opened`.

        Args:
            conversation: the prompt.
            messages: the environment's.
            images: of the messages.
        """
        return self.suffix(self._split_opening(conversation, messages)[1], images)

    def opened(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The conversation after what an environment begins with.

        Args:
            conversation: the prompt.
            messages: the environment's. A message without a role is added to the prompt's last words.
        """
        *before, last = conversation.messages
        if added := "".join(message["content"] for message in messages if "role" not in message):
            last = last | {"content": with_words(last["content"], after=added)}
        others = self.style.results([message for message in messages if "role" in message])
        return replace(conversation, messages=[*before, last, *others])

    def after_reply(
        self, conversation: Conversation, reply: Parsed, messages: Sequence[Message],
        images: PromptImages | None = None, *, ended: bool,
    ) -> Suffix:  # fmt: skip
        """What stands from the end of a reply to where the next reply begins, see `answered`.

        Args:
            conversation: all before the reply.
            reply: what the policy has written.
            messages: the environment's.
            images: of the messages.
            ended: whether an end token was sampled, not only a stop text.
        """
        return self.suffix(self._after(conversation, reply, messages, ended=ended), images)

    def answered(self, conversation: Conversation, said: Message, messages: Sequence[Message]) -> Conversation:
        """The conversation after a reply and its answer.

        Args:
            conversation: all before the reply.
            said: the reply, as `Style.said` has it.
            messages: the environment's. A message without a role is a user's.
        """
        answer = self.style.results([{"role": "user"} | message for message in messages], said)
        return replace(conversation, messages=[*conversation.messages, said, *answer])

    def without_special_tokens(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose texts become no special token: a web page could end the turn, and speak as the policy.

        A space goes behind the first character of a special token's name.
        """

        def plain(content: Any) -> Any:
            if isinstance(content, str):
                return self.plain(content)
            return [part | {"text": self.plain(part["text"])} if "text" in part else part for part in content]

        return [message | {"content": plain(message["content"])} for message in messages]

    def plain(self, text: str) -> str:
        """A text that becomes no special token, see `without_special_tokens`."""
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def _split_opening(self, conversation: Conversation, messages: Sequence[Message]) -> tuple[str, str]:
        text = self.render(self.opened(conversation, [{"content": MARK}, *messages]))
        prompt, *rest = text.split(MARK)
        if len(rest) != 1:
            raise ValueError(f"the chat template shows the last message of the prompt {len(rest)} times")
        return prompt, rest[0]

    def _after(self, conversation: Conversation, reply: Parsed, messages: Sequence[Message], *, ended: bool) -> str:
        text = self.render(self.answered(conversation, self.style.marked(reply), messages))
        _, found, after = text.rpartition(MARK)
        if not found:
            raise ValueError("the chat template does not show a reply")
        ends = [*self._ends.values(), *([self._stand_in] if self._stand_in else [])]
        places = [(place, end) for end in ends if (place := after.find(end)) >= 0]
        if not places:
            return after
        place, end = min(places, key=lambda found: (found[0], -len(found[1])))
        return after[place + len(end) if ended else place :]

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation, up to where a reply begins."""
        return conversation.render(self.tokenizer, self.limits)

    def suffix(self, text: str, images: PromptImages | None = None) -> Suffix:
        """The tokens of a text that stands before a reply.

        Args:
            text: from the template.
            images: of the placeholders in the text.
        """
        if self.image_reader is not None:
            text = self.image_reader.expand(text, images)
        return Suffix(self._encode(text), text.rstrip().endswith(self.style.form.thought[0]))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _prove(self) -> None:
        asked = Conversation([{"role": "user", "content": "Is it so?"}])
        answer: list[Message] = [{"role": "user", "content": "Why?"}]
        earlier: list[Message] = [{"role": "assistant", "content": "No."}, {"role": "user", "content": "And now?"}]
        longer = replace(asked, messages=[*asked.messages, *earlier])
        self._stand_in = self._find_stand_in(asked, answer)
        texts = {
            self._after(before, parse(words, HERMES), answer, ended=True)
            for before in (asked, longer)
            for words in _PROBES
        }
        text = _only(texts, "words")
        if "Why?" not in text:
            raise ValueError(f"the answer is not in {text!r}")
        self._require_same_tokens(text)
        self._prove_results()

    def _require_same_tokens(self, text: str) -> None:
        for i, end in self._ends.items():
            if self._encode(end + text) != [i, *self._encode(text)]:
                raise ValueError(f"{text!r} has other tokens behind {end!r} than alone")

    def _find_stand_in(self, asked: Conversation, answer: Sequence[Message]) -> str:
        """The special token that ends a reply in the history, where an end token of the policy's ends the last message.

        Empty where the history has an end token of the policy's, too. gpt-oss ends a reply by ``<|return|>``, in place
        of which its template writes ``<|end|>`` as soon as another message follows. The sampled token stands there.
        """
        after = self._after(asked, Parsed(MARK, []), answer, ended=False)
        if any(end in after for end in self._ends.values()):
            return ""
        last = asked.render(self.tokenizer, self.limits, MARK).rpartition(MARK)[2]
        found = self._special.match(after)
        return found[0] if found is not None and last.startswith((*self._ends.values(),)) else ""

    def _prove_results(self) -> None:
        """As `_prove`, of the results of tools: they may not depend on arguments, words, thoughts and earlier calls."""
        if not self.style.tools:
            return
        name = name_of(self.style.tools[0])
        calls = [[{"name": name, "arguments": arguments}] for arguments in ({}, {"x": [1, "two"]})]
        result: list[Message] = [{"role": "tool", "name": name, "content": RESULT_MARK}]
        asked = self.style.with_tools(Conversation([{"role": "user", "content": "Is it so?"}]))
        longer = self.answered(asked, self.style.said(Parsed("", calls[0]), "?"), result)
        texts = {
            self._after(before, Parsed(words, own), result, ended=True)
            for before in (asked, longer)
            for words in ("", "Let me see.")
            for own in calls
        }
        text = _only(texts, "calls of tools")
        if RESULT_MARK not in text:
            raise ValueError(f"the result of a tool is not in {text!r}")

    def _why_no_images(self, reader: ImageReader) -> str:
        try:
            self._prove_images(reader)
        except Exception as error:  # a template is code of the model's
            return f"the chat template does not tell what follows a reply beside images: {brief(error)}"
        return ""

    def _prove_images(self, reader: ImageReader) -> None:
        """As `_prove`, of texts behind images of earlier messages, and of messages with an image."""
        shown: list[Message] = [{"type": "image"}, {"type": "text", "text": "Why?"}]
        words = [{"role": "user", "content": content} for content in ("Why?", shown)]
        said: Message = {"role": "assistant", "content": "No."}
        for number, answer in enumerate(words):
            texts = {
                self._after(Conversation(before), parse(probe, HERMES), [answer], ended=True)
                for before in ([words[0]], [words[1]], [words[0], said, words[1]], [words[1], said, words[0]])
                for probe in _PROBES
            }
            text = _only(texts, "images")
            if (found := text.count(reader.placeholder)) != number:
                raise ValueError(f"{number} images become {found} times {reader.placeholder} in {text!r}")
            self._require_same_tokens(reader.expand_blank(text))


def _only(texts: set[str], what: str) -> str:
    """The text, which must be the same behind every `what`."""
    if len(texts) > 1:
        first, second, *_ = sorted(texts)
        raise ValueError(f"behind other {what} it is {first!r} and {second!r}")
    return texts.pop()
