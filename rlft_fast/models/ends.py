"""Where a completion ends: at an end token, or at the token that completes a stop text."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME


def generation_defaults(path: str) -> GenerationConfig:
    """The generation defaults of the model in a folder, as its loaded model has them."""
    if (Path(path) / GENERATION_CONFIG_NAME).is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))


def end_token_ids(defaults: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end tokens of a model's generation defaults, and the end token of the tokenizer.

    Raises:
        ValueError: neither names an end token.
    """
    configured = getattr(defaults, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    if other := [i for i in ids if i is not None and not isinstance(i, int)]:
        raise ValueError(
            f"eos_token_id in the generation settings of the model has {other[0]!r}, expected a token id or a list of "
            "token ids"
        )
    known = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not known:
        raise ValueError("neither the model nor its tokenizer names an end token: set eos_token_id in one of them")
    return sorted(known)


def split_stop(stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], tuple[str, ...]]:
    """Splits ``stop`` into the ids of special tokens, and texts to search in the decoded completion.

    A completion is decoded without special tokens, so a text that contains a special token would never be found.

    Args:
        stop: special tokens by name, and texts.
        tokenizer: tokenizer of the policy.

    Raises:
        ValueError: a text is empty, or contains a special token beside other text.
    """
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = tuple(text for text in stop if text not in special)
    for text in texts:
        if not text:
            raise ValueError("rollout.stop has an empty text, which would end every completion: remove it")
        inside = next((token for token in special if token in text), None)
        if inside is not None:
            raise ValueError(
                f"rollout.stop has {text!r}, of which {inside!r} is a special token: give the token or the text alone"
            )
    return [special[text] for text in stop if text in special], texts


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
