"""Builds the rollout that a configuration names."""

from transformers import PreTrainedTokenizerBase

from rlft_fast.config import RolloutConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import PolicyModel
from rlft_fast.rollout.ends import split_stop
from rlft_fast.rollout.hf import HFRollout
from rlft_fast.rollout.types import Rollout
from rlft_fast.rollout.vllm import VLLMRollout


def build_rollout(
    engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, max_sequence_tokens: int
) -> Rollout:
    """Builds the rollout that ``config.backend`` names.

    Args:
        engine: the policy.
        tokenizer: names the end tokens.
        config: settings of the rollout.
        max_sequence_tokens: most tokens of a prompt and its completion together.

    Raises:
        ValueError: see `split_stop` and `VLLMRollout`.
    """
    split_stop(config.stop, tokenizer)  # refuses wrong stop texts before anything runs
    if config.backend == "vllm":
        return VLLMRollout(engine, tokenizer, config, max_sequence_tokens)
    assert isinstance(engine.model, PolicyModel)
    return HFRollout(engine.model, tokenizer, config.batch_size, engine.eval_mode)
