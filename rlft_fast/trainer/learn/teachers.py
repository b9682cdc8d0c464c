"""Which teachers a model can learn from."""

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import TopKTeacherConfig
from rlft_fast.models import load_tokenizer


def check_teacher(config: TopKTeacherConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a teacher in whose tokenizer a token of the model that learns has another id, or none."""
    if config is None:
        return
    if others := other_tokens(config.model, tokenizer, may_lack=False):
        raise ValueError(
            f"teacher.model is {config.model}, whose tokenizer has other ids, or none, for {len(others)} of the "
            f"{len(tokenizer)} tokens of model (such as {others[0]!r}): it would read them as other texts, so take a "
            "teacher with the tokenizer of model"
        )


def other_tokens(path: str, tokenizer: PreTrainedTokenizerBase, *, may_lack: bool) -> list[str]:
    """The tokens of a tokenizer that have another id in the tokenizer of a model's folder.

    Args:
        path: of the folder.
        tokenizer: with the tokens.
        may_lack: whether a token that the folder's tokenizer lacks is left out.
    """
    own = load_tokenizer(path).get_vocab()
    return [x for x, number in tokenizer.get_vocab().items() if own.get(x, number if may_lack else None) != number]


def check_embeddings(policy: int, teacher: int, config: TopKTeacherConfig) -> None:
    """Raises ValueError for a teacher with fewer embeddings than the policy, which may sample any of its tokens."""
    if teacher < policy:
        raise ValueError(
            f"teacher.model has embeddings of {teacher} tokens, but model has embeddings of {policy}: take a teacher "
            "with at least as many"
        )
    if config.num_ids is not None and config.num_ids > teacher:
        raise ValueError(f"teacher.top_k is {config.num_ids}, but the teacher has {teacher} tokens: lower it")
