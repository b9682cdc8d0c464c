"""Float32 heads compute in float32 whatever torch's flags allow, and a call leaves the flags unchanged."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import library, linear_logprob, linear_logprob_loss, precision, support_logprob
from rlft_fast.ops.logprob.tiles import multiply
from rlft_fast.ops.precision import bfloat16_speedup, kernel_speedup, rounding_speedup, sums_in_float32
from tests.ops.logprob.problems import gradients, loss_problem, plain_logprob, ppo_clip, run

cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def reset_flags() -> None:
    torch.set_float32_matmul_precision("highest")
    cuda.fp32_precision = cpu.fp32_precision = torch.backends.fp32_precision = "none"
    cuda.allow_bf16_reduced_precision_reduction = cuda.allow_fp16_reduced_precision_reduction = True
    cuda.allow_fp16_accumulation = False


@pytest.fixture(autouse=True)
def _flags_as_torch_has_them() -> Iterator[None]:
    reset_flags()
    yield
    reset_flags()


def set_attribute(holder: object, name: str, value: object) -> Callable[[], None]:
    return partial(setattr, holder, name, value)


SETTINGS = {
    "old": partial(torch.set_float32_matmul_precision, "medium"),
    "new": set_attribute(cpu, "fp32_precision", "bf16"),
    "of all operators": set_attribute(torch.backends, "fp32_precision", "bf16"),
}


def scored(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    return list(linear_logprob(hidden, weight, target, return_entropy=True)[:2])


def over_ids(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    support = torch.stack([target, (target + 1) % len(weight), (target + 2) % len(weight)], 1)
    return run(partial(support_logprob, support_TK=support), hidden, weight, target, {}, hidden.dtype)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    loss = lambda h, w: linear_logprob_loss(h, w, target, lambda logprob, _: -logprob).loss  # noqa: E731
    return gradients(loss, hidden, weight)


def trained(hidden: Tensor, weight: Tensor, target: Tensor, **how) -> list[Tensor]:
    return run(linear_logprob, hidden, weight, target, {}, torch.float32, **how)


WAYS = {
    "no grad": scored,
    "kept": trained,
    "recomputed": lambda *problem: run(partial(linear_logprob, workspace_mib=1), *problem, {}, problem[0].dtype),
    "frozen": partial(trained, train_weight=False, entropy=False),
    "loss": fused,
    "support": over_ids,
}


def narrows_float32() -> bool:
    """Whether the flags change a GEMM on this CPU: only some CPUs have the instructions."""
    reset_flags()
    a, b = torch.randn(2, 480, 512)
    exact = a @ b.T
    SETTINGS["old"]()
    narrow = a @ b.T
    reset_flags()
    return not exact.equal(narrow)


requires_narrow_gemms = pytest.mark.skipif(not narrows_float32(), reason="this CPU has one precision of float32 GEMMs")


@requires_narrow_gemms
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cpu_multiplies_float32_whatever_the_flags_allow(way, setting):
    problem = make_inputs(100, 512, 5003)[:3]
    expected = WAYS[way](*problem)
    SETTINGS[setting]()
    for ours, same in zip(WAYS[way](*problem), expected, strict=True):
        assert ours.equal(same)


def readings() -> list[object]:
    return [
        cuda.fp32_precision, cpu.fp32_precision, torch.backends.fp32_precision, torch.backends.cudnn.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision, cuda.allow_bf16_reduced_precision_reduction,
        cuda.allow_fp16_reduced_precision_reduction, cuda.allow_fp16_accumulation,
    ]  # fmt: skip


# Each flag with a dtype whose products it rounds, and each dtype with torch's defaults.
ON_A_GPU = [
    (torch.float32, partial(torch.set_float32_matmul_precision, "high")),
    (torch.float32, set_attribute(cuda, "allow_tf32", True)),
    (torch.float32, set_attribute(cuda, "fp32_precision", "tf32")),
    (torch.float32, set_attribute(torch.backends, "fp32_precision", "tf32")),
    (torch.bfloat16, lambda: None),
    (torch.bfloat16, set_attribute(cuda, "allow_bf16_reduced_precision_reduction", (False, False))),
    (torch.float16, lambda: None),
    (torch.float16, set_attribute(cuda, "allow_fp16_accumulation", True)),
]


@pytest.fixture
def allowed(monkeypatch) -> list[tuple[torch.dtype, list[object]]]:
    """For each GEMM on the device, the dtype of its operands and the flags during the call."""
    calls = []
    for name in ("mm", "addmm", "bmm"):
        call = getattr(torch, name)

        def record(*matrices, call=call, **options):
            if matrices[-1].is_cuda:  # an emulated GPU's own multiplications are not meant
                calls.append((matrices[-1].dtype, readings()))
            return call(*matrices, **options)

        monkeypatch.setattr(torch, name, record)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "setting"), ON_A_GPU)
def test_a_gpu_sums_in_float32_whatever_the_flags_allow(dtype, setting, allowed):
    problem = make_inputs(60, 24, 5003, dtype=dtype, device="cuda")[:3]
    expected = [x for way in WAYS.values() for x in way(*problem)]
    num_expected = len(allowed)
    setting()
    before = readings()
    results = [x for way in WAYS.values() for x in way(*problem)]
    assert readings() == before
    for ours, same in zip(results, expected, strict=True):
        assert ours.equal(same)
    assert len(allowed) == 2 * num_expected >= 2 * (1 + 3 + 4 + 2 + 3 + 2)
    for of, (tf32, _, _, _, _, bf16_parts, fp16_parts, fp16_sums) in allowed[num_expected:]:
        assert of != torch.float32 or tf32 == "ieee"
        assert of != torch.bfloat16 or not bf16_parts
        assert of != torch.float16 or not (fp16_parts or fp16_sums)


def test_a_precision_of_all_operators_is_still_that_of_gemms_after_a_call():
    problem = make_inputs(20, 8, 30)[:3]
    for value in ("bf16", "ieee"):
        torch.backends.fp32_precision = value
        scored(*problem)
        assert cpu.fp32_precision == value


def test_an_error_inside_leaves_the_flags_as_they_were():
    cpu.fp32_precision = "bf16"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        multiply(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))
    assert cpu.fp32_precision == "bf16"


def test_the_last_thread_that_leaves_puts_the_flags_back():
    cpu.fp32_precision = "bf16"
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with sums_in_float32(torch.ones(1)):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    with sums_in_float32(torch.ones(1)):
        thread.start()
        assert inside.wait(10)
    assert cpu.fp32_precision == "ieee"
    leave.set()
    thread.join()
    assert cpu.fp32_precision == "bf16"


# ---- where a CPU multiplies bfloat16 fast ---------------------------------------------------------------------------


@pytest.fixture
def _fast_library(monkeypatch) -> None:
    """On CPUs without bfloat16, too: torch's flag changes nothing there."""
    monkeypatch.setattr(precision, "rounding_speedup", lambda: 3.0)
    monkeypatch.setattr(precision, "kernel_speedup", lambda: 0.0)


@pytest.fixture(params=["library", "kernel"])
def _fast_bfloat16(request, monkeypatch) -> None:
    if request.param == "kernel" and not library.has_rounded_gemm:
        pytest.skip("this CPU has no AVX512-BF16")
    monkeypatch.setattr(precision, "rounding_speedup", lambda: 3.0)
    monkeypatch.setattr(precision, "kernel_speedup", lambda: 4.0 if request.param == "kernel" else 0.0)


@pytest.mark.usefixtures("_fast_library")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])  # rounded tile by tile
@pytest.mark.parametrize("way", ["no grad", "recomputed", "frozen"])
def test_bfloat16_is_multiplied_in_bfloat16_but_for_gradients_of_float32(way, weight_dtype, monkeypatch):
    hidden, weight, target, _ = make_inputs(100, 64, 1900)  # a tile
    hidden, weight = hidden.bfloat16().requires_grad_(way != "no grad"), weight.to(weight_dtype)
    seen = []
    for name in ("mm", "addmm"):
        call = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *x, call=call, **how: seen.append(cpu.fp32_precision) or call(*x, **how)
        )
    if way == "no grad":
        scored(hidden, weight, target)
    else:
        weight.requires_grad_(way == "recomputed")
        linear_logprob(hidden, weight, target, workspace_mib=1).logprob.sum().backward()
    is_rounded = way == "no grad" or weight_dtype == torch.bfloat16
    assert set(seen) == ({"bf16"} if is_rounded else {"bf16", "ieee"})
    assert cpu.fp32_precision == "none"


@pytest.mark.usefixtures("_fast_bfloat16")
@pytest.mark.parametrize("way", ["no grad", "loss"])
def test_logits_multiplied_in_bfloat16_are_exact_sums(way):
    """The products of two bfloat16 are float32 numbers. Rounded logits would be wrong by 1e-3."""
    hidden, weight, target, _ = make_inputs(300, 576, 5003, dtype=torch.bfloat16)
    truth = scored(hidden.double(), weight.double(), target)[0]
    if way == "loss":
        logprob = linear_logprob_loss(hidden, weight, target, lambda logprob, _: logprob).logprob
    else:
        logprob = scored(hidden, weight, target)[0]
    assert (logprob - truth).norm() < 1e-6 * truth.norm()


@pytest.mark.usefixtures("_fast_bfloat16")
@pytest.mark.parametrize("scale", [0.1, 4, 30])  # flat to peaked
@pytest.mark.parametrize(
    ("way", "options"), [(linear_logprob, {}), (linear_logprob, {"workspace_mib": 1}), ("loss", {})]
)
def test_gradients_in_bfloat16_are_no_further_from_float64_than_pytorch(way, options, scale):
    hidden, weight, target, _ = make_inputs(300, 128, 3001, dtype=torch.bfloat16)
    hidden = scale * hidden
    upstream = torch.randn(300, generator=torch.Generator().manual_seed(1)) / 3001  # no bfloat16

    def loss(h: Tensor, w: Tensor, fused: bool = True) -> Tensor:
        if not fused:
            return (plain_logprob(h, w, target).logprob * upstream).sum()
        if way == "loss":
            return linear_logprob_loss(h, w, target, lambda logprob, _, g: logprob * g, upstream).loss
        return (way(h, w, target, **options).logprob * upstream).sum()

    ours, eager = gradients(loss, hidden, weight), gradients(partial(loss, fused=False), hidden, weight)
    truth = gradients(partial(loss, fused=False), hidden.double(), weight.double())
    for x, plain, exact in zip(ours, eager, truth, strict=True):
        assert (x.double() - exact).norm() < 1.05 * (plain.double() - exact).norm()


@pytest.mark.usefixtures("_fast_library")
def test_a_thread_that_asks_for_all_bits_has_them():
    inside, leave = threading.Event(), threading.Event()

    def round_operands() -> None:
        with sums_in_float32(torch.ones(1), torch.bfloat16):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=round_operands)
    thread.start()
    assert inside.wait(10)
    assert cpu.fp32_precision == "bf16"
    with sums_in_float32(torch.ones(1)):
        assert cpu.fp32_precision == "ieee"
    assert cpu.fp32_precision == "bf16"
    leave.set()
    thread.join()
    assert cpu.fp32_precision == "none"


@pytest.mark.parametrize("measure", [bfloat16_speedup, rounding_speedup, *[kernel_speedup] * library.has_rounded_gemm])
def test_the_measurement_runs_beside_the_calling_thread(measure, monkeypatch):
    """Neither autocast nor a mode or a default of the caller changes it, and it leaves threads and flags alone."""
    found, dtypes, measured, seconds = [], [], precision._measured_speedup, precision._seconds

    def watched(*args) -> float:
        found.append((torch.ones(1).device.type, torch.is_autocast_enabled("cpu")))
        return measured(*args)

    def timed(multiply, a: Tensor, b: Tensor, out: Tensor) -> float:
        dtypes.append(a.dtype)
        return seconds(multiply, a, b, out)

    monkeypatch.setattr(precision, "_measured_speedup", watched)
    monkeypatch.setattr(precision, "_seconds", timed)
    before, num_threads = readings(), torch.get_num_threads()
    measure.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            speedup = measure()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {*dtypes[::2]} == {torch.float32}
    assert (readings(), torch.get_num_threads()) == (before, num_threads)
    assert found == [("cpu", False)]
    assert speedup > 0
    if measure is bfloat16_speedup:
        assert precision.has_fast_bfloat16() == (speedup >= 1.5)
    measure.cache_clear()


@requires_narrow_gemms
def test_compiled_calls_are_exact_too():
    hidden, weight, target, *per_token = loss_problem(T=40, D=512, V=700)

    def step(h: Tensor, w: Tensor) -> Tensor:
        return linear_logprob(h, w, target).logprob.sum() + linear_logprob_loss(h, w, target, ppo_clip, *per_token).loss

    expected = gradients(step, hidden, weight)
    torch.set_float32_matmul_precision("medium")
    compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), hidden, weight)
    assert torch.get_float32_matmul_precision() == "medium"
    for ours, same in zip(compiled, expected, strict=True):
        assert ours.equal(same)
