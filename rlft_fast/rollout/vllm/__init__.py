"""Generators by vLLM.

checks           refuses settings with which vLLM cannot work here
colocated        vLLM inside the training process
separate         vLLM in a process beside the training
stepping         requests of many threads to a vLLM in another process
served           vLLM servers, on this machine or on others
asking           asks servers for samples
scheduling       which server samples what
server           one vLLM server: its start, its guard, its state
answers          what servers answer, checked
images           prompts with images, processed as the policy gets them
reload           weights that a reload of vLLM would lose
adapter          adapters that vLLM computes with, in place of merged weights
requests         vLLM's form of requests, and completions from its outputs
weight_sender    sends weights through sockets, once for any number of vLLMs
nccl_sender      sends weights to the GPUs of servers by vLLM's NCCL engine
worker           the receiving side of weights, which vLLM's workers import
"""

from rlft_fast.rollout.vllm.adapter import check_adapter
from rlft_fast.rollout.vllm.checks import check_vllm, transfer_backend
from rlft_fast.rollout.vllm.colocated import ColocatedVLLM
from rlft_fast.rollout.vllm.images import why_no_images
from rlft_fast.rollout.vllm.reload import check_transfer
from rlft_fast.rollout.vllm.requests import check_structured
from rlft_fast.rollout.vllm.scheduling import ServerError
from rlft_fast.rollout.vllm.separate import SeparateVLLM
from rlft_fast.rollout.vllm.served import ServedVLLM
from rlft_fast.rollout.vllm.server import (
    VLLMServer,
    model_fingerprint,
    server_command,
    server_environment,
    token_from_environment,
    weight_backend,
)

__all__ = [
    "ColocatedVLLM",
    "SeparateVLLM",
    "ServedVLLM",
    "ServerError",
    "VLLMServer",
    "check_adapter",
    "check_structured",
    "check_transfer",
    "check_vllm",
    "model_fingerprint",
    "server_command",
    "server_environment",
    "token_from_environment",
    "transfer_backend",
    "weight_backend",
    "why_no_images",
]
