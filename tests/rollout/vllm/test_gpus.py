"""Which GPUs vLLM gets, and when it takes their memory; without a GPU, and without vLLM."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlft_fast.config import RolloutConfig
from rlft_fast.config.schema.rollout import VLLMConfig
from rlft_fast.rollout import SampledModel
from rlft_fast.rollout.vllm.checks import _check_separate_gpus
from rlft_fast.rollout.vllm.colocated import VLLMGenerator, environment
from rlft_fast.rollout.vllm.separate import _init_info, _process_environment
from rlft_fast.world import World
from tests.support.runs.vllm_rollouts import needs_vllm


@pytest.mark.parametrize(
    ("transfer", "tensor_parallel", "local_rank", "gpus"),
    [("ipc", 1, 1, "3"), ("nccl", 1, 0, "6"), ("nccl", 1, 1, "7"), ("nccl", 2, 0, "6,7"), ("nccl", 2, 1, "8,9")],
)
def test_gpus_beside_the_trainers_of_the_same_machine(transfer, tensor_parallel, local_rank, gpus, monkeypatch):
    """Two trainers on this machine, of however many there are in all; the job has GPUs 2, 3, 6 and so on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7,8,9")
    config = VLLMConfig(process="separate", tensor_parallel=tensor_parallel)
    world = World(rank=local_rank, size=4, local_size=2, device=torch.device("cuda", local_rank))
    variables = _process_environment(world, config, transfer)
    assert variables["CUDA_VISIBLE_DEVICES"] == gpus


def test_too_few_gpus_are_refused():
    config = VLLMConfig(process="separate", transfer="nccl")
    _check_separate_gpus(config, "nccl", 8, trainers=4)
    with pytest.raises(ValueError, match=r"4 x \(1 \+ tensor_parallel 1\) on this machine, which has 7"):
        _check_separate_gpus(config, "nccl", 7, trainers=4)
    with pytest.raises(ValueError, match="tensor_parallel is 2, but with transfer ipc"):
        _check_separate_gpus(VLLMConfig(process="separate", tensor_parallel=2), "ipc", 8, trainers=4)


def test_a_process_beside_one_of_torchrun_has_a_store_of_its_own(monkeypatch):
    """Processes of torchrun use a store that torchrun keeps. vLLM's processes would wait for it forever."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with environment(_process_environment(World(), VLLMConfig(process="separate"), "socket")):
        store, rank, world_size = next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1, timeout=timedelta(seconds=5)))
        store.set("own", "yes")
        assert (store.get("own"), rank, world_size) == (b"yes", 0, 1)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@needs_vllm
def test_a_group_of_nccl_meets_on_its_own_machine(monkeypatch):
    """Where the environment of one machine is given to all."""
    monkeypatch.setenv("VLLM_HOST_IP", "203.0.113.7")
    info = _init_info("nccl", VLLMConfig(process="separate", transfer="nccl", tensor_parallel=2))
    socket.create_server((info.master_address, info.master_port)).close()
    assert info.world_size == 3


class Sleeping(VLLMGenerator):
    """A vLLM that only notes what it is told."""

    def __init__(self, done: list[str]) -> None:
        model = SampledModel(path="", dtype=torch.float32, device=torch.device("cuda"), vocab_size=9, eos_token_ids=[0])
        super().__init__(model, None, RolloutConfig(backend="vllm"), max_sequence_tokens=8)
        self.done = done
        self.llm = SimpleNamespace(
            wake_up=lambda parts: done.extend(parts),
            reset_prefix_cache=lambda: done.append("reset"),
            sleep=lambda level: None,
        )

    def _load(self, weights: object, version: int) -> None:
        self.done.append("load")


def test_torch_gives_memory_back_before_vllm_takes_it(monkeypatch):
    """Weights come back with the load; the key-value cache with the next request, when the policy has made room."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    generator = Sleeping(done)
    generator.sleep()
    generator.load(object(), version=1)
    assert done == ["empty_cache", "weights", "load"]
    generator._begin()
    assert done[3:] == ["empty_cache", "kv_cache", "reset"]
    assert not generator.asleep
    generator._begin()
    assert len(done) == 6
