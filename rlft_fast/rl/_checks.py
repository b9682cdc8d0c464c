"""Shape checks shared by the functions of `rlft_fast.rl`."""

from torch import Tensor


def check_shapes(expected: Tensor, **tensors: Tensor | None) -> None:
    """Checks that every tensor has the shape of `expected`.

    Broadcasting (T, 1) against (T,) would silently build a (T, T) loss, so a mismatch is refused by name.

    Args:
        expected: The tensor whose shape the others must have.
        **tensors: Tensors by the name the user knows them by.

    Raises:
        ValueError: A tensor is missing or has another shape.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(
                f"{name} is None, but the chosen options need it: pass a tensor of {tuple(expected.shape)}"
            )
        if tensor.shape != expected.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}")
