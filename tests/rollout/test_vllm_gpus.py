"""Which GPUs vLLM gets, and when it takes their memory; without a GPU, and without vLLM."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlft_fast.config import RolloutConfig
from rlft_fast.config.rollout import VLLMConfig
from rlft_fast.rollout.vllm_engine import VLLMEngine, _check_separate_gpus
from rlft_fast.rollout.vllm_separate import _environment, _process_environment
from tests.engine.reference import make_engine


@pytest.mark.parametrize(
    ("transfer", "tensor_parallel", "local_rank", "gpus"),
    [("ipc", 1, 1, "3"), ("nccl", 1, 0, "6"), ("nccl", 1, 1, "7"), ("nccl", 2, 0, "6,7"), ("nccl", 2, 1, "8,9")],
)
def test_gpus_beside_the_trainers_of_the_same_machine(transfer, tensor_parallel, local_rank, gpus, monkeypatch):
    """Two trainers on this machine, of however many there are in all; the job has GPUs 2, 3, 6 and so on."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7,8,9")
    config = VLLMConfig(process="separate", tensor_parallel=tensor_parallel)
    environment = _process_environment(torch.device("cuda", local_rank), config, transfer)
    assert environment["CUDA_VISIBLE_DEVICES"] == gpus


def test_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = VLLMConfig(process="separate", transfer="nccl")
    _check_separate_gpus(config, "nccl", 8)
    with pytest.raises(ValueError, match=r"4 x \(1 \+ tensor_parallel 1\) on this machine, which has 7"):
        _check_separate_gpus(config, "nccl", 7)
    with pytest.raises(ValueError, match="tensor_parallel is 2, but with transfer ipc"):
        _check_separate_gpus(VLLMConfig(process="separate", tensor_parallel=2), "ipc", 8)


def test_a_process_beside_one_of_torchrun_has_a_store_of_its_own(monkeypatch):
    """Processes of torchrun use a store that torchrun keeps. vLLM's processes would wait for it forever."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with _environment(_process_environment(torch.device("cpu"), VLLMConfig(process="separate"), "shared_memory")):
        store, rank, world_size = next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1, timeout=timedelta(seconds=5)))
        store.set("own", "yes")
        assert (store.get("own"), rank, world_size) == (b"yes", 0, 1)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_torch_gives_memory_back_before_vllm_takes_it(tiny_model, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    server = VLLMEngine(make_engine(tiny_model("llama")), RolloutConfig(backend="vllm"))
    server.llm = SimpleNamespace(
        wake_up=lambda parts: done.extend(parts),
        reset_prefix_cache=lambda: done.append("reset"),
        sleep=lambda level: None,
    )
    server.sleeps = True
    server.sleep()
    with server._taking_weights(iter(())):
        done.append("load")
    assert done == ["empty_cache", "weights", "load", "empty_cache", "kv_cache", "reset"]
    assert not server.asleep
