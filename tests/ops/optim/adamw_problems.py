"""Parameters, gradients and exact steps that the tests of FusedAdamW share."""

import torch
from torch import Tensor, nn

from rlft_fast.ops import FusedAdamW
from rlft_fast.ops.optim import reference

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


def loss_curve(moment_dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A network learns from another network's answers: the loss of each of 200 steps, float64."""
    torch.manual_seed(seed)
    teacher, student = (nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2))
    optimizer = FusedAdamW(student.parameters(), lr=3e-3, betas=(0.9, 0.999), moment_dtype=moment_dtype)
    losses = []
    for _ in range(200):
        inputs = torch.randn(256, 32)
        loss = nn.functional.mse_loss(student(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def exact_steps(weight: Tensor, gradients: list[Tensor], **options) -> dict[str, Tensor]:
    """The reference's state in float64 after one step per gradient."""
    state = reference.adamw_state(weight)
    for gradient in gradients:
        reference.adamw_step(state, gradient, **options)
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
