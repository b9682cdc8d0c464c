"""Groups that share GPUs: where their workers are, what a pool refuses, and the numbers of groups apart."""

import importlib.util
import sys

import pytest
import torch
from safetensors.torch import load_file

from rlft_fast.cluster import (
    ONE_TO_ALL,
    ResourcePool,
    Worker,
    WorkerGroup,
    connect,
    register,
)
from rlft_fast.trainer import train
from tests.trainer.toy import comparable, read_lines, toy_config

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Four GPUs that Ray counts, and that the machine need not have: without them, workers compute on the CPU."""
    import ray

    connect()  # to a cluster that the process leaves: its head is gone, and is not asked later
    ray.shutdown()
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    connect()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory):
    return toy_config(tiny_model("llama"), tmp_path_factory.mktemp("run"))


class Place(Worker):
    """A worker that tells where it is."""

    @staticmethod
    def engine_configs(config):
        return {}

    @register(ONE_TO_ALL)
    def gpus(self):
        import ray

        assert ray.get_runtime_context().get_assigned_resources()["GPU"] < 1
        return ray.get_gpu_ids()


class Other(Place):
    """Of another group."""


def test_workers_of_a_rank_share_a_gpu(config):
    with (
        ResourcePool("both", 2, cpus=2, processes=2) as pool,
        WorkerGroup(Place, config, 2, gpus=0.75, pool=pool) as first,
        WorkerGroup(Other, config, 2, gpus=0.25, pool=pool) as second,
    ):
        found = first.gpus()
        assert sorted(len(ids) for ids in found) == [1, 1]
        assert found[0] != found[1]
        assert second.gpus() == found
        with pytest.raises(
            ValueError, match=r"Other asks for 0.25 GPU at each place, and the pool both has 0 left there"
        ):
            WorkerGroup(Other, config, 2, gpus=0.25, pool=pool)
        second.close()
        with pytest.raises(ValueError, match=r"Other has 3 workers, and the pool both has 2 places"):
            WorkerGroup(Other, config, 3, gpus=0.25, pool=pool)
        with WorkerGroup(Other, config, 2, gpus=0.25, pool=pool) as again:  # in the place of the group that has ended
            assert again.gpus() == found


def test_what_a_pool_cannot_have_is_refused(config):
    with pytest.raises(ValueError, match="both 5 GPUs, and the cluster has 4 GPUs"):
        ResourcePool("both", 5)
    with pytest.raises(ValueError, match=r"gpus is 0\.5, expected 0 or 1; workers with a share of a GPU need the pool"):
        WorkerGroup(Place, config, 2, gpus=0.5)


def test_a_run_has_the_numbers_of_groups_apart(tiny_model, tmp_path):
    """PPO with critic and reference, once on a shared GPU, and once on a GPU for each of two groups."""
    shares = {"num_workers": 1, "gpus": 0.5}
    pools = {
        "shared": {"actor": shares, "critic": shares},
        "apart": {name: shares | {"gpus": 1} for name in ("actor", "critic")},
    }
    engine = {"max_tokens": 64, "compute_dtype": "float32", "compile": False}
    for name, groups in pools.items():
        values = {
            "algorithm__advantage": "gae", "algorithm__kl_coef": 0.1, "algorithm__kl_in": "loss", "critic": engine,
            "cluster": {"address": "auto"} | groups, "steps": 2, "output_dir": str(tmp_path / name),
        }  # fmt: skip
        train(toy_config(tiny_model("llama"), tmp_path, **values, **{f"actor__{k}": v for k, v in engine.items()}))
    assert comparable(tmp_path / "shared") == comparable(tmp_path / "apart")
    shared, apart = (read_lines(tmp_path / name / "metrics.jsonl") for name in pools)
    for one, other in zip(shared, apart, strict=True):  # the same operations, on one device and on two
        work = [one["tflops_update"] * one["seconds_update"], 2 * other["tflops_update"] * other["seconds_update"]]
        assert work[0] == pytest.approx(work[1], rel=1e-6)
        for row in (one, other):
            of_workers = [value for name, value in row.items() if name.startswith("seconds_")]
            assert 0 < sum(of_workers) < row["seconds"]
            assert 0 <= row["idle_share_generate"] < 1
    one, other = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in pools)
    assert all(torch.equal(one[name], other[name]) for name in one)
