"""Where a completion ends: at an end token, or at the token that completes a stop text."""

from bisect import bisect_left
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class Ends:
    """Finds the ends of completions. An end token and the tokens of a stop text belong to the completion.

    Args:
        tokenizer: decodes completions to find stop texts.
        token_ids: end tokens.
        texts: stop texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], texts: tuple[str, ...]) -> None:
        self.token_ids = frozenset(token_ids)
        self.texts = texts
        self._tokenizer = tokenizer
        # A token has at least one byte; 8 tokens of context.
        self._span = 8 + max((len(text.encode()) for text in texts), default=0)

    def has_text(self, token_ids: list[int]) -> bool:
        """Whether the last tokens of a completion complete a stop text.

        Only the last tokens are decoded first: decoding the whole completion after each token would be quadratic in its
        length. A stop text that special tokens stretch beyond the last tokens is missed here, but not by `first`.
        """
        return all(self._decodes_to_text(tokens) for tokens in (token_ids[-self._span :], token_ids))

    def first(self, token_ids: list[int]) -> int | None:
        """The index of the token that ends a completion; None: no token does."""
        found = [i for i, token in enumerate(token_ids) if token in self.token_ids][:1]
        if self.texts:
            counts = range(1, len(token_ids) + 1)
            complete = bisect_left(counts, True, key=lambda count: self._decodes_to_text(token_ids[:count]))
            found += [complete] if complete < len(token_ids) else []
        return min(found, default=None)

    def _decodes_to_text(self, token_ids: list[int]) -> bool:
        if not self.texts:
            return False
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))  # as vLLM does
        return any(wanted in text for wanted in self.texts)
