"""Moments in bfloat16: their rounding is one of the two neighbours, right on average, and costs training nothing."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from rlft_fast.ops import FusedAdamW
from tests.ops.optim.adamw_problems import (
    NARROW,
    OPTIONS,
    SHAPES,
    as_parameters,
    assert_same_bits,
    bits,
    loss_curve,
    random_tensors,
    take_steps,
)
from tests.support.machine.devices import DEVICES
from tests.support.machine.threads import num_threads

MOMENTS = ("exp_avg", "exp_avg_sq")


def pair(shapes, dtype=torch.float32, device="cpu", **options) -> tuple[FusedAdamW, FusedAdamW]:
    """Two optimizers of equal parameters, with moments in bfloat16 and in float32."""
    initial = random_tensors(shapes, dtype, device)
    return tuple(
        FusedAdamW(as_parameters(initial), **(OPTIONS | options), moment_dtype=moment_dtype)
        for moment_dtype in (torch.bfloat16, torch.float32)
    )


def moments(optimizer: FusedAdamW, key: str) -> Tensor:
    states = [optimizer.state[p][key] for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([state.flatten() for state in states])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_a_moment_is_rounded_to_a_neighbour(dtype, device):
    narrow, wide = pair(SHAPES, dtype, device)
    for optimizer in (narrow, wide):
        take_steps(optimizer, 1)
    for key in MOMENTS:
        rounded, exact = moments(narrow, key), moments(wide, key)
        assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        toward_zero = (exact.view(torch.int32) & -0x10000).view(torch.float32)
        away = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
        is_toward_zero, is_away = rounded.float() == toward_zero, rounded.float() == away
        assert (is_toward_zero | is_away).all()
        assert is_toward_zero.any()
        assert is_away.any()
        # The share that is rounded away from zero is the mean distance to the neighbour: 5 standard errors.
        expected = ((exact - toward_zero) / (away - toward_zero)).double()
        error = (is_away.double() - expected).mean().item()
        assert abs(error) < 5 * (expected * (1 - expected)).sum().sqrt().item() / len(expected)
    # The weights have moved by the moments before they were rounded.
    assert_same_bits(weights(narrow), weights(wide))


def weights(optimizer: FusedAdamW) -> list[Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def test_rounding_differs_by_element_moment_tensor_and_step():
    count = 20_000
    parameters = [nn.Parameter(torch.zeros(count)) for _ in range(2)]
    optimizer = FusedAdamW(parameters, betas=(0.0, 0.0), moment_dtype=torch.bfloat16)
    is_up = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1 + 2**-9)  # a quarter of the way from 1 to its neighbour
        optimizer.step()
        is_up += [optimizer.state[p][key] > 1 for p in parameters for key in MOMENTS]
    for share, expected in zip(torch.stack(is_up).double().mean(1), [0.25, 0.5] * 4, strict=True):
        assert abs(share - expected) < 5 * 0.5 / math.sqrt(count)
    correlation = torch.corrcoef(torch.stack(is_up).double())
    assert (correlation - torch.eye(8, dtype=torch.float64)).abs().max() < 5 / math.sqrt(count)


def test_a_moment_follows_where_rounding_to_nearest_stands_still():
    parameter = nn.Parameter(torch.zeros(50_000))
    optimizer = FusedAdamW([parameter], betas=(0.9, 0.999), moment_dtype=torch.bfloat16)
    expected = 0.0
    for size in [1.0] * 20 + [0.1] * 200:
        parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
        expected = 0.999 * expected + 0.001 * size**2
    exp_avg_sq = optimizer.state[parameter]["exp_avg_sq"].double()
    nearest = torch.tensor(exp_avg_sq[0].item() * 0.999 + 0.001 * 0.1**2).bfloat16().double()
    assert nearest == exp_avg_sq[0]
    assert exp_avg_sq.mean().item() == pytest.approx(expected, abs=5 * exp_avg_sq.std().item() / math.sqrt(50_000))
    assert exp_avg_sq.std() < 0.05 * expected


def test_200_steps_learn_as_with_float32_moments():
    """A network learns from another network's answers: the loss curve."""
    curves = [loss_curve(dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert curves[0][-50:].mean() < 0.1 * curves[0][:5].mean()
    ratio = curves[1].view(10, 20).mean(1) / curves[0].view(10, 20).mean(1)
    torch.testing.assert_close(ratio, torch.ones(10, dtype=torch.float64), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *NARROW])
def test_continues_bit_for_bit(dtype, device):
    narrow, _ = pair(SHAPES, dtype, device)
    take_steps(narrow, 3)
    resumed = FusedAdamW(as_parameters(weights(narrow)), lr=1.0, moment_dtype=torch.bfloat16)
    resumed.load_state_dict(copy.deepcopy(narrow.state_dict()))
    copied = copy.deepcopy(narrow)
    for optimizer in (narrow, resumed, copied):
        take_steps(optimizer, 2, first=4)
    assert_same_bits(bits(resumed), bits(narrow))
    assert_same_bits(bits(copied), bits(narrow))
    assert moments(narrow, "exp_avg").dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)


def test_loaded_moments_take_the_optimizers_dtype():
    narrow, wide = pair([(100,)])
    for optimizer, other in (pair([(100,)]), (wide, narrow)):
        take_steps(other, 2)
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        expected = [moments(other, key).to(optimizer.moment_dtype) for key in MOMENTS]
        assert_same_bits([moments(optimizer, key) for key in MOMENTS], expected)
        take_steps(optimizer, 1, first=3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_step_changes_no_moment(device):
    narrow, _ = pair(SHAPES, device=device)
    take_steps(narrow, 1)
    before = bits(narrow)
    take_steps(narrow, 1, found_inf=torch.ones((), device=device))
    assert_same_bits(bits(narrow), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad):
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = FusedAdamW([parameter], moment_dtype=torch.bfloat16)
    parameter.grad = torch.full_like(parameter, bad)
    optimizer.step()
    expected = torch.full((1000,), bad, dtype=torch.bfloat16)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], expected, equal_nan=True)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], expected.abs(), equal_nan=True)


def test_result_does_not_depend_on_the_number_of_threads():
    results = []
    for count in (1, 3):
        narrow, _ = pair([(300_000,), (77,)])
        with num_threads(count):
            take_steps(narrow, 2)
        results.append(bits(narrow))
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, "bfloat16"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=r"moment_dtype is .*, expected torch\.float32, torch\.bfloat16 or torch\.int8"):
        FusedAdamW([nn.Parameter(torch.ones(2))], moment_dtype=dtype)
