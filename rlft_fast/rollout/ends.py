"""What ends a completion: end tokens and stop texts."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All end tokens of the model's generation defaults, and the tokenizer's.

    Raises:
        ValueError: there is none.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    known = {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not known:
        raise ValueError("neither the model nor its tokenizer names an end token: set eos_token_id in one of them")
    return sorted(known)


def split_stop(stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], tuple[str, ...]]:
    """The ids of those that are special tokens, and the texts to look for.

    A completion is decoded without its special tokens, so that no text with one is ever found in it.

    Args:
        stop: what shall end a completion.
        tokenizer: of the policy.

    Raises:
        ValueError: a special token and other text in one, or a text that is empty.
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
