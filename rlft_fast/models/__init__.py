"""Models that reinforcement fine-tuning trains: a policy with log-probabilities, a critic with values."""

from rlft_fast.models.architectures import (
    padded_attention,
    require_divisible_heads,
    require_fixed_rope,
)
from rlft_fast.models.attention import PACKED_ATTENTION, packed_attention
from rlft_fast.models.heads import LogprobHead, PolicyModel, RewardModel, RLModel, ValueModel
from rlft_fast.models.loading import (
    build_critic,
    build_policy,
    build_reward_model,
    load,
    load_critic,
    load_policy,
    load_tokenizer,
)
from rlft_fast.models.lora import adapter_parameters, add_lora, disabled_lora, low_rank_factors
from rlft_fast.models.packed import ModelInputs
from rlft_fast.models.patch import patch_lm_head, unpatch_lm_head
from rlft_fast.models.value_head import head_parameters, stored_head, token_classifier

__all__ = [
    "PACKED_ATTENTION",
    "LogprobHead",
    "ModelInputs",
    "PolicyModel",
    "RLModel",
    "RewardModel",
    "ValueModel",
    "adapter_parameters",
    "add_lora",
    "build_critic",
    "build_policy",
    "build_reward_model",
    "disabled_lora",
    "head_parameters",
    "load",
    "load_critic",
    "load_policy",
    "load_tokenizer",
    "low_rank_factors",
    "packed_attention",
    "padded_attention",
    "patch_lm_head",
    "require_divisible_heads",
    "require_fixed_rope",
    "stored_head",
    "token_classifier",
    "unpatch_lm_head",
]
