"""Gradient norm and clipping against the room's reference in float64 and torch.nn.utils."""

import contextlib
import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlft_fast.ops import FusedAdamW
from rlft_fast.ops.optim import clip_coefficient, clip_grad_norm_, grad_norm, reference
from tests.ops.gradients import NORM_TYPES, CountCalls, exact_norm, parameter, random_gradients
from tests.support.machine.devices import DEVICES
from tests.support.machine.launches import EMULATED, count_launches
from tests.support.machine.threads import num_threads

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Scalar, empty, shorter than a vector, not a multiple of one, and longer than one piece (64 Ki) and one chunk (32 Ki).
SHAPES = [(), (0,), (3,), (129, 7), (70_001,)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_scaling(dtype, norm_type, device):
    gradients = random_gradients(SHAPES, dtype, device)
    originals = [gradient.clone() for gradient in gradients]
    parameters = [parameter(gradient) for gradient in gradients]
    expected = exact_norm(originals, norm_type)
    norm = grad_norm(parameters, norm_type)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    assert norm.dtype == compute
    assert norm.shape == ()
    assert norm.item() == pytest.approx(expected, rel=1e-13 if dtype == torch.float64 else 1e-6)

    assert torch.equal(clip_grad_norm_(parameters, expected / 2, norm_type), norm)
    coefficient = clip_coefficient(norm, expected / 2).coefficient.item()
    assert coefficient == pytest.approx(0.5, rel=1e-5)
    if dtype == torch.float64:
        coefficient = (1 / (norm + 1e-6) * (expected / 2)).item()
    for gradient, original in zip(gradients, originals, strict=True):
        assert torch.equal(gradient, (original.to(compute) * coefficient).to(dtype))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(0, 7), st.sampled_from(DTYPES))
def test_any_sizes_and_alignments(sizes, offset, dtype):
    buffers = random_gradients([(size + offset,) for size in sizes], dtype)
    gradients = [buffer[offset:] for buffer in buffers]
    prefixes = [buffer[:offset].clone() for buffer in buffers]
    expected = exact_norm([*gradients, torch.zeros(1)])
    assert clip_grad_norm_([parameter(g) for g in gradients], 1e-2).item() == pytest.approx(expected, rel=1e-6)
    for buffer, prefix in zip(buffers, prefixes, strict=True):
        assert torch.equal(buffer[:offset], prefix)
    assert exact_norm([*gradients, torch.zeros(1)]) == pytest.approx(min(expected, 1e-2), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", range(8))
def test_any_alignment_on_cuda(offset):
    for dtype in DTYPES:
        buffer = random_gradients([(40_000 + offset,)], dtype, "cuda")[0]
        original = buffer.clone()
        gradient = buffer[offset:]
        expected = exact_norm([gradient])
        assert clip_grad_norm_(parameter(gradient), expected / 2).item() == pytest.approx(expected, rel=1e-6)
        assert torch.equal(buffer[:offset], original[:offset])
        torch.testing.assert_close(gradient, original[offset:] / 2)


@pytest.mark.parametrize("device", DEVICES)
def test_agrees_with_torch(device):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 7)).to(device)
    theirs = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 7)).to(device)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 30, device=device)
    for model in (ours, theirs):
        model(x).pow(2).sum().backward()
    # A generator, as model.parameters() is: it must not be consumed twice.
    norm = clip_grad_norm_(ours.parameters(), 0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


# Of one gradient and of many; squares of the last leave float64's range, where torch's norm of many is inf.
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e50, 1e150, 2e200])
@pytest.mark.parametrize("size", [1, 1000])
def test_float64_gradients_are_clipped_as_in_torch(magnitude, size):
    ours = [magnitude * torch.linspace(0.5, 1, size, dtype=torch.float64), torch.empty(0, dtype=torch.float64)]
    theirs = [parameter(gradient.clone()) for gradient in ours]
    exact = math.hypot(*ours[0].tolist())
    norm = clip_grad_norm_([parameter(gradient) for gradient in ours], 0.25)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(exact, rel=1e-14)
    expected = nn.utils.clip_grad_norm_(theirs, 0.25)
    if expected.isfinite():
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(ours[0], theirs[0].grad, rtol=1e-14, atol=0)
    else:
        assert exact_norm(ours) == pytest.approx(0.25, rel=1e-14)


def test_the_norm_without_overflow_sees_what_is_not_finite():
    gradient = torch.full((4,), 2e200, dtype=torch.float64)
    gradient[2] = math.nan
    assert not clip_grad_norm_(parameter(gradient), 1.0).isfinite()
    assert gradient[0] == 2e200
    assert grad_norm(parameter(gradient[:2]), 0.001).isinf()  # (2 * 2e200 ** 0.001) ** 1000 is beyond float64


def test_signature_is_that_of_torch():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (clip_grad_norm_, nn.utils.clip_grad_norm_)
    )
    assert ours == theirs


def test_any_number_of_tensors_goes_in_one_pass_per_dtype():
    # Tables in kernel parameters hold 110 tensors in other libraries, and a dtype is taken from the first one in some.
    gradients = [torch.full((i % 5,), 1.0, dtype=DTYPES[1 + i % 2]) for i in range(3000)]
    parameters = [parameter(gradient) for gradient in gradients]
    expected = exact_norm(gradients)
    with CountCalls() as counter:
        norm = clip_grad_norm_(parameters, expected / 2)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert exact_norm(gradients) == pytest.approx(expected / 2, rel=1e-5)
    names = ["multi_tensor_norm_pow"] * 2 + ["multi_tensor_scale_"] * 2
    assert counter.calls == [(name, 1200) for name in names]  # 600 tensors are empty


# Squares and higher powers of these leave float32's range on both sides, the norms do not.
@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_powers_may_leave_the_range_of_float32(magnitude, norm_type):
    for dtype in (torch.float32, torch.float64):
        gradient = magnitude * random_gradients([(1000,)], dtype)[0]
        assert grad_norm(parameter(gradient), norm_type).item() == pytest.approx(exact_norm([gradient], norm_type))


def test_more_elements_than_an_int32_counts():
    # Fresh zeros that are only read take no memory. The last element lies beyond 2^32 bytes and 2^31 elements.
    gradient = torch.from_numpy(np.zeros(2**31 + 5, dtype=np.int16)).view(torch.bfloat16)
    gradient[0], gradient[2**31 - 1], gradient[-1] = 2.0, 3.0, 6.0
    assert grad_norm(gradient_only(gradient)).item() == 7.0


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts_on_cuda():
    gradient = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    gradient[0], gradient[2**31 - 1], gradient[-1] = 2.0, 3.0, 6.0
    assert clip_grad_norm_(gradient_only(gradient), 3.5).item() == 7.0
    assert [gradient[i].item() for i in (0, 1, 2**31 - 1, -1)] == [1.0, 0.0, 1.5, 3.0]


def gradient_only(gradient: Tensor) -> Tensor:
    """A parameter that has this gradient and no memory of its own."""
    leaf = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape).requires_grad_()
    leaf.grad = gradient
    return leaf


@pytest.mark.gpu
def test_two_launches_no_sync_and_the_same_bits_on_cuda():
    gradients = [g for dtype in (torch.float32, torch.bfloat16) for g in random_gradients(SHAPES * 50, dtype, "cuda")]
    parameters = [parameter(gradient) for gradient in gradients]
    norms = [grad_norm(parameters) for _ in range(3)]
    assert norms[0].item() == norms[1].item() == norms[2].item()
    counts = count_launches(lambda: clip_grad_norm_(parameters, 1.0), ["norm_chunks", "norm_groups", "scale_chunks"])
    assert counts == {"norm_chunks": 2, "norm_groups": 2, "scale_chunks": 2}  # once per dtype


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_offloaded_gradients_beside_those_on_the_device(norm_type):
    full = random_gradients([(1000,), (77,)], torch.float32)
    for devices in (("cpu", "cuda"), ("cuda", "cpu")):
        parameters = [parameter(gradient.to(device, copy=True)) for gradient, device in zip(full, devices, strict=True)]
        expected = exact_norm(full, norm_type)
        norm = clip_grad_norm_(parameters, expected / 2, norm_type)
        assert norm.device == parameters[0].device
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        for leaf, original in zip(parameters, full, strict=True):
            torch.testing.assert_close(leaf.grad.cpu(), original / 2)


def test_mixed_dtypes_missing_gradients_and_duplicates():
    gradients = [random_gradients([(11,)], dtype)[0] for dtype in DTYPES]
    parameters = [parameter(gradient) for gradient in gradients]
    norm = grad_norm([*parameters, parameters[0], torch.ones(5, requires_grad=True), torch.ones(5)])
    assert norm.item() == pytest.approx(exact_norm(gradients), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
# Dense in another order, with gaps, and a whole row of gaps.
@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[::2]])
def test_gradient_need_not_be_contiguous(view, device):
    storage = random_gradients([(6, 8)], torch.float32, device)[0]
    original = storage.clone()
    gradient = view(storage)
    expected = exact_norm([gradient])
    norm = clip_grad_norm_(parameter(gradient), expected / 2)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, view(original) / 2)
    view(original).div_(2)
    torch.testing.assert_close(storage, original)


# In one piece, in another order, and with gaps.
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[:, ::2]])
def test_a_graph_that_needs_the_gradient_as_it_was_sees_that_it_changed(view):
    gradient, factor = view(torch.ones(6, 8)), torch.ones((), requires_grad=True)
    product = (gradient * factor).sum()
    clip_grad_norm_(parameter(gradient), math.inf)
    product.backward(retain_graph=True)
    clip_grad_norm_(parameter(gradient), 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_norm_of_an_expanded_gradient():
    assert grad_norm(gradient_only(torch.full((1, 5), 2.0).expand(4, 5))).item() == pytest.approx(math.sqrt(80))


@pytest.mark.parametrize("parameters", [[], [torch.ones(3, requires_grad=True)], iter(())])
def test_nothing_to_clip(parameters):
    assert clip_grad_norm_(parameters, 1.0).item() == 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_are_left_alone(bad, norm_type, device):
    gradient = random_gradients([(5000,)], torch.float32, device)[0]
    gradient[1234] = bad
    original = gradient.clone()
    norm = clip_grad_norm_(parameter(gradient), 1.0, norm_type)
    assert math.isnan(norm.item()) if math.isnan(bad) else norm.item() == math.inf
    assert torch.equal(gradient.nan_to_num(), original.nan_to_num())
    coefficient, found_inf = clip_coefficient(norm, 1.0)
    for pair in ((coefficient, found_inf), reference.clip_coefficient(norm, 1.0)):
        assert [each.item() for each in pair] == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="gradient norm is"):
        clip_grad_norm_(parameter(gradient), 1.0, norm_type, error_if_nonfinite=True)


# None, 0 and inf measure only; below, at and above the norm of 5.
@pytest.mark.parametrize(
    ("max_norm", "expected"), [(None, 1.0), (0, 1.0), (math.inf, 1.0), (2.5, 0.5), (5.0, 1.0), (10.0, 1.0)]
)
def test_clip_coefficient(max_norm, expected):
    for function in (clip_coefficient, reference.clip_coefficient):
        coefficient, found_inf = function(torch.tensor(5.0), max_norm)
        assert coefficient.item() == pytest.approx(expected, rel=1e-6)
        assert found_inf.item() == 0.0
    gradient, exact = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(parameter(gradient), max_norm).item() == 5.0
    assert reference.clip_grad_norm_([exact], max_norm).item() == 5.0
    torch.testing.assert_close(gradient, exact)


def test_result_does_not_depend_on_the_number_of_threads():
    parameters = [parameter(gradient) for gradient in random_gradients([(300_000,), (1000,), (77,)], torch.float32)]
    norms = []
    for count in (1, 2, 3):
        with num_threads(count):
            norms.append(grad_norm(parameters))
    assert norms[0] == norms[1] == norms[2]


def test_compiles_into_one_graph():
    def gradients() -> list[Tensor]:
        channels_last = random_gradients([(2, 3, 4, 5)], torch.float32)[0].to(memory_format=torch.channels_last)
        narrow = torch.ones(5, dtype=torch.bfloat16)
        return [channels_last, *random_gradients([(7, 3), (), (0,)], torch.float32), narrow]

    compiled = torch.compile(clip_grad_norm_, fullgraph=True, backend="aot_eager")
    clipped, expected = gradients(), gradients()
    norm = compiled([parameter(gradient) for gradient in clipped], 0.5)
    assert torch.equal(norm, clip_grad_norm_([parameter(gradient) for gradient in expected], 0.5))
    assert all(map(torch.equal, clipped, expected))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    gradients = random_gradients([(3,), (4, 5)], torch.float32, device)
    torch.library.opcheck(torch.ops.rlft_fast.multi_tensor_norm_pow.default, (gradients, [1, 0, 1], 2.0))
    coefficient = torch.tensor(0.5, device=device)
    torch.library.opcheck(torch.ops.rlft_fast.multi_tensor_scale_.default, (gradients, coefficient))
    torch.library.opcheck(torch.ops.rlft_fast.scale_.default, (gradients[1], coefficient))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 5, 40_001])
def test_scale_of_one_tensor(size, dtype, device):
    (x,) = random_gradients([(size + 1,)], dtype, device)
    x = x[1:]  # not aligned for vectors
    expected = (x.double() * 0.3).to(dtype)
    torch.ops.rlft_fast.scale_(x, torch.tensor(0.3, device=device))
    torch.testing.assert_close(x, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    before = x.clone()
    torch.ops.rlft_fast.scale_(x, torch.tensor(1.0, device=device))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("gradient", "arguments", "error", "message"),
    [
        (torch.ones(2), {"max_norm": -1.0}, ValueError, "max_norm is -1.0"),
        (torch.ones(2), {"max_norm": math.nan}, ValueError, "max_norm is nan"),
        (torch.ones(2), {"max_norm": "1"}, ValueError, "max_norm is 1, expected a positive number"),
        (torch.ones(2), {"max_norm": 1j}, ValueError, "max_norm is 1j, expected a positive number"),
        (torch.ones(2), {"max_norm": 1.0, "norm_type": 0.0}, ValueError, "norm_type is 0.0"),
        (torch.eye(2).to_sparse(), {"max_norm": 1.0}, ValueError, "sparse"),
        (torch.ones(2, dtype=torch.complex64), {"max_norm": 1.0}, TypeError, "complex64"),
    ],
)
def test_bad_input_is_named(gradient, arguments, error, message):
    good = torch.ones(2)
    with pytest.raises(error, match=message):
        clip_grad_norm_([parameter(good), parameter(gradient)], **arguments)
    assert torch.equal(good, torch.ones(2))


def test_a_vanishing_norm_is_divided_by_no_less_than_torch_does():
    assert clip_coefficient(torch.tensor(1e-6), 1e-6).coefficient.item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(("norm", "got"), [(3.0, r"is 3\.0"), (torch.ones(2), r"has shape \(2,\)")])
def test_a_norm_that_is_none_is_named(norm, got):
    with pytest.raises(ValueError, match=f"norm {got}, expected a 0-d tensor: take it from grad_norm"):
        clip_coefficient(norm, 1.0)


@contextlib.contextmanager
def recording(monkeypatch):
    """A CUDA graph, or what the emulated GPU takes for one."""
    if EMULATED:
        monkeypatch.setenv("RLFT_EMULATOR_RECORDING", "1")
        yield
        monkeypatch.delenv("RLFT_EMULATOR_RECORDING")
    else:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield


@pytest.mark.gpu
@pytest.mark.parametrize("act", [grad_norm, lambda p: clip_grad_norm_(p, 1.0), lambda p: FusedAdamW(p).step()])
def test_recording_a_graph_is_refused(act, monkeypatch):
    """A replay would copy the list of tensors from memory that is no longer the list's."""
    parameters = [parameter(gradient) for gradient in random_gradients([(40,), (7, 3)], torch.float32, "cuda")]
    act(parameters)
    with recording(monkeypatch), pytest.raises(RuntimeError, match=r"call it outside of torch\.cuda\.graph"):
        act(parameters)
    act(parameters)
