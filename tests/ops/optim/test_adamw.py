"""FusedAdamW against its formula in float64 and torch.optim.AdamW: numbers, masters, skipped steps."""

import copy
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlft_fast.ops import FusedAdamW, clip_coefficient, grad_norm
from rlft_fast.ops.optim import reference
from tests.ops.optim.adamw_problems import (
    NARROW,
    OPTIONS,
    SHAPES,
    as_parameters,
    assert_same_bits,
    bits,
    exact_steps,
    random_tensors,
    take_steps,
)
from tests.support.machine.devices import DEVICES
from tests.support.machine.launches import count_launches
from tests.support.machine.threads import num_threads
from tests.support.numerics import assert_no_further_from_truth


@pytest.mark.parametrize("device", DEVICES)
# The usual ones; no momentum at all and little of it, where the lerp goes the other way; no decay; slow moments.
@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        OPTIONS | {"betas": (0.0, 0.95)},
        OPTIONS | {"betas": (0.3, 0.0)},
        OPTIONS | {"weight_decay": 0.0},
        OPTIONS | {"betas": (0.99, 0.9999), "eps": 1e-8},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_further_from_the_formula_than_torch(dtype, options, device):
    initial = random_tensors(SHAPES, dtype, device)
    ours, theirs = as_parameters(initial), as_parameters(initial)
    optimizer, peer = FusedAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    take_steps(optimizer, 10)
    take_steps(peer, 10)
    flat = {"exp_avg": ([], [], []), "exp_avg_sq": ([], [], []), "weight": ([], [], [])}  # ours, theirs, the truth
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        gradients = [random_tensors(SHAPES, torch.float64, seed=n)[i] / n for n in range(1, 11)]
        truth = exact_steps(initial[i].cpu(), [gradient.to(dtype) for gradient in gradients], **options)
        assert optimizer.state[mine]["step"].item() == 10
        states = [
            optimizer.state[mine] | {"weight": mine},
            peer.state[other] | {"weight": other},
            truth | {"weight": truth["master"]},
        ]
        for key, lists in flat.items():
            for tensors, state in zip(lists, states, strict=True):
                tensors.append(state[key].detach().cpu().flatten())
    for lists in flat.values():
        mine, other, truth = map(torch.cat, lists)
        torch.testing.assert_close(mine, other, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)
        if dtype == torch.float32:
            assert_no_further_from_truth(mine, other, truth)


def test_without_momentum_the_moment_is_the_gradient():
    # m + (g - m) would be 0 here: the gradient is far below the last place of the moment before it.
    parameter = nn.Parameter(torch.zeros(100))
    optimizer = FusedAdamW([parameter], betas=(0.0, 0.9))
    for value in (1.0, 1e-12):
        parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    assert torch.equal(optimizer.state[parameter]["exp_avg"], parameter.grad)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 700)), max_size=5),
    st.integers(0, 7),
    st.sampled_from([torch.float32, *NARROW]),
)
def test_any_sizes_and_alignments(shapes, offset, dtype):
    buffers = random_tensors([(a * b + offset,) for a, b in shapes], dtype)
    prefixes = [buffer[:offset].clone() for buffer in buffers]
    ours = [nn.Parameter(buffer[offset:].view(shape)) for buffer, shape in zip(buffers, shapes, strict=True)]
    theirs = as_parameters([parameter.detach().float() for parameter in ours])
    gradients = random_tensors(shapes, dtype, seed=1)
    for mine, other, gradient in zip(ours, theirs, gradients, strict=True):
        mine.grad, other.grad = gradient, gradient.float()
    if shapes:
        FusedAdamW(ours, **OPTIONS).step()
        torch.optim.AdamW(theirs, **OPTIONS).step()
    for mine, other in zip(ours, theirs, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(mine.float(), other, rtol=tolerance, atol=1e-6)
    for buffer, prefix in zip(buffers, prefixes, strict=True):
        assert torch.equal(buffer[:offset], prefix)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *NARROW])
@pytest.mark.parametrize("offset", range(8))
def test_any_alignment_on_cuda(offset, dtype):
    buffer = random_tensors([(40_000 + offset,)], dtype)[0]
    on_device = buffer.cuda()
    ours, same = nn.Parameter(on_device[offset:]), nn.Parameter(buffer[offset:].clone())
    gradient = random_tensors([(40_000,)], dtype, seed=1)[0]
    for parameter in (ours, same):
        parameter.grad = gradient.to(parameter.device)
        FusedAdamW([parameter], **OPTIONS).step()
    torch.testing.assert_close(ours.detach().cpu(), same.detach())
    assert torch.equal(on_device[:offset].cpu(), buffer[:offset])


@pytest.mark.parametrize("device", DEVICES)
# Clipped, and not.
@pytest.mark.parametrize("max_norm", [0.1, 1e6, None])
def test_clipping_in_the_step_is_clipping_before_it(max_norm, device):
    initial = random_tensors(SHAPES, device=device)
    ours, theirs = as_parameters(initial), as_parameters(initial)
    states = [reference.adamw_state(tensor.cpu()) for tensor in initial]
    optimizer, peer = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for seed in range(5):
        gradients = random_tensors(SHAPES, device=device, seed=seed)
        exact, bad = reference.clip_coefficient(reference.grad_norm(gradients), max_norm)
        for state, gradient in zip(states, gradients, strict=True):
            reference.adamw_step(state, gradient.cpu(), **OPTIONS, coefficient=exact.item(), found_inf=bad.item())
            reference.adamw_step(state, gradient.cpu(), **OPTIONS, found_inf=1.0)  # changes nothing
        for mine, other, gradient in zip(ours, theirs, gradients, strict=True):
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        norm = grad_norm(ours)
        coefficient, found_inf = clip_coefficient(norm, max_norm)
        optimizer.step(coefficient=coefficient, found_inf=found_inf)
        nn.utils.clip_grad_norm_(theirs, max_norm if max_norm else math.inf)
        peer.step()
        # torch's fused kernel writes scaled gradients back; here they keep their bits.
        assert all(torch.equal(mine.grad, gradient) for mine, gradient in zip(ours, gradients, strict=True))
    for mine, other, state in zip(ours, theirs, states, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.detach().cpu(), state["master"].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes_groups_and_missing_gradients(device):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    initial = [random_tensors([(257, 3)], dtype, device, seed)[0] for seed, dtype in enumerate(dtypes)]
    together, alone = as_parameters(initial), as_parameters(initial)
    groups = [{"params": together[:3]}, {"params": together[3:], "lr": 0.1, "betas": (0.5, 0.5), "eps": 1e-3}]
    optimizer = FusedAdamW([*groups, {"params": [nn.Parameter(torch.ones(3, device=device))]}], **OPTIONS)
    missing = optimizer.param_groups[2]["params"][0]
    for i, parameter in enumerate(together + alone):
        parameter.grad = random_tensors([(257, 3)], parameter.dtype, device, seed=100 + i % 5)[0]
    optimizer.step()
    for i, parameter in enumerate(alone):
        options = OPTIONS if i < 3 else OPTIONS | {"lr": 0.1, "betas": (0.5, 0.5), "eps": 1e-3}
        FusedAdamW([parameter], **options).step()
        assert torch.equal(parameter, together[i])
        assert not torch.equal(parameter, initial[i])
    assert torch.equal(missing, torch.ones_like(missing))
    assert missing not in optimizer.state


def test_any_number_of_parameters():
    ours, theirs = (as_parameters(random_tensors([(i % 7,) for i in range(2000)])) for _ in range(2))
    take_steps(FusedAdamW(ours, **OPTIONS), 2)
    take_steps(torch.optim.AdamW(theirs, **OPTIONS, fused=True), 2)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
# Transposed, and channels-last; the gradients are contiguous.
@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 3, 1)])
def test_parameters_in_other_memory_orders(order, device):
    tensor = random_tensors([(4, 5, 6, 7)], device=device)[0]
    permuted = tensor.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    assert not permuted.is_contiguous()
    ours, plain = nn.Parameter(permuted), nn.Parameter(tensor)
    optimizer, peer = FusedAdamW([ours], **OPTIONS), FusedAdamW([plain], **OPTIONS)
    take_steps(optimizer, 2)
    take_steps(peer, 2)
    assert torch.equal(ours, plain)
    # State that was loaded, or was there before the layout changed, follows the parameter.
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    take_steps(optimizer, 1, first=3)
    take_steps(peer, 1, first=3)
    assert torch.equal(ours, plain)
    assert torch.equal(optimizer.state[ours]["exp_avg"], peer.state[plain]["exp_avg"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Every other column, a block of a larger matrix on its side, and rows with a gap.
@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x[:4, :5].t(), lambda x: x[:, 1:]])
def test_parameters_with_gaps(view, dtype, device):
    block = random_tensors([(6, 8)], dtype, device)[0]
    original, gappy = block.clone(), nn.Parameter(view(block))
    plain = nn.Parameter(view(original).contiguous())
    optimizer, peer = FusedAdamW([gappy], **OPTIONS), FusedAdamW([plain], **OPTIONS)
    take_steps(optimizer, 3)
    take_steps(peer, 3)
    assert torch.equal(gappy, plain)
    view(original).copy_(plain)
    assert torch.equal(block, original)  # what is in the gaps stays
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    take_steps(optimizer, 1, first=4)
    take_steps(peer, 1, first=4)
    assert torch.equal(gappy, plain)


def test_arguments_that_change_nothing_are_those_of_torch():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(optimizer).parameters.values()]
        for optimizer in (FusedAdamW, torch.optim.AdamW)
    )
    assert ours[:-2] == theirs
    assert [name for name, *_ in ours[-2:]] == ["moment_dtype", "offload_moments"]
    initial = random_tensors([(100,), (3, 5)])
    plain, optioned = as_parameters(initial), as_parameters(initial)
    options = {"foreach": True, "fused": True, "capturable": True, "amsgrad": False, "maximize": False}
    take_steps(FusedAdamW(plain, **OPTIONS), 2)
    take_steps(FusedAdamW(optioned, **OPTIONS, **options, differentiable=False), 2)
    for one, other in zip(plain, optioned, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_learning_rate_may_be_a_tensor(device):
    initial = random_tensors([(100,)], device=device)
    numbers, tensors, on_cpu = as_parameters(initial), as_parameters(initial), as_parameters(initial)
    rate = torch.tensor(0.125, device=device)
    optimizers = [
        FusedAdamW(numbers, lr=0.125), FusedAdamW(tensors, lr=rate), FusedAdamW(on_cpu, lr=torch.tensor(0.125)),
    ]  # fmt: skip
    for optimizer in optimizers:
        take_steps(optimizer, 1)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        take_steps(optimizer, 1, first=2)
    assert torch.equal(numbers[0], tensors[0])
    assert torch.equal(numbers[0], on_cpu[0])


def test_a_compiled_step_has_the_bits_of_a_step():
    """Dynamo took the state of the first of several parameters of one shape for that of the others."""
    initial = random_tensors([(4, 3)] * 3)
    plain, compiled = (FusedAdamW(as_parameters(initial), **OPTIONS) for _ in range(2))
    compiled.step = torch.compile(compiled.step, backend="eager")
    for optimizer in (plain, compiled):
        take_steps(optimizer, 3)
    assert_same_bits(bits(compiled), bits(plain))


def test_closure():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FusedAdamW([parameter], lr=0.1, weight_decay=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, -1.9]))


@pytest.mark.parametrize("device", DEVICES)
# Contiguous, and transposed.
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_through_weights_that_are_no_more_raises(dtype, view, device):
    parameter = nn.Parameter(view(random_tensors([(3, 4)], dtype, device)[0]))
    bystander = nn.Parameter(parameter.detach().clone())
    optimizer = FusedAdamW([parameter, bystander])
    losses = [p.square().sum() for p in (parameter, bystander)]
    losses[0].backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    losses[1].backward()  # it had no gradient, and did not change


# Threads meet within a piece, which one of them takes, and between two.
@pytest.mark.parametrize("shapes", [[(300_000,), (1000,), (77,)], [(4 * 16 * 1024,)]])
def test_result_does_not_depend_on_the_number_of_threads(shapes):
    results = []
    for count in (1, 2, 3):
        parameters = as_parameters(random_tensors(shapes))
        with num_threads(count):
            take_steps(FusedAdamW(parameters, **OPTIONS), 2)
        results.append(parameters)
    for other in results[1:]:
        assert_same_bits([p.detach() for p in other], [p.detach() for p in results[0]])


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts():
    # 36 GB. On the CPU the pieces are those of the gradient norm, which is tested with as many elements there.
    parameter = nn.Parameter(torch.zeros(2**31 + 5, dtype=torch.bfloat16, device="cuda"))
    parameter.grad = torch.zeros_like(parameter)
    places = [0, 1, 2**31 - 1, 2**31 + 4]
    parameter.grad[places] = 1.0
    FusedAdamW([parameter], lr=0.5, weight_decay=0.0).step()
    assert parameter[places].tolist() == [-0.5] * 4
    assert parameter.count_nonzero().item() == 4


@pytest.mark.gpu
def test_two_launches_per_dtype_and_no_sync_on_cuda():
    parameters = [
        nn.Parameter(tensor)
        for dtype in (torch.float32, torch.bfloat16)
        for tensor in random_tensors(SHAPES * 100, dtype, "cuda")
    ]
    optimizer = FusedAdamW(parameters, lr=torch.tensor(1e-3, device="cuda"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def clip_and_step() -> None:
        coefficient, found_inf = clip_coefficient(grad_norm(parameters), 1.0)
        optimizer.step(coefficient=coefficient, found_inf=found_inf)

    kernels = ["norm_chunks", "norm_groups", "scale_chunks", "count_steps", "update_chunks"]
    expected = {kernel: 2 for kernel in kernels if kernel != "scale_chunks"}
    assert count_launches(clip_and_step, kernels) == expected


# ---- masters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", NARROW)
def test_tiny_steps_add_up_in_the_master(dtype, device):
    initial = torch.ones(1000, dtype=dtype, device=device)
    ours, pure, full = (nn.Parameter(initial.clone()) for _ in range(3))
    full.data = full.data.float()
    options = {"lr": 1e-4, "weight_decay": 0.0}
    optimizer = FusedAdamW([ours], **options)
    peers = [torch.optim.AdamW([pure], **options), torch.optim.AdamW([full], **options)]
    for _ in range(200):
        for parameter in (ours, pure, full):
            parameter.grad = torch.full_like(parameter, 0.25)
        for each in (optimizer, *peers):
            each.step()
    assert torch.equal(pure, initial)  # an update is far below half a unit in the last place
    torch.testing.assert_close(optimizer.state[ours]["master"], full.detach(), rtol=1e-6, atol=0)
    assert torch.equal(ours, optimizer.state[ours]["master"].to(dtype))
    assert {key: x.dtype for key, x in optimizer.state[ours].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_gradients_of_another_dtype(dtype, gradient_dtype, device):
    initial = random_tensors([(5001,)], dtype, device)[0]
    ours, theirs = nn.Parameter(initial.clone()), nn.Parameter(initial.float())
    ours.grad_dtype = gradient_dtype
    ours.grad = random_tensors([(5001,)], gradient_dtype, device, seed=1)[0]
    theirs.grad = ours.grad.float()
    neighbour = nn.Parameter(initial.clone())  # whose gradient is of its own dtype: another list of the same group
    neighbour.grad = initial.clone()
    FusedAdamW([neighbour, ours], **OPTIONS).step()
    torch.optim.AdamW([theirs], **OPTIONS).step()
    rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(ours.float(), theirs, rtol=rounding, atol=1e-6)


# ---- skipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_norm_that_is_not_finite_skips_the_step_whole(steps_before, bad, device):
    tensors = [x for dtype in (torch.float32, torch.bfloat16) for x in random_tensors(SHAPES, dtype, device)]
    parameters, untouched = as_parameters(tensors), as_parameters(tensors)
    optimizer, peer = FusedAdamW(parameters, **OPTIONS), FusedAdamW(untouched, **OPTIONS)
    optimizer.initialize_state()
    peer.initialize_state()
    take_steps(optimizer, steps_before)
    take_steps(peer, steps_before)
    before = bits(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[-1].grad[69_999] = bad  # in one tensor only: all others must skip as well
    coefficient, found_inf = clip_coefficient(grad_norm(parameters), 1.0)
    optimizer.step(coefficient=coefficient, found_inf=found_inf)
    assert_same_bits(bits(optimizer), before)

    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    take_steps(optimizer, 1, first=5, coefficient=one, found_inf=zero)
    take_steps(peer, 1, first=5)
    assert_same_bits(bits(optimizer), bits(peer))
