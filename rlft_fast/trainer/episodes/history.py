"""Histories as a chat template writes them, which may leave out what the policy has thought before.

Where it leaves out a thought that the policy has seen so far, an episode begins a branch: the policy goes on from the
template's text of all messages. The policy's own words are context there, made into tokens again, and no token of them
is learned a second time.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from rlft_fast.errors import brief
from rlft_fast.trainer.episodes.calls import Parsed
from rlft_fast.trainer.episodes.forms import THINKING
from rlft_fast.trainer.episodes.styles import name_of
from rlft_fast.trainer.episodes.suffix import Suffix, Suffixes
from rlft_fast.trainer.prompts import MARK, RESULT_MARK, Conversation, Message

_WORDS = "xqwordsxq"


class History:
    """What the template leaves of an episode.

    Args:
        suffixes: of the template.
        key: see `prove_history`.
        prompt: text that the episode begins with.
        conversation: before the first reply.
    """

    def __init__(self, suffixes: Suffixes, key: str | None, prompt: str, conversation: Conversation) -> None:
        self.suffixes, self.prompt, self._key = suffixes, prompt, key
        self._outline = conversation  # of the episode, with a mark in place of each thought
        self._num_thoughts = 0  # that the policy sees

    def said(self, reply: Parsed, text: str) -> Message:
        """The policy's message with its thought. Words of the policy's become no special token in it.

        Args:
            reply: what the policy has written.
            text: the same, as it was written.
        """
        plain = self.suffixes.plain
        calls: list[dict[str, Any]] = json.loads(plain(json.dumps(reply.calls, ensure_ascii=False)))
        own = reply._replace(content=plain(reply.content), calls=calls)
        words = self._without_thoughts(text) if reply.thought else text
        return self._with_thought(self.suffixes.style.said(own, plain(words)), plain(reply.thought))

    def rewritten(self, conversation: Conversation, reply: Parsed, messages: Sequence[Message]) -> Suffix | None:
        """What the policy reads behind the prompt now, if the template leaves out a thought; None: it goes on.

        Args:
            conversation: with the reply and its answer.
            reply: what the policy has written.
            messages: the environment's.

        Raises:
            ValueError: the template changes the prompt.
        """
        outlined = self.suffixes.style.said(reply, reply.content)
        marked = self._with_thought(outlined, MARK if reply.thought else "")
        self._outline = self.suffixes.answered(self._outline, marked, messages)
        self._num_thoughts += bool(reply.thought)
        num_shown = self.suffixes.render(self._outline).count(MARK)
        if num_shown >= self._num_thoughts:
            return None
        self._num_thoughts = num_shown
        text = self.suffixes.render(conversation)
        if not text.startswith(self.prompt):
            raise ValueError(f"the prompt {brief(self.prompt)!r} becomes {brief(text)!r}")
        return self.suffixes.suffix(text[len(self.prompt) :])

    def _with_thought(self, message: Message, thought: str) -> Message:
        if not thought:
            return message
        if self._key is not None:
            return message | {self._key: thought}
        begin, end = self.suffixes.style.form.thought
        return message | {"content": f"{begin}\n{thought}\n{end}\n\n{message['content']}"}

    def _without_thoughts(self, text: str) -> str:
        begin, end = self.suffixes.style.form.thought
        if begin not in text.partition(end)[0]:  # the prompt has it
            text = begin + text
        return re.sub(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)", "", text, flags=re.DOTALL).strip()


def prove_history(suffixes: Suffixes) -> str | None:
    """Proves that histories begin with the prompt, and have the policy's words and the environment's.

    Args:
        suffixes: of the template.

    Returns:
        The key of a message from which the template reads its thoughts; None: it reads them in the words.

    Raises:
        ValueError: the chat template cannot write a history.
    """
    try:
        return _prove(suffixes)
    except Exception as error:  # a template is code of the model's and may raise any error
        raise ValueError(
            "environment.history is template, but the chat template cannot write the history of an episode: "
            f"{brief(error)}. Set environment.history to keep"
        ) from error


def _prove(suffixes: Suffixes) -> str | None:
    style = suffixes.style
    asked = style.with_tools(Conversation([{"role": "user", "content": "Is it so?"}]))
    (prompt, _), (begin, end) = suffixes.split_prompt(asked), style.form.thought
    thought_key = next((key for key in THINKING if _shows(suffixes, asked, key)), None)
    answers: list[tuple[Parsed, Message]] = [
        (Parsed(_WORDS, [], None, "Well."), {"role": "user", "content": RESULT_MARK})
    ]
    if style.tools:
        call = {"name": name_of(style.tools[0]), "arguments": {"x": _WORDS}}
        answers.append((Parsed("", [call], None, "Well."), {"role": "tool", "content": RESULT_MARK}))
    for reply, answer in answers:
        history, conversation = History(suffixes, thought_key, prompt, asked), asked
        for _ in range(2):
            said = history.said(reply, f"{begin}Well.{end}{_WORDS}")
            conversation = suffixes.answered(conversation, said, [answer])
            text = suffixes.render(conversation)
            if not text.startswith(prompt):
                raise ValueError(f"the prompt {brief(prompt)!r} becomes {brief(text)!r}")
            if _WORDS not in text or RESULT_MARK not in text:
                raise ValueError(f"words of the policy or the environment are not in {brief(text)!r}")
    return thought_key


def _shows(suffixes: Suffixes, conversation: Conversation, key: str) -> bool:
    """Whether the template reads a message's thoughts from this key."""
    said = {"role": "assistant", "content": _WORDS, key: MARK}
    messages = [*conversation.messages, said]
    try:
        with suffixes.limits.one():
            text = suffixes.tokenizer.apply_chat_template(messages, tools=conversation.tools, tokenize=False)
    except Exception:  # a template is code of the model's, and raises its own errors
        return False
    return MARK in str(text)
