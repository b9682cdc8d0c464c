"""The GEMM of operands that are rounded to bfloat16, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlft_fast.ops import library
from tests.support.machine.threads import num_threads

needs_kernel = pytest.mark.skipif(not library.has_rounded_gemm, reason="this CPU has no AVX512-BF16")
multiply = torch.ops.rlft_fast.multiply_rounded_

# Columns next to each other in memory, rows next to each other, rows and columns apart.
LAYOUTS = {
    "rows": lambda m, n, g: torch.randn(m, n, generator=g),
    "columns": lambda m, n, g: torch.randn(n, m, generator=g).T,
    "wide rows": lambda m, n, g: torch.randn(m, n + 3, generator=g)[:, 1 : n + 1],
    "apart": lambda m, n, g: torch.randn(2 * m, 2 * n, generator=g)[::2, ::2],
}
layouts, dtypes = st.sampled_from([*LAYOUTS]), st.sampled_from([torch.float32, torch.bfloat16])


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.bfloat16().double() @ b.bfloat16().double()


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    # Around the 8 rows and 16, 32, 48 columns of a tile; the sums of 191 and more numbers wait in memory.
    st.integers(0, 35), st.sampled_from([0, 1, 2, 31, 32, 33, 191, 192, 193, 400]), st.integers(0, 100),
    layouts, layouts, dtypes, dtypes, st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_products_are_sums_in_float32(m, k, n, a_layout, b_layout, a_dtype, b_dtype, accumulate, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = LAYOUTS[a_layout](m, k, generator).to(a_dtype), LAYOUTS[b_layout](k, n, generator).to(b_dtype)
    wide = torch.randn(m, n + 5, generator=generator)
    before = wide.clone()
    multiply(a, b, wide[:, :n], accumulate)
    start = before[:, :n].double() if accumulate else torch.zeros(m, n, dtype=torch.float64)
    # As many roundings of float32 as there are products, at most.
    most = (k + 1) * 2**-24 * (exact(a.abs(), b.abs()) + start.abs())
    assert ((wide[:, :n] - (exact(a, b) + start)).abs() <= most).all()
    assert wide[:, n:].equal(before[:, n:])


@needs_kernel
@pytest.mark.parametrize("k", [64, 576, 2000])
def test_errors_are_those_of_a_float32_gemm(k):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).bfloat16().float() for size in ((200, k), (k, 300)))
    ours = torch.empty(200, 300)
    multiply(a, b, ours, False)
    truth = exact(a, b)
    assert (ours - truth).norm() < 1.05 * (a @ b - truth).norm()


@needs_kernel
def test_an_element_has_the_same_bits_in_any_matrix_and_with_any_threads():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(100, 500, generator=generator), torch.randn(500, 300, generator=generator)
    whole, part, few = torch.empty(100, 300), torch.empty(37, 61), torch.empty(1, 1)
    multiply(a, b, whole, False)
    multiply(a[11:48], b[:, 200:261], part, False)
    assert part.equal(whole[11:48, 200:261])
    multiply(a[50:51], b[:, 7:8], few, False)
    assert few.equal(whole[50:51, 7:8])
    with num_threads(3):
        again = torch.empty_like(whole)
        multiply(a, b, again, False)
    assert again.equal(whole)


@needs_kernel
def test_what_is_not_finite_stays_so():
    a = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [3.4e38, 1.0]])
    out = torch.empty(3, 1)
    multiply(a, torch.ones(2, 1), out, False)
    assert out.isnan().squeeze(1).tolist() == [True, False, False]
    assert out.isinf().squeeze(1).tolist() == [False, True, True]  # 3.4e38 is rounded up


@needs_kernel
@pytest.mark.parametrize(
    ("a", "b", "out", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), torch.ones(2, 5), "operands must be"),
        (torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 4), "out must be a tensor of 2 x 5"),
        (torch.ones(2, 3), torch.ones(3, 5), torch.ones(5, 2).T, "contiguous rows"),
        (torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5).bfloat16(), "out must be float32"),
        (torch.ones(2, 3).double(), torch.ones(3, 5), torch.ones(2, 5), "operands must be float32 or bfloat16"),
    ],
)
def test_bad_input(a, b, out, message):
    with pytest.raises(RuntimeError, match=message):
        multiply(a, b, out, False)
