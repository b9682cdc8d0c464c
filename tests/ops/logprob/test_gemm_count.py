"""The exact number of GEMMs of T x D x V in each way of computing, from the shapes of the calls."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss, precision, support_logprob
from tests.ops.logprob.problems import INTERPRETED
from tests.support.gemms import multiplications, profiled_multiplications, requires_mkl
from tests.support.machine.devices import DEVICES
from tests.support.machine.threads import num_threads

T, D, V = 130, 24, 2503  # several tiles with a ragged end; more logits than 1 MiB holds

pytestmark = requires_mkl


def negated(logprob: Tensor, entropy: Tensor | None, *_) -> Tensor:
    return -logprob


def score(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    with torch.no_grad():
        linear_logprob(h, w, target, **how)


def train(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    linear_logprob(h, w, target, **how).logprob.sum().backward()


def freeze(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    train(h, w.detach(), target, **how)


def fuse(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    linear_logprob_loss(h, w, target, negated, **how).loss.backward()


def fuse_frozen(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    fuse(h, w.detach(), target, **how)


RANK = 6


def split(w: Tensor) -> tuple[Tensor, Tensor]:
    """A frozen weight, and an adapter of a quarter of its columns."""
    return w.detach()[:, :-RANK].contiguous(), w.detach()[:, -RANK:].contiguous().requires_grad_()


def adapt(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    weight, adapter = split(w)
    train(h, weight, target, adapter_VE=adapter, **how)


def fuse_adapted(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    weight, adapter = split(w)
    fuse(h, weight, target, adapter_VE=adapter, **how)


def train_above(h: Tensor, w: Tensor, target: Tensor, **how) -> None:
    train(h, w, target, threshold_T=torch.zeros(len(target), device=target.device), **how)


small = {"workspace_mib": 1}
# (GEMMs, way): docs/ops.md and the docstrings promise them.
WAYS: dict[str, tuple[float, Callable[..., None]]] = {
    "no grad": (1, score),
    "no grad, in tiles": (1, partial(score, **small)),
    "forward + backward": (4, partial(train, **small)),
    "forward + backward, entropy": (4, partial(train, **small, return_entropy=True)),
    "kept logits": (3, train),
    "frozen head": (2, freeze),
    "frozen head, in tiles": (2, partial(freeze, **small)),
    "frozen head, entropy": (3, partial(freeze, **small, return_entropy=True)),
    "frozen head, entropy, kept logits": (2, partial(freeze, return_entropy=True)),
    "threshold": (4, train_above),
    "frozen head, threshold": (3, lambda h, w, target, **how: train_above(h, w.detach(), target, **how)),
    "loss": (3, fuse),
    "loss, in chunks": (3, partial(fuse, **small)),
    "loss, entropy": (3, partial(fuse, return_entropy=True)),
    "loss, frozen head": (2, fuse_frozen),
    "adapter": (3 + RANK / D, partial(adapt, **small)),
    "adapter, kept logits": (2 + RANK / D, adapt),
    "adapter, loss": (2 + RANK / D, fuse_adapted),
    "adapter, loss, in chunks": (2 + RANK / D, partial(fuse_adapted, **small)),
}


def problem(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, target, _ = make_inputs(T, D, V, dtype=dtype, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_gemms(way, dtype, device, monkeypatch):
    count, function = WAYS[way]
    monkeypatch.setattr(precision, "kernel_speedup", lambda: 0.0)  # no counter sees the project's own GEMM
    # No counter sees the GEMMs inside Triton's kernels, which `auto` takes where they are faster.
    step = partial(function, *problem(device, dtype), backend="native")
    precision.rounding_speedup()  # which multiplies once per process
    assert multiplications(step, device) == count * T * D * V


@pytest.mark.parametrize("way", ["loss", "forward + backward", "frozen head"])
def test_gemms_of_several_threads(way):
    count, function = WAYS[way]
    with num_threads(2):
        assert multiplications(partial(function, *problem("cpu"))) == count * T * D * V


@pytest.mark.parametrize("way", ["no grad", "forward + backward", "frozen head"])
def test_what_counts_on_a_real_gpu_counts_the_same(way):
    """The profiler and the log of MKL agree, because compiled code calls no GEMM in these ways."""
    step = partial(WAYS[way][1], *problem("cpu"))
    assert profiled_multiplications(step) == multiplications(step)


@pytest.mark.parametrize(("way", "count"), [("no grad", 1), ("kept logits", 3), ("frozen head", 2), ("loss", 3)])
def test_gemms_of_the_reference(way, count):
    """The reference keeps all logits, so backward does not compute them again."""
    function = partial(WAYS[way][1], *problem("cpu"), backend="reference")
    assert multiplications(function) == count * T * D * V


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_ignored_rows_are_not_multiplied(way, device):
    hidden, weight, target = problem(device)
    target[::3] = -100
    active = T - len(range(0, T, 3))
    count, function = WAYS[way]
    step = partial(function, hidden, weight, target, backend="native")
    assert multiplications(step, device) == count * active * D * V


# Every third of 130 rows is silent, so 86 rows are multiplied. "kept logits" does not compute logits again.
@pytest.mark.parametrize(("way", "again"), [("forward + backward", 3), ("kept logits", 2), ("threshold", 3)])
def test_rows_of_zero_gradient_are_multiplied_in_the_forward_alone(way, again):
    hidden, weight, target = problem("cpu")
    upstream = torch.arange(T).remainder(3).clamp(max=1)
    how = {"forward + backward": small, "threshold": {"threshold_T": torch.zeros(T)}}.get(way, {})

    def step() -> None:
        linear_logprob(hidden, weight, target, **how).logprob.backward(upstream.float())

    assert multiplications(step) == (T + again * int(upstream.sum())) * D * V


def test_the_loss_multiplies_rows_of_zero_gradient_too():
    hidden, weight, target = problem("cpu")
    seen = torch.arange(T).remainder(3).clamp(max=1).float()
    loss = lambda logprob, _, seen: -logprob * seen  # noqa: E731
    step = lambda: linear_logprob_loss(hidden, weight, target, loss, seen).loss.backward()  # noqa: E731
    assert multiplications(step) == 3 * T * D * V


def test_a_support_and_ids_add_no_gemm():
    """On a CPU their T K D products are those of sparse matrices."""
    hidden, weight, target = problem("cpu")
    ids = torch.arange(T * 5).view(T, 5)
    assert multiplications(lambda: support_logprob(hidden, weight, target, ids).logprob.sum().backward()) == 0
    loss = lambda logprob, _, of_ids: -of_ids.sum(-1)  # noqa: E731
    step = lambda: linear_logprob_loss(hidden, weight, target, loss, ids_TK=ids).loss.backward()  # noqa: E731
    assert multiplications(step) == 3 * T * D * V


@pytest.fixture
def group_of_one(tmp_path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("way", [name for name in WAYS if "threshold" not in name])
def test_gemms_of_a_sharded_vocabulary(way, group_of_one):
    count, function = WAYS[way]
    count += way == "frozen head, in tiles"  # logits are computed again when the sums of all ranks are known
    assert multiplications(partial(function, *problem("cpu"), vocab_group=group_of_one)) == count * T * D * V


triton = pytest.mark.skipif(not INTERPRETED, reason="counts products in Triton's interpreter")


@triton
@pytest.mark.parametrize(
    "way",
    [*("no grad", "kept logits", "frozen head", "loss"), pytest.param("forward + backward", marks=pytest.mark.slow)],
)
def test_gemms_of_triton(way):
    """Shapes are whole tiles, because Triton's kernels multiply masked elements, too."""
    V = 1152 if way == "forward + backward" else 384  # whose logits exceed the workspace, and are computed twice
    hidden, weight, target, _ = make_inputs(128, 64, V)
    count, function = WAYS[way]
    step = partial(function, hidden.requires_grad_(), weight.requires_grad_(), target, backend="triton")
    assert multiplications(step) == count * 128 * 64 * V
