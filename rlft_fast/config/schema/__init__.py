"""Sections of a configuration, and the configurations that they make up."""

from rlft_fast.config.schema.algorithm import AlgorithmConfig
from rlft_fast.config.schema.cluster import ClusterConfig, GeneratorsConfig, GroupName, WorkersConfig
from rlft_fast.config.schema.environment import EnvironmentConfig
from rlft_fast.config.schema.model import (
    CriticConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TeacherConfig,
    TopKTeacherConfig,
)
from rlft_fast.config.schema.roles import HeadKind, Role, StepPhase
from rlft_fast.config.schema.rollout import LARGEST_VLLM_RANK, SMALLEST_VLLM_TEMPERATURE, RolloutConfig, VLLMConfig
from rlft_fast.config.schema.run import MODEL_PART, SERVER_PART, Config, DataConfig, EvaluationConfig, RewardConfig
from rlft_fast.config.schema.servers import REWARD_TOKEN_VARIABLE, TOKEN_VARIABLE, check_server_url, server_urls
from rlft_fast.config.schema.supervised import (
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
from rlft_fast.config.schema.training import (
    CheckpointConfig,
    HeldOutConfig,
    ProfileConfig,
    RowsConfig,
    RunConfig,
    run_roles,
)

__all__ = [
    "LARGEST_VLLM_RANK",
    "MODEL_PART",
    "REWARD_TOKEN_VARIABLE",
    "SERVER_PART",
    "SMALLEST_VLLM_TEMPERATURE",
    "TOKEN_VARIABLE",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
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
    "StepPhase",
    "TaughtConfig",
    "TaughtDataConfig",
    "TeacherConfig",
    "TopKTeacherConfig",
    "VLLMConfig",
    "WorkersConfig",
    "check_server_url",
    "run_roles",
    "server_urls",
]
