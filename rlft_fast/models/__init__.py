"""Models that reinforcement fine-tuning trains: a policy with log-probabilities, a critic with values."""

from rlft_fast.models.attention import PACKED_ATTENTION, packed_attention
from rlft_fast.models.heads import LogprobHead, ModelInputs, PolicyModel, ValueModel
from rlft_fast.models.loading import load_critic, load_policy, load_tokenizer
from rlft_fast.models.patch import patch_lm_head

__all__ = [
    "PACKED_ATTENTION",
    "LogprobHead",
    "ModelInputs",
    "PolicyModel",
    "ValueModel",
    "load_critic",
    "load_policy",
    "load_tokenizer",
    "packed_attention",
    "patch_lm_head",
]
