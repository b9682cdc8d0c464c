"""Configuration of a training run: a YAML file plus dotted overrides, typed and validated, every key known.

The docstring under a field is its help text (``rlft-fast train --help``).
"""

from rlft_fast.config.algorithm import AlgorithmConfig
from rlft_fast.config.base import ConfigError, Section, sections, set_key
from rlft_fast.config.model import CriticConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from rlft_fast.config.rollout import RolloutConfig, VLLMConfig
from rlft_fast.config.run import CheckpointConfig, Config, DataConfig, EvaluationConfig, RewardConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "Section",
    "VLLMConfig",
    "sections",
    "set_key",
]
