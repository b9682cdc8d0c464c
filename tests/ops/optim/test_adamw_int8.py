"""Moments in 8 bits: codes are neighbours of the moment, right on average, and cost training nothing."""

import copy
import math

import pytest
import torch
from torch import Tensor

from rlft_fast.ops import FusedAdamW
from rlft_fast.ops.optim import eight_bits, host
from rlft_fast.ops.optim.eight_bits import CODE_OF, CODES, MOMENTS, SCALES, decoded, encode, scale_like
from tests.ops.optim.adamw_problems import (
    OPTIONS,
    as_parameters,
    assert_same_bits,
    bits,
    loss_curve,
    random_tensors,
    take_steps,
)
from tests.support.machine.devices import DEVICES

SHAPES = [(129, 7), (64,), (3, 5, 40), (4, 0), (0, 4)]


def sizes_of(fraction_bits: int, most: int) -> Tensor:
    """The sizes of the codes 0, 1, ..., most relative to the scale, from the definition."""
    whole = 1 << fraction_bits
    sizes = [2.0 ** (n // whole) * (1 + n % whole / whole) for n in range(-most, 1)]
    return torch.tensor([0.0, *sizes[1:]], dtype=torch.float64)


def coded(name: str, moment: Tensor, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment; the other moment is 0."""
    moments = [moment if key == name else torch.zeros_like(moment) for key in MOMENTS]
    codes = [torch.zeros_like(moment, dtype=code.dtype) for code in CODE_OF.values()]
    scales = [scale_like(moment) for _ in MOMENTS]
    encode(moments, codes, scales, seed, None)
    index = MOMENTS.index(name)
    return codes[index], scales[index]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MOMENTS)
def test_codes_are_the_neighbours_and_right_on_average(name, device, monkeypatch):
    monkeypatch.setattr(eight_bits, "_CHUNK", 2048)  # several chunks
    sizes = sizes_of(CODE_OF[name].fraction_bits, CODE_OF[name].most)
    share = sizes[100] + 0.3 * (sizes[101] - sizes[100])
    moment = torch.full((40, 500), 3 * share.item(), device=device)
    moment[:, 0] = 3.0
    if name == "exp_avg":
        moment[::2] *= -1
    step, means = torch.zeros((), device=device), []
    for number in range(2):
        codes, scale = coded(name, moment, eight_bits.seed_of(step, number))
        assert torch.equal(scale, moment.abs().amax(1, keepdim=True))
        assert codes[:, 0].abs().eq(CODE_OF[name].most).all()
        found = (decoded(codes, scale) / moment)[:, 1:].double() * share
        assert torch.isclose(found[..., None], sizes[100:102].to(device), rtol=1e-6).any(-1).all()
        means.append(((found - sizes[100]) / (sizes[101] - sizes[100])).round())
    up = torch.stack(means).flatten(1)
    assert (up.mean(1) - 0.3).abs().max() < 5 * math.sqrt(0.21 / up.shape[1])
    assert torch.corrcoef(up)[0, 1].abs() < 5 / math.sqrt(up.shape[1])


def test_extreme_rows():
    moment = torch.tensor([[0.0, 0.0], [1.0, 1e-30], [1e-44, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    first, second = (decoded(*coded(name, moment)) for name in MOMENTS)
    for found in (first, second):
        assert torch.equal(found[:3, 0], moment[:3, 0])
        assert not found[3:].isfinite().any()
    assert first[1, 1] == 0  # it is smaller than any code
    assert 0 < second[1, 1] < 2**-31  # its root divides
    assert torch.equal(first[2], moment[2])


def test_codes_of_torch_are_read_back():
    """Every code of both moments stands for what the definition says."""
    for code in CODE_OF.values():
        info = torch.iinfo(code.dtype)
        codes = torch.arange(max(info.min, -info.max), info.max + 1).to(code.dtype)[None]
        expected = sizes_of(code.fraction_bits, info.max)[codes.int().abs()] * codes.sign() * 3
        assert torch.equal(decoded(codes, torch.full((1, 1), 3.0)).double(), expected)


# Spread: the standard deviation of the curve over seeds, which is 3 to 12 % of the loss.
def test_200_steps_learn_as_with_float32_moments():
    wide, narrow = (
        torch.stack([loss_curve(dtype, seed).view(10, 20).mean(1) for seed in range(3)])
        for dtype in (torch.float32, torch.int8)
    )
    assert wide[:, -1].mean() < 0.1 * wide[:, 0].mean()
    assert ((narrow - wide).mean(0).abs() < 0.25 * wide.std(0)).all()


def optimizer_of(dtype: torch.dtype = torch.float32, device: str = "cpu", **options) -> FusedAdamW:
    parameters = as_parameters(random_tensors(SHAPES, dtype, device))
    return FusedAdamW(parameters, **(OPTIONS | {"moment_dtype": torch.int8} | options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_continues_bit_for_bit(dtype, device):
    first = optimizer_of(dtype, device)
    take_steps(first, 3)
    weights = [p for group in first.param_groups for p in group["params"]]
    resumed = FusedAdamW(as_parameters([*map(Tensor.detach, weights)]), lr=1.0, moment_dtype=torch.int8)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    copied = copy.deepcopy(first)
    for optimizer in (first, resumed, copied):
        take_steps(optimizer, 2, first=4)
    assert_same_bits(bits(resumed), bits(first))
    assert_same_bits(bits(copied), bits(first))
    assert ("exp_avg" in first.state[weights[0]]) == (dtype == torch.float64)
    assert "exp_avg" in first.state[weights[1]]  # of a vector


@pytest.mark.parametrize("device", DEVICES)
def test_in_cpu_memory_the_numbers_are_the_same(device):
    kept, moved = optimizer_of(device=device), optimizer_of(device=device, offload_moments=True)
    for optimizer in (kept, moved):
        take_steps(optimizer, 3)
    assert_same_bits([x.cpu() for x in bits(moved)], [x.cpu() for x in bits(kept)])


@pytest.mark.parametrize("moved", [False, True])
def test_buckets_do_not_change_the_rounding_and_share_none(moved, monkeypatch):
    """A rank with less of a parameter has other buckets, and replicas of a parameter have to stay equal."""
    found = []
    for size in (host.BUCKET_BYTES, 1):
        monkeypatch.setattr(host, "BUCKET_BYTES", size)
        parameters = as_parameters([torch.ones(30, 40), torch.ones(30, 40)])
        optimizer = FusedAdamW(parameters, lr=0.1, moment_dtype=torch.int8, offload_moments=moved)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
            optimizer.step()
        found.append(bits(optimizer))
        first, second = (optimizer.state[p]["exp_avg_code"] for p in parameters)
        assert not torch.equal(first, second)
    assert_same_bits(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_step_changes_no_moment(device):
    optimizer = optimizer_of(device=device)
    take_steps(optimizer, 1)
    before = bits(optimizer)
    take_steps(optimizer, 1, found_inf=torch.ones((), device=device))
    assert_same_bits(bits(optimizer), before)


def test_loaded_moments_are_converted():
    narrow, wide = optimizer_of(), optimizer_of(moment_dtype=torch.float32)
    for optimizer in (narrow, wide):
        take_steps(optimizer, 2)
    for optimizer, other in ((narrow, optimizer_of(moment_dtype=torch.bfloat16)), (wide, optimizer_of())):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
        for state, found in ((optimizer.state[p], other.state[q]) for p, q in pairs):
            for moment, expected in zip(moments_of(found), moments_of(state), strict=True):
                torch.testing.assert_close(moment, expected, rtol=0.13, atol=0.0)
        take_steps(other, 1, first=3)


def moments_of(state: dict[str, Tensor]) -> list[Tensor]:
    if "exp_avg" in state:
        return [state[key].float() for key in MOMENTS]
    return [decoded(state[code], state[scale]) for code, scale in zip(CODES, SCALES, strict=True)]


def test_bytes_are_those_of_the_state():
    optimizer = optimizer_of()
    optimizer.initialize_state()
    for parameter, state in optimizer.state.items():
        held = sum(tensor.nbytes for key, tensor in state.items() if key != "step")
        assert FusedAdamW.moment_bytes(parameter.shape, torch.int8) == held


def test_state_of_another_shape_is_refused():
    optimizer = optimizer_of()
    optimizer.initialize_state()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_scale"] = torch.zeros(129, 7)
    with pytest.raises(ValueError, match=r"exp_avg_scale has shape \(129, 7\), its parameter and rows \(129, 1\)"):
        optimizer.load_state_dict(state)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data = parameter.data.t().contiguous().t()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"codes of its rows, but it has strides \(1, 129\) now: make it contiguous"):
        optimizer.step()
