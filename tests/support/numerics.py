"""The tolerance of this project: the error that plain PyTorch itself makes in the same dtype."""

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
