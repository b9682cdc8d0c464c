"""FusedAdamW with sharded parameters: each step is that of the unsharded ones."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rlft_fast.ops import FusedAdamW, clip_coefficient, grad_norm
from rlft_fast.ops.optim import eight_bits
from rlft_fast.ops.optim.checks import local_part
from tests.ops.optim.adamw_problems import (
    OPTIONS,
    as_parameters,
    random_tensors,
)
from tests.support.machine.distributed import run_distributed


def two_processes(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        fully_sharded_model(rank, dtype)
    mixed_placements(rank)
    mesh = init_device_mesh("cpu", (2,))
    moments_in_8_bits(mesh)
    backward_through_old_weights(mesh)
    bad = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    bad.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"gradient 0 .* placements .*Partial.* redistribute"):
        FusedAdamW([bad]).step()


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 1)).to(dtype)  # rank 1 has nothing of the last


def fully_sharded_model(rank: int, dtype: torch.dtype) -> None:
    sharded, whole = make_model(dtype), make_model(dtype)
    fully_shard(sharded[0])
    fully_shard(sharded)
    # Where the moments of the shards wait makes no difference.
    optimizers = [FusedAdamW(x.parameters(), **OPTIONS, offload_moments=x is sharded) for x in (sharded, whole)]
    for seed in range(3):
        x = random_tensors([(4, 6)], dtype, seed=seed)[0]
        for model in (sharded, whole):
            model(x).square().sum().backward()
        for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            other.grad = mine.grad.full_tensor()  # the same bits on both sides: this is not about the backward pass
        for model, optimizer in zip((sharded, whole), optimizers, strict=True):
            coefficient, found_inf = clip_coefficient(grad_norm(model.parameters()), 0.1)
            optimizer.step(coefficient=coefficient, found_inf=found_inf)
            optimizer.zero_grad()
    compare_states(sharded, whole, *optimizers)

    # Through torch's sharded state dicts into a fresh optimizer.
    saved = get_optimizer_state_dict(sharded, optimizers[0])
    fresh = FusedAdamW(sharded.parameters(), lr=1.0)
    set_optimizer_state_dict(sharded, fresh, copy.deepcopy(saved))
    compare_states(sharded, whole, fresh, optimizers[1])
    assert fresh.param_groups[0]["lr"] == OPTIONS["lr"]


def compare_states(sharded: nn.Module, whole: nn.Module, *optimizers: FusedAdamW) -> None:
    for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-6)
        mine_state, other_state = optimizers[0].state[mine], optimizers[1].state[other]
        assert mine_state.keys() == other_state.keys()
        assert torch.equal(mine_state["step"], other_state["step"])
        for key in sorted(mine_state.keys() - {"step"}):  # gathered in the same order by all ranks
            assert mine_state[key].placements == mine.placements
            torch.testing.assert_close(mine_state[key].full_tensor(), other_state[key], rtol=1e-5, atol=1e-6)


def mixed_placements(rank: int) -> None:
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("shard", "expert")]
    full = random_tensors([(10, 6), (7, 5), (4,), (1, 3), (5,)])
    placements = [(0, Shard(0)), (1, Shard(1)), (0, Replicate()), (1, Shard(0))]
    sharded = [distribute_tensor(x, meshes[i], [p]) for x, (i, p) in zip(full, placements, strict=False)]
    ours, whole = [nn.Parameter(x) for x in (*sharded, full[4].clone())], as_parameters(full)
    optimizer, peer = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(whole, **OPTIONS)
    for seed in range(1, 3):
        gradients = random_tensors([x.shape for x in full], seed=seed)
        for i, (mine, other, gradient) in enumerate(zip(ours, whole, gradients, strict=True)):
            mine.grad = distribute_tensor(gradient, mine.device_mesh, mine.placements) if i < 4 else gradient.clone()
            other.grad = gradient.clone()
        coefficient, found_inf = clip_coefficient(grad_norm(ours), 0.5)
        optimizer.step(coefficient=coefficient, found_inf=found_inf)
        nn.utils.clip_grad_norm_(whole, 0.5)
        peer.step()
    for mine, other in zip(ours, whole, strict=True):
        result = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(result, other, rtol=1e-5, atol=1e-6)


def moments_in_8_bits(mesh: DeviceMesh) -> None:
    """Any rank rounds a row alike, to the same bits. Rows that no rank has whole keep their moments in float32."""
    eight_bits._CHUNK = 12  # several chunks of most parameters
    full = random_tensors([(7, 5), (1, 3), (6, 4), (2, 5, 3), (4, 5, 3)])
    placements = [Shard(0), Shard(0), Shard(1), Shard(1), Replicate()]
    sharded = [nn.Parameter(distribute_tensor(x, mesh, [p])) for x, p in zip(full, placements, strict=True)]
    whole = as_parameters(full)
    optimizers = [FusedAdamW(x, **OPTIONS, moment_dtype=torch.int8) for x in (sharded, whole)]
    gradients = random_tensors([x.shape for x in full], seed=1)
    for mine, other, gradient in zip(sharded, whole, gradients, strict=True):
        mine.grad, other.grad = distribute_tensor(gradient, mesh, mine.placements), gradient
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    for i, (mine, other) in enumerate(zip(sharded, whole, strict=True)):
        assert torch.equal(mine.full_tensor(), other) or i == 2
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (mine, other), strict=True)]
        assert ("exp_avg" in states[0]) == (i == 2)
        for key in (*eight_bits.CODES, *eight_bits.SCALES) if i != 2 else ():
            assert torch.equal(states[0][key].full_tensor(), states[1][key])
    model = nn.ParameterList(sharded)
    fresh = FusedAdamW(sharded, lr=1.0, moment_dtype=torch.int8)
    set_optimizer_state_dict(model, fresh, copy.deepcopy(get_optimizer_state_dict(model, optimizers[0])))
    for mine in sharded:
        saved, loaded = optimizers[0].state[mine], fresh.state[mine]
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(local_part(saved[key]), local_part(loaded[key])) for key in saved)


def backward_through_old_weights(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    loss = weight.square().sum()
    weight.grad = weight.detach().clone()
    FusedAdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.dist
def test_two_processes():
    run_distributed(two_processes, 2)
