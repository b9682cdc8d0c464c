"""Which rollout a configuration asks for."""

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
    """The rollout that ``config.backend`` names, of a policy.

    Args:
        engine: the policy.
        tokenizer: names the end tokens.
        config: how to sample.
        max_sequence_tokens: most tokens of a sequence, prompt and completion.

    Raises:
        ValueError: see `split_stop` and `VLLMRollout`.
    """
    split_stop(config.stop, tokenizer)  # before anything runs
    if config.backend == "vllm":
        return VLLMRollout(engine, tokenizer, config, max_sequence_tokens)
    assert isinstance(engine.model, PolicyModel)
    return HFRollout(engine.model, tokenizer, config.batch_size, engine.eval_mode)
