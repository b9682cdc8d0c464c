"""The prompts of a run: to learn from, and held-out ones."""

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import Config
from rlft_fast.trainer.prompts.images import ImageReader
from rlft_fast.trainer.prompts.loading import Prompts, load_prompts
from rlft_fast.trainer.prompts.streaming import stream_prompts


def load_data(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[Prompts, dict[str, Prompts]]:
    """The prompts to learn from, and the held-out prompts by the name of their set.

    Raises:
        ValueError: they cannot be used, see `load_prompts`.
    """
    reader = ImageReader.of_model(config.model, tokenizer)
    return load_training(config, tokenizer, reader), load_held_out(config, tokenizer, reader)


def load_training(config: Config, tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None) -> Prompts:
    """The prompts to learn from.

    Raises:
        ValueError: they cannot be used, see `load_prompts`.
    """
    if config.data.streaming:
        return stream_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens)
    return load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens, image_reader=reader)


def load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None) -> dict[str, Prompts]:
    """The prompts of each held-out set by its name.

    Raises:
        ValueError: they cannot be used, see `load_prompts`.
    """
    if config.evaluation is None:
        return {}
    limits = config.rollout.max_prompt_tokens, config.evaluation.max_rows
    sets = config.evaluation.sets
    return {
        name: load_prompts(config.data, tokenizer, limits[0], path, limits[1], reader) for name, path in sets.items()
    }
