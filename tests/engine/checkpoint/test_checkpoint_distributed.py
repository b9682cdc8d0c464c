"""Any number of processes continues the checkpoint of any other: 1 -> 2 -> 1 -> 4; the same number, bit for bit."""

import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rlft_fast.engine import CheckpointError, CheckpointManager, FSDPEngine, export_hf
from rlft_fast.engine.checkpoint.storage import load_tensors, local_parts, save_parts
from rlft_fast.world import World
from tests.engine import reference
from tests.engine.reference import make_engines, random_batch, state_of, step
from tests.support.machine.distributed import run_distributed

pytestmark = pytest.mark.dist

STATE = {"step": 3, "order": torch.arange(4)}
TOLERANCE = 1e-3  # of the largest magnitude, after a step of Adam on gradients that were added in another order


def assert_continues(engines: dict[str, FSDPEngine], expected: Path, seed: int) -> None:
    step(engines, seed)
    state = state_of(engines)
    if dist.get_rank() == 0:
        reference.assert_close(state, torch.load(expected), TOLERANCE)


def continue_on_two(rank: int, model: Path, directory: Path) -> None:
    engines = make_engines(model)
    state = CheckpointManager(directory / "one").load(engines)
    assert state is not None
    assert torch.equal(state.pop("order"), STATE["order"])
    assert state == {"step": 3}
    assert_continues(engines, directory / "one.pt", seed=1)

    manager = CheckpointManager(directory / "two", max_num=2)
    for number in (1, 2):
        manager.save(number, engines, {"step": number}, asynchronous=True)
    torch.manual_seed(rank)
    expected_draw = torch.rand(3)
    torch.manual_seed(rank)
    manager.save(3, engines, {"step": 3}, asynchronous=True)
    before = state_of(engines)
    step(engines, seed=2)  # while the files are written
    expected = state_of(engines)
    resumed = make_engines(model)
    assert manager.load(resumed) == {"step": 3}
    assert torch.equal(torch.rand(3), expected_draw)  # each process has its own random state again
    reference.assert_equal(state_of(resumed), before)
    step(resumed, seed=2)
    reference.assert_equal(state_of(resumed), expected)
    if rank == 0:
        torch.save(expected, directory / "two.pt")
    export_from_two(rank, engines["actor"], directory)
    fail_on_one_process(rank, manager, engines)
    leave_out_damaged(rank, manager, engines)


def export_from_two(rank: int, engine: FSDPEngine, directory: Path) -> None:
    export_hf(engine, directory / "hf", max_shard_bytes=30_000)
    batch = random_batch(seed=5)
    logprob_T = engine.infer(batch, ("logprob",))["logprob"]
    weights = reference.weights(engine)
    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(directory / "hf")
        reference.assert_equal(dict(model.named_parameters()), weights)
        plain_T, _ = reference.plain_logprob_and_entropy(directory / "hf", batch)
        torch.testing.assert_close(logprob_T.double(), plain_T, atol=2e-5, rtol=0)
    with pytest.raises(CheckpointError, match="could not export to"):  # rank 0 cannot write, and both say so
        export_hf(engine, directory / "one.pt" / "hf")


def fail_on_one_process(rank: int, manager: CheckpointManager, engines: dict[str, FSDPEngine]) -> None:
    """The second process cannot write; both are told, and the next save works."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    manager.save(4, engines, {}, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"step_00000004: .*The newest complete one is still .*step_00000003;"):
        manager.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert reference.names(manager.directory) == ["step_00000002", "step_00000003"]
    manager.save(5, engines, {})
    assert reference.names(manager.directory) == ["step_00000003", "step_00000005"]


def leave_out_damaged(rank: int, manager: CheckpointManager, engines: dict[str, FSDPEngine]) -> None:
    """The file of one process is damaged; all load the one before."""
    if rank == 0:
        (manager.directory / "step_00000005" / "critic" / "rank_00001.safetensors").write_bytes(b"half of")
    dist.barrier()
    if rank == 0:
        with pytest.warns(UserWarning, match=r"step_00000005 is damaged: critic/rank_00001\.safetensors has 7 bytes"):
            assert manager.load(engines) == {"step": 3}
    else:
        assert manager.load(engines) == {"step": 3}


def continue_on_four(_: int, model: Path, directory: Path) -> None:
    engines = make_engines(model)
    assert CheckpointManager(directory / "three").load(engines) == {"step": 4}
    assert_continues(engines, directory / "three.pt", seed=3)
    replicas_are_written_once(directory / "replicas")


def replicas_are_written_once(folder: Path) -> None:
    """Two copies of two shards, of sizes that do not divide; and a shard that is empty."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = {f"{size}x{i}": torch.arange(3 * size) + i for size in (1, 3, 7) for i in range(6)}
    full = {name: tensor.view(-1, 3) for name, tensor in full.items()}
    tensors = {name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]) for name, tensor in full.items()}
    tensors["whole"] = full["whole"] = torch.arange(5)
    world = World.current()
    save_parts(local_parts(tensors, world), folder / f"{world.rank}.safetensors")
    world.barrier()
    written = [load_file(path) for path in folder.iterdir()]
    assert sum(tensor.numel() for file in written for tensor in file.values()) == sum(t.numel() for t in full.values())
    assert all(file for file in written)  # every process had something to do
    for tensor in tensors.values():
        tensor.zero_()
    load_tensors(tensors, folder, world)
    reference.assert_equal({name: reference.full(tensor) for name, tensor in tensors.items()}, full)


@pytest.mark.slow
def test_other_numbers_of_processes_continue_alike(tiny_model, tmp_path):
    model = tiny_model("qwen2-tied")
    engines = make_engines(model)
    step(engines, seed=0)
    CheckpointManager(tmp_path / "one").save(3, engines, STATE)
    step(engines, seed=1)
    torch.save(state_of(engines), tmp_path / "one.pt")
    run_distributed(continue_on_two, 2, model, tmp_path)

    resumed = make_engines(model)
    with pytest.warns(UserWarning, match="step_00000005 is damaged"):
        assert CheckpointManager(tmp_path / "two").load(resumed) == {"step": 3}
    step(resumed, seed=2)
    reference.assert_close(state_of(resumed), torch.load(tmp_path / "two.pt"), TOLERANCE)
    CheckpointManager(tmp_path / "three").save(4, resumed, {"step": 4})
    step(resumed, seed=3)
    torch.save(state_of(resumed), tmp_path / "three.pt")
    run_distributed(continue_on_four, 4, model, tmp_path)


def save_apart(rank: int, model: Path, directory: Path) -> None:
    manager = CheckpointManager(directory / f"machine_{rank}")
    with pytest.raises(
        CheckpointError, match=r"does not see actor/rank_00001\.safetensors.* on a disk that they share"
    ):
        manager.save(1, {"actor": make_engines(model)["actor"]}, {})
    assert manager.latest() is None


def test_machines_that_share_no_disk_are_told_so(tiny_model, tmp_path):
    """At the first save, and not when the run is to be continued."""
    run_distributed(save_apart, 2, tiny_model("llama"), tmp_path)
