"""The order of a tensor's dimensions in memory, which is not the shape's for transposed and channels-last tensors."""

from torch import Tensor


def memory_order(tensor: Tensor) -> list[int]:
    """The tensor's dimensions from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dimensions."""
    return tensor.is_contiguous() or tensor.permute(memory_order(tensor)).is_contiguous()


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory, as in an expanded tensor."""
    reach = 0  # of the dimensions with smaller strides
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] > 1:
            if tensor.stride(dim) <= reach:
                return True
            reach += (tensor.shape[dim] - 1) * tensor.stride(dim)
    return False


def in_order_of(layout: Tensor, tensor: Tensor) -> Tensor:
    """The elements in the memory order of `layout`, contiguous: a view where they lie in that order, else a copy."""
    if tensor.is_contiguous() and layout.is_contiguous():
        return tensor
    return tensor.permute(memory_order(layout)).contiguous()
