// A matrix product on CPUs with AVX512-BF16 that no operator of torch has: operands are rounded to bfloat16, and the
// result is a float32.
#pragma once

#include "stable.h"

namespace rlft {

// Whether this CPU runs multiply_rounded.
bool has_rounded_gemm();

// out (M, N) float32 (+)= a (M, K) @ b (K, N), which are rounded to bfloat16. A product of two bfloat16 is exact, and
// products are added in float32, in an order that depends on K alone: an element has the same bits in a matrix of any
// shape. a and b are float32 or bfloat16. One stride of each is 1. Inside a parallel region it runs on one thread.
void multiply_rounded(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate);

}  // namespace rlft
