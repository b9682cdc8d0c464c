"""Tolerances of this project: the error that plain PyTorch makes in the same dtype, and roundings of the values."""

import torch
from torch import Tensor


def assert_no_further_from_truth(ours: Tensor, eager: Tensor, truth: Tensor, *, factor: float = 1.05) -> None:
    """Root-mean-square error against float64 at most ``factor`` times that of plain PyTorch.

    A rounding of the result itself in its own dtype is always allowed: where eager happens to be exact, an equally
    good result may still differ in its last bit. So is a rounding of the truth, beside the 1 of a sum of probabilities:
    the log-probability of a certain target may be 1e-19, which a log-softmax in float64 takes for 0.
    """
    assert ours.shape == truth.shape
    if truth.numel() == 0:
        return
    rms = lambda x: x.double().square().mean().sqrt().item()  # noqa: E731
    one_rounding = torch.finfo(ours.dtype).eps * rms(truth) + torch.finfo(torch.float64).eps
    ours_error, eager_error = rms(ours.double() - truth), rms(eager.double() - truth)
    assert ours_error <= factor * eager_error + one_rounding, (
        f"rms error {ours_error:.3e}, plain PyTorch's {eager_error:.3e}, one rounding {one_rounding:.3e}"
    )


def assert_close_to_rounding(actual: Tensor, expected: Tensor, *, roundings: int = 16) -> None:
    """Every element within ``roundings`` roundings of the largest magnitude in ``expected``.

    For the same numbers computed in another order. CPUs add the terms of a GEMM in different orders, and an element
    near 0 may be a sum of terms as large as the largest element: its own size says nothing about its error.
    """
    atol = roundings * torch.finfo(expected.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
