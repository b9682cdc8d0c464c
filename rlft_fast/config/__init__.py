"""Configuration of a training run: a YAML file and dotted overrides, typed and validated. Unknown keys are errors.

The docstring under a field is the help text of its key (``rlft-fast train --help``).
"""

from rlft_fast.config.algorithm import AlgorithmConfig
from rlft_fast.config.base import ConfigError, Section, section_of, sections, set_key, value_at, without_password
from rlft_fast.config.cluster import ClusterConfig, GeneratorsConfig, GroupName, WorkersConfig
from rlft_fast.config.environment import EnvironmentConfig
from rlft_fast.config.model import (
    CriticConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TeacherConfig,
    TopKTeacherConfig,
)
from rlft_fast.config.objectives import OBJECTIVES, load_config
from rlft_fast.config.paths import HUB, hub_parts
from rlft_fast.config.resume import changed_settings, fixed_settings
from rlft_fast.config.roles import HeadKind, Role, StepPhase
from rlft_fast.config.rollout import SMALLEST_VLLM_TEMPERATURE, RolloutConfig, VLLMConfig
from rlft_fast.config.run import (
    MODEL_PART,
    SERVER_PART,
    Config,
    DataConfig,
    EvaluationConfig,
    RewardConfig,
)
from rlft_fast.config.servers import TOKEN_VARIABLE, check_server_url, server_urls
from rlft_fast.config.supervised import (
    DPOConfig,
    PairConfig,
    PairDataConfig,
    PreferenceConfig,
    RewardDataConfig,
    RewardModelConfig,
    SFTConfig,
    SFTDataConfig,
    SFTEvaluationConfig,
    SFTTeacherConfig,
    TaughtConfig,
    TaughtDataConfig,
)
from rlft_fast.config.training import CheckpointConfig, HeldOutConfig, ProfileConfig, RowsConfig, RunConfig, run_roles

__all__ = [
    "HUB",
    "MODEL_PART",
    "OBJECTIVES",
    "SERVER_PART",
    "SMALLEST_VLLM_TEMPERATURE",
    "TOKEN_VARIABLE",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DPOConfig",
    "DataConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GeneratorsConfig",
    "GroupName",
    "HeadKind",
    "HeldOutConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PairConfig",
    "PairDataConfig",
    "PreferenceConfig",
    "ProfileConfig",
    "RewardConfig",
    "RewardDataConfig",
    "RewardModelConfig",
    "Role",
    "RolloutConfig",
    "RowsConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTEvaluationConfig",
    "SFTTeacherConfig",
    "Section",
    "StepPhase",
    "TaughtConfig",
    "TaughtDataConfig",
    "TeacherConfig",
    "TopKTeacherConfig",
    "VLLMConfig",
    "WorkersConfig",
    "changed_settings",
    "check_server_url",
    "fixed_settings",
    "hub_parts",
    "load_config",
    "run_roles",
    "section_of",
    "sections",
    "server_urls",
    "set_key",
    "value_at",
    "without_password",
]
