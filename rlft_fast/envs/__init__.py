"""Environments: what answers a policy's messages, turn by turn, in processes that may hang or die."""

from rlft_fast.envs.doors import Environment, Message, Reply
from rlft_fast.envs.pool import EnvironmentClass, EnvironmentPool, Failed, Failure, Steps

__all__ = ["Environment", "EnvironmentClass", "EnvironmentPool", "Failed", "Failure", "Message", "Reply", "Steps"]
