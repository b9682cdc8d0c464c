"""What a run asks of a cluster, and what the cluster has."""

import pytest

from rlft_fast.cluster.resources import parts_of, require_own_machine, require_room
from rlft_fast.config import ClusterConfig

NODE = {"CPU": 8.0, "GPU": 2.0, "memory": 64e9}


@pytest.mark.parametrize(
    ("cluster", "machines", "message"),
    [
        ({"actor": {"num_workers": 4, "gpus": 1}}, [NODE, NODE], None),
        ({"actor": {"num_workers": 2, "gpus": 1}, "generators": {"gpus": 2}}, [NODE, NODE], None),
        (
            {"actor": {"num_workers": 4, "gpus": 1}, "critic": {"gpus": 1}},
            [NODE, NODE],
            "the cluster has: actor 4 GPUs, critic 1 GPU, and the cluster has 4 GPUs",
        ),
        ({"actor": {"num_workers": 17}}, [NODE, NODE], "actor 17 CPUs, and the cluster has 16 CPUs"),
        # Groups with a fraction share GPUs, which are then whole.
        ({name: {"num_workers": 4, "gpus": 0.5} for name in ("actor", "critic")}, [NODE, NODE], None),
        (
            {name: {"num_workers": 2, "gpus": 0.5, "cpus": 5} for name in ("actor", "critic")},
            [NODE],
            "actor and critic 20 CPUs, and the cluster has 8 CPUs",
        ),
        (
            {"actor": {"num_workers": 4, "gpus": 0.25}, "critic": {"num_workers": 4, "gpus": 0.75}},
            [NODE, NODE | {"GPU": 1.0}],
            "actor and critic 4 GPUs, and the cluster has 3 GPUs",
        ),
        # The sum is enough, and no machine is.
        (
            {name: {"num_workers": 2, "gpus": 0.5, "cpus": 3} for name in ("actor", "critic")},
            [NODE, {"CPU": 4.0, "memory": 64e9}],
            "each 2 processes take 6 CPUs and 1 GPU and .*room for 1 of 2",
        ),
        ({"generators": {"gpus": 3}}, [NODE, NODE], "takes 1 CPU and 3 GPUs and .*room for 0 of 1"),
        ({"actor": {"num_workers": 3, "cpus": 5}}, [NODE, NODE], "takes 5 CPUs and .*room for 2 of 3"),
        (
            {"actor": {"num_workers": 500}},
            [{"CPU": 512, "memory": 24e9}],
            "before they load a model: actor 150.0 GB of memory, and the cluster has 24.0 GB of memory",
        ),
    ],
)
def test_what_machines_have_room_for(cluster, machines, message):
    parts = parts_of(ClusterConfig.model_validate(cluster))
    if message is None:
        require_room(parts, machines)
    else:
        with pytest.raises(ValueError, match=message):
            require_room(parts, machines)


def test_a_machine_of_ones_own_may_have_fewer_cores_than_workers():
    require_own_machine(ClusterConfig.model_validate({"actor": {"num_workers": 2, "cpus": 64}}))
    with pytest.raises(ValueError, match=r"actor 30000\.0 GB of memory, and the cluster has"):
        require_own_machine(ClusterConfig.model_validate({"actor": {"num_workers": 100_000}}))
