"""FusedAdamW against its formula in float64, torch.optim.AdamW, and unsharded copies of sharded parameters."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rlft_fast.ops import FusedAdamW, clip_coefficient, grad_norm
from tests.distributed import run_distributed
from tests.launches import count_launches
from tests.numerics import assert_no_further_from_truth

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, requires_gpu])]
NARROW = [torch.bfloat16, torch.float16]
# Scalar, empty, shorter than a vector, not a multiple of one, and longer than a piece (16 Ki) and a chunk (32 Ki).
SHAPES = [(), (0,), (3,), (129, 7), (70_001,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def random_tensors(shapes, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def as_parameters(tensors: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.clone()) for tensor in tensors]


def take_steps(optimizer: torch.optim.Optimizer, count: int, *, first: int = 1, **options) -> None:
    """Steps with gradients that depend only on the number of the step, of falling size as in training."""
    for number in range(first, first + count):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = random_tensors([p.shape for p in parameters], torch.float64, seed=number)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = (gradient / number).to(parameter.device, parameter.dtype)
        optimizer.step(**options)


def reference_step(state: dict[str, Tensor], gradient: Tensor, lr: float, betas, eps: float, weight_decay: float):
    """The formula, in the dtype of the state's tensors, which it changes in place."""
    beta1, beta2 = betas
    state["step"] += 1
    state["exp_avg"].mul_(beta1).add_((1 - beta1) * gradient)
    state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * gradient**2)
    m = state["exp_avg"] / (1 - beta1 ** state["step"])
    v = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
    state["weight"].mul_(1 - lr * weight_decay).sub_(lr * m / (v.sqrt() + eps))


def reference(weight: Tensor, gradients: list[Tensor], **options) -> dict[str, Tensor]:
    weight = weight.double()
    state = {"weight": weight.clone(), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    state["step"] = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        reference_step(state, gradient.double(), **options)
    return state


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of everything that a step may change."""
    tensors = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        tensors += [parameter.detach().clone(), *(state[key].clone() for key in sorted(state))]
    return tensors


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ---- numbers -------------------------------------------------------------------------------------------------------


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
        truth = reference(initial[i].cpu(), [gradient.to(dtype) for gradient in gradients], **options)
        assert optimizer.state[mine]["step"].item() == 10
        states = [optimizer.state[mine] | {"weight": mine}, peer.state[other] | {"weight": other}, truth]
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


@settings(max_examples=50, deadline=None)
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
@requires_gpu
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
    optimizer, peer = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for seed in range(5):
        gradients = random_tensors(SHAPES, device=device, seed=seed)
        for mine, other, gradient in zip(ours, theirs, gradients, strict=True):
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        norm = grad_norm(ours)
        coefficient, found_inf = clip_coefficient(norm, max_norm)
        optimizer.step(coefficient=coefficient, found_inf=found_inf)
        nn.utils.clip_grad_norm_(theirs, max_norm if max_norm else math.inf)
        peer.step()
        # torch's fused kernel writes scaled gradients back; here they keep their bits.
        assert all(torch.equal(mine.grad, gradient) for mine, gradient in zip(ours, gradients, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


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


def test_result_does_not_depend_on_the_number_of_threads():
    results, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        parameters = as_parameters(random_tensors([(300_000,), (1000,), (77,)]))
        take_steps(FusedAdamW(parameters, **OPTIONS), 2)
        results.append(parameters)
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same_bits([p.detach() for p in other], [p.detach() for p in results[0]])


@pytest.mark.gpu
@requires_gpu
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
@requires_gpu
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
    FusedAdamW([ours], **OPTIONS).step()
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


# ---- state ---------------------------------------------------------------------------------------------------------


def through_a_file(state_dict: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *NARROW])
def test_continues_bit_for_bit(dtype, device):
    parameters = as_parameters(random_tensors(SHAPES, dtype, device))
    optimizer = FusedAdamW(parameters, **OPTIONS)
    take_steps(optimizer, 3)
    resumed = FusedAdamW(as_parameters([p.detach() for p in parameters]), lr=1.0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_bits(bits(resumed), bits(optimizer))
    take_steps(optimizer, 2, first=4)
    take_steps(resumed, 2, first=4)
    assert_same_bits(bits(resumed), bits(optimizer))


@pytest.mark.parametrize("device", DEVICES)
# Its step counts lie on the CPU unless it is fused or capturable.
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_loads_what_torch_saved_and_torch_loads_ours(options, device):
    initial = random_tensors(SHAPES, device=device)
    theirs = torch.optim.AdamW(as_parameters(initial), **OPTIONS, **options)
    take_steps(theirs, 3)
    weights = [p.detach() for p in theirs.param_groups[0]["params"]]
    ours = FusedAdamW(as_parameters(weights))
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    take_steps(ours, 2, first=4)
    take_steps(theirs, 2, first=4)
    for mine, other in zip(bits(ours), bits(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, check_device=False)

    for saved in (ours, FusedAdamW(as_parameters(weights), **OPTIONS)):  # with torch's other options, and without
        take_steps(saved, 1, first=6)
        back = torch.optim.AdamW(as_parameters([p.detach() for p in saved.param_groups[0]["params"]]), **options)
        back.load_state_dict(through_a_file(saved.state_dict()))
        take_steps(saved, 2, first=7)
        take_steps(back, 2, first=7)
        for mine, other in zip(bits(saved), bits(back), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, check_device=False)


@pytest.mark.parametrize("dtype", NARROW)
def test_loads_torchs_state_of_narrow_parameters(dtype):
    theirs = torch.optim.AdamW(as_parameters(random_tensors(SHAPES, dtype)), **OPTIONS)
    take_steps(theirs, 2)
    weights = [p.detach() for p in theirs.param_groups[0]["params"]]
    ours = FusedAdamW(as_parameters(weights))
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    ours.initialize_state()
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[mine][key], theirs.state[other][key].float())
        assert torch.equal(ours.state[mine]["master"], other.float())


def test_hooks_see_and_change_what_is_loaded():
    optimizer = FusedAdamW(as_parameters(random_tensors([(5,)])))
    take_steps(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())

    def double(_, state_dict):
        return state_dict | {"state": {0: state_dict["state"][0] | {"exp_avg": torch.full((5,), 7.0)}}}

    optimizer.register_load_state_dict_pre_hook(double)
    for _ in range(2):
        optimizer.load_state_dict(saved)
        assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"], torch.full((5,), 7.0))


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr is -1\.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\)"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0\.9, 1\.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas are \(-0\.1, 0\.9\)"),
        ({"betas": (0.9,)}, r"betas are \(0\.9,\)"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        ({"amsgrad": True}, "amsgrad is on"),
        ({"maximize": True}, "maximize is on"),
        ({"differentiable": True}, "differentiable is on"),
    ],
)
def test_bad_options_are_named(options, message):
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        FusedAdamW([{"params": [parameter], **options}])
    optimizer = FusedAdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("parameter", "gradient", "error", "message"),
    [
        (torch.eye(2), torch.eye(2).to_sparse(), ValueError, "layout torch.sparse_coo, expected a dense one"),
        (torch.ones(2, dtype=torch.complex64), None, TypeError, "complex64, expected"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), TypeError, "float64, expected float32"),
        (torch.ones(2, dtype=torch.float64), torch.ones(2), TypeError, "float32, expected float64"),
        (torch.ones(3).expand(2, 3), None, ValueError, r"strides \(0, 1\), which leave gaps or overlap"),
        (torch.ones(4, 6)[:, ::2], None, ValueError, r"strides \(6, 2\), which leave gaps or overlap"),
    ],
)
def test_bad_gradients_are_named_before_anything_changes(parameter, gradient, error, message):
    good, bad = nn.Parameter(torch.ones(2)), parameter.detach().requires_grad_()
    optimizer = FusedAdamW([good])
    take_steps(optimizer, 1)
    before = bits(optimizer)
    optimizer.add_param_group({"params": [bad]})
    bad.grad_dtype = None
    bad.grad = torch.ones_like(bad) if gradient is None else gradient
    with pytest.raises(error, match=message):
        optimizer.step()
    optimizer.param_groups.pop()
    assert_same_bits(bits(optimizer), before)


@pytest.mark.parametrize("name", ["coefficient", "found_inf"])
@pytest.mark.parametrize(
    ("scalar", "error", "message"),
    [
        (0.5, TypeError, r"is 0\.5, expected a 0-d float32"),
        (torch.ones((), dtype=torch.float64), TypeError, "is torch.float64"),
        (torch.ones(2), TypeError, r"is torch.float32 of shape \(2,\)"),
        (torch.ones((), device="meta"), ValueError, r"is on meta, parameters are on cpu: pass .*\.to\('cpu'\)"),
    ],
)
def test_bad_scalars_are_named_before_anything_changes(name, scalar, error, message):
    optimizer = FusedAdamW(as_parameters(random_tensors([(3,)])))
    take_steps(optimizer, 1)
    before = bits(optimizer)
    with pytest.raises(error, match=f"{name} {message}"):
        optimizer.step(**{name: scalar})
    assert_same_bits(bits(optimizer), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad is on"),
        (lambda p: torch.optim.Adam(p), "decoupled_weight_decay is False"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "no betas, eps"),
        (lambda p: torch.optim.AdamW([*p, torch.ones(1)]), "doesn't match the size"),
        (lambda p: torch.optim.AdamW([torch.ones(4)]), r"exp_avg has shape \(4,\), its parameter \(3,\)"),
    ],
)
def test_bad_state_dicts_are_named(options, message):
    parameters = as_parameters(random_tensors([(3,)]))
    other = options(as_parameters(random_tensors([(3,)])))
    take_steps(other, 1)
    optimizer = FusedAdamW(parameters)
    take_steps(optimizer, 2)
    before, groups = bits(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert_same_bits(bits(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, device):
    lists = [random_tensors([(3,), (4, 5)], dtype, device, seed) for seed in range(2)]
    lists += [[x.float() for x in lists[0]], [x.float().square() for x in lists[0]]]
    masters = [] if dtype == torch.float32 else [x.float() for x in lists[0]]
    steps = [torch.ones((), device=device) for _ in range(2)]
    zero, half = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    for scalars in ((None, None, None), (half, half, zero)):
        arguments = (*lists, masters, steps, 1e-3, scalars[0], 0.9, 0.99, 0.1, 1e-8, *scalars[1:])
        torch.library.opcheck(torch.ops.rlft_fast.multi_tensor_adamw_.default, arguments)


# ---- sharded parameters: each step is that of the unsharded ones ---------------------------------------------------


def two_processes(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        fully_sharded_model(rank, dtype)
    mixed_placements(rank)
    mesh = init_device_mesh("cpu", (2,))
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
    optimizers = [FusedAdamW(model.parameters(), **OPTIONS) for model in (sharded, whole)]
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


@pytest.mark.dist
def test_two_processes():
    run_distributed(two_processes, 2)
