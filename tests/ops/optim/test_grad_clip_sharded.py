"""Gradient norm and clipping of sharded gradients: the norm and the scaled values are those of the unsharded ones."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from rlft_fast.ops.optim import clip_grad_norm_, grad_norm
from tests.ops.gradients import NORM_TYPES, CountCalls, exact_norm, parameter, random_gradients
from tests.support.machine.distributed import run_distributed


def full_gradients() -> list[Tensor]:
    """The same on every rank. The last has one row: with Shard(0) all ranks but one hold an empty part."""
    return random_gradients([(10, 6), (7, 5), (4,), (1, 3)], torch.float32)


def check_clipping(parameters: list[Tensor], full: list[Tensor], norm_type: float = 2.0, shift: int = 0) -> None:
    expected = exact_norm(full, norm_type)
    norm = clip_grad_norm_(iter(parameters[shift:] + parameters[:shift]), expected / 2, norm_type)
    assert not isinstance(norm, DTensor)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    for leaf, original in zip(parameters, full, strict=True):
        gradient = leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad
        torch.testing.assert_close(gradient, original / 2, rtol=1e-5, atol=1e-7)


def sharded(gradient: Tensor, mesh: DeviceMesh, *placements) -> Tensor:
    return parameter(distribute_tensor(gradient.clone(), mesh, placements))


def two_processes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    other_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    for norm_type in NORM_TYPES:
        a, b, c, d = full_gradients()
        parameters = [
            sharded(a, mesh, Shard(0)),
            sharded(b, other_mesh, Shard(1)),  # uneven: 3 and 2 columns
            sharded(c, mesh, Replicate()),
            sharded(d, mesh, Shard(0)),  # empty on rank 1
            parameter(a.clone()),
        ]
        # Ranks may list parameters in different orders: the collectives still pair up.
        check_clipping(parameters, [a, b, c, d, a], norm_type, shift=rank)

    # A rank without gradients joins the all-reduce of those that have them.
    missing = sharded(a, mesh, Shard(0))
    if rank == 1:
        missing.grad = None
    assert grad_norm(missing).item() == pytest.approx(exact_norm([a[:5]]), rel=1e-6)

    # A nan on one rank is seen by all.
    for norm_type in NORM_TYPES:
        broken = sharded(a, mesh, Shard(0))
        if rank == 1:
            broken.grad.to_local()[0, 0] = math.nan
        before = broken.grad.to_local().clone()
        norm = clip_grad_norm_([broken], 1e-3, norm_type)
        assert not norm.isfinite()
        assert torch.equal(broken.grad.to_local().nan_to_num(), before.nan_to_num())

    gradient, factor = distribute_tensor(a.clone(), mesh, [Shard(0)]), torch.ones((), requires_grad=True)
    product = (gradient * factor).sum()
    clip_grad_norm_(parameter(gradient), 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()

    partial = parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(ValueError, match=r"gradient 0 .* placement .*P.* on mesh dimension shard"):
        grad_norm([partial])


def count_all_reduces_and_passes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    full = full_gradients()
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: calls.append(tensor.numel()) or original(tensor, *args, **kwargs)
    grad_norm([sharded(gradient, mesh, Shard(0)) for gradient in full])
    grad_norm([sharded(gradient, mesh, Replicate()) for gradient in full])
    dist.all_reduce = original
    assert calls == [1]
    # However the gradients lie, they are read in one pass.
    placements = [Shard(0), Replicate(), Shard(0), Replicate()]
    parameters = [sharded(gradient, mesh, p) for gradient, p in zip(full, placements, strict=True)]
    with CountCalls() as counter:
        grad_norm([*parameters, parameter(full[0])])
    assert [name for name, _ in counter.calls] == ["multi_tensor_norm_pow"]


def fsdp_model(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    reference = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    reference.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(4, 6)
    for network in (model, reference):
        network(x).pow(2).sum().backward()
    check_clipping(list(model.parameters()), [leaf.grad for leaf in reference.parameters()])


def four_processes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for norm_type in (2.0, math.inf):
        a, b, c, d = full_gradients()
        parameters = [
            sharded(a, mesh, Replicate(), Shard(0)),  # hybrid sharding
            sharded(b, mesh, Shard(0), Shard(1)),
            sharded(c, mesh, Shard(0), Replicate()),
            sharded(d, mesh, Shard(0), Shard(0)),  # one row over four ranks
        ]
        check_clipping(parameters, [a, b, c, d], norm_type, shift=rank)

    fully_sharded_twice(mesh, rank)


def fully_sharded_twice(mesh: DeviceMesh, rank: int) -> None:
    """FSDP2 with replicas, and on top of tensor parallelism, whose shards are strided; one norm over both models."""

    def shard_rows(name: str, module: nn.Module, inner: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), inner, [Shard(0)]))
            module.bias = nn.Parameter(distribute_tensor(module.bias.detach(), inner, [Replicate()]))

    hybrid, tensor_parallel = (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)) for _ in range(2))
    fully_shard(hybrid, mesh=mesh)
    distribute_module(tensor_parallel, mesh["shard"], shard_rows)
    fully_shard(tensor_parallel, mesh=mesh["replicate"])
    parameters = [*hybrid.parameters(), *tensor_parallel.parameters()]
    full = random_gradients([tuple(leaf.shape) for leaf in parameters], torch.float32)
    for norm_type in NORM_TYPES:
        for leaf, gradient in zip(parameters, full, strict=True):
            leaf.grad = distribute_tensor(gradient.clone(), leaf.device_mesh, leaf.placements)
        check_clipping(parameters, full, norm_type, shift=rank)


@pytest.mark.dist
@pytest.mark.parametrize("function", [two_processes, count_all_reduces_and_passes, fsdp_model])
def test_two_processes(function):
    run_distributed(function, 2)


@pytest.mark.dist
def test_four_processes():
    run_distributed(four_processes, 4)
