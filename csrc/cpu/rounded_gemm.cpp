// A GEMM of operands that are rounded to bfloat16, with a float32 result, by AVX512-BF16: vdpbf16ps adds the products of
// 16 x 2 numbers to 16 sums.
//
// Two numbers that are neighbours in k make a pair of 32 bits. `a` is rounded once, as rows of pairs. A panel of `b`,
// kColumns columns of kPairs pairs, is rounded where it is used, and stays in L1 while the kernel goes through the rows
// of `a`. The kernel keeps kRows x kColumns sums in registers. Sums wait in `out` between two panels of a column.
//
// Memory: reads `a` and `b` once, and the rounded `a` once per panel; reads and writes `out` once per panel.
// Determinism: an element adds its pairs in the order of k.
#include "rounded_gemm.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#if defined(__x86_64__) && defined(__GNUC__)
#define RLFT_HAS_ROUNDED_GEMM
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header (GCC bug 105593)
#include <immintrin.h>
#endif

#include "checks.h"
#include "stable.h"

namespace rlft {

#ifdef RLFT_HAS_ROUNDED_GEMM
namespace {

#define RLFT_BFLOAT16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define RLFT_BFLOAT16_INLINE RLFT_BFLOAT16 inline __attribute__((always_inline))

constexpr int64_t kVector = 16;  // floats, or pairs
constexpr int64_t kRows = 8, kVectors = 3, kColumns = kVectors * kVector, kPairs = 64;
constexpr int64_t kAhead = 64;  // pairs of `a` that are on their way to L1
static_assert(kPairs % kVector == 0);

// A matrix by its outer index, the row of a or the column of b, and by k.
struct Operand {
  const void* data;
  int64_t outer_stride, k_stride;  // one of them is 1
  int64_t num_outer, num_k;
  bool is_narrow;  // bfloat16 rather than float32
};

// 16 x 16 elements.
using Block = __m512i[kVector];

RLFT_BFLOAT16_INLINE void transpose(Block& x) {
  Block y;
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // column 4 l + i stands in lane l of x[i], x[4 + i], x[8 + i] and x[12 + i]
    const __m512i a = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88), b = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd), d = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    y[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    y[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
    y[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
    y[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
  std::copy_n(y, 16, x);
}

// The first `count` of 16 numbers.
RLFT_BFLOAT16_INLINE __mmask16 first(int64_t count) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, kVector)) - 1);
}

// The first `count` of 16 numbers as bfloat16, and 0.
RLFT_BFLOAT16_INLINE __m256i load_rounded(const Operand& x, int64_t offset, int64_t count) {
  const __mmask16 mask = first(count);
  if (x.is_narrow) return _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(x.data) + offset);
  const __m512 wide = _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x.data) + offset);
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(wide));
}

// One pair of each of the outer indices [outer, outer + 16) in a vector, for pairs [pair, pair + 16), and 0 beyond the
// matrix.
RLFT_BFLOAT16_INLINE void load_pairs(const Operand& x, int64_t outer, int64_t pair, Block& block) {
  const int64_t k = 2 * pair, num_outer = x.num_outer - outer, num_k = x.num_k - k;
  if (x.k_stride == 1) {
    for (int64_t i = 0; i < kVector; ++i) {
      const int64_t offset = (outer + i) * x.outer_stride + k, count = i < num_outer ? num_k : 0;
      const __m256i low = load_rounded(x, offset, count), high = load_rounded(x, offset + kVector, count - kVector);
      block[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    transpose(block);
  } else {
    for (int64_t i = 0; i < kVector; ++i) {
      const int64_t offset = outer + (k + 2 * i) * x.k_stride;
      const __m256i even = load_rounded(x, offset, 2 * i < num_k ? num_outer : 0);
      const __m256i odd = load_rounded(x, offset + x.k_stride, 2 * i + 1 < num_k ? num_outer : 0);
      block[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    }
  }
}

// Rounds panels of kRows rows of a: `pairs` x kRows each, two from `row` on.
RLFT_BFLOAT16 void round_rows(const Operand& a, int64_t row, int64_t pairs, uint32_t* panels) {
  for (int64_t pair = 0; pair < pairs; pair += kVector) {
    Block block;
    load_pairs(a, row, pair, block);
    for (int64_t i = 0; i < kVector; ++i) {
      uint32_t* out = panels + (pair + i) * kRows;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(block[i]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + pairs * kRows), _mm512_extracti64x4_epi64(block[i], 1));
    }
  }
}

// Columns [column, column + kColumns) of b by pairs [pair, pair + count).
RLFT_BFLOAT16 void round_columns(const Operand& b, int64_t column, int64_t pair, int64_t count, uint32_t* panel) {
  for (int64_t j = 0; j < kColumns; j += kVector) {
    for (int64_t k = 0; k < count; k += kVector) {
      Block block;
      load_pairs(b, column + j, pair + k, block);
      for (int64_t i = 0; i < kVector; ++i) _mm512_storeu_si512(panel + (k + i) * kColumns + j, block[i]);
    }
  }
}

RLFT_BFLOAT16_INLINE void prefetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0); }

// Adds the products of panels of a and b to up to kRows x 16 vectors elements of `out`.
template <int vectors>
RLFT_BFLOAT16 void add_products(const uint32_t* a, const uint32_t* b, int64_t pairs, float* out, int64_t stride,
                                int64_t rows, __mmask16 last, bool accumulate) {
  __m512 sums[kRows][vectors];
  const auto mask = [&](int j) { return j + 1 < vectors ? static_cast<__mmask16>(0xffff) : last; };
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < vectors; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < vectors; ++j) prefetch(out + i * stride + j * kVector);
  }
  for (int64_t k = 0; k < pairs; ++k) {
    prefetch(a + (k + kAhead) * kRows);
    __m512bh columns[vectors];
#pragma GCC unroll 3
    for (int j = 0; j < vectors; ++j) {
      columns[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + k * kColumns + j * kVector));
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512bh row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[k * kRows + i])));
#pragma GCC unroll 3
      for (int j = 0; j < vectors; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) break;
#pragma GCC unroll 3
    for (int j = 0; j < vectors; ++j) {
      float* place = out + i * stride + j * kVector;
      if (accumulate) sums[i][j] = _mm512_add_ps(_mm512_maskz_loadu_ps(mask(j), place), sums[i][j]);
      _mm512_mask_storeu_ps(place, mask(j), sums[i][j]);
    }
  }
}

// Columns [column, column + kColumns) of all rows of `out`. `a` has panels of `pairs` x kRows.
RLFT_BFLOAT16 void multiply_columns(const uint32_t* a, const Operand& b, int64_t pairs, int64_t column, float* out,
                                    int64_t stride, int64_t rows, bool accumulate) {
  alignas(64) uint32_t panel[kPairs * kColumns];
  const int64_t columns = std::min(kColumns, b.num_outer - column), vectors = (columns + kVector - 1) / kVector;
  const __mmask16 last = first(columns - (vectors - 1) * kVector);
  const auto kernel = vectors == 3 ? add_products<3> : vectors == 2 ? add_products<2> : add_products<1>;
  int64_t pair = 0;
  do {
    const int64_t count = std::min(kPairs, pairs - pair);
    round_columns(b, column, pair, count, panel);
    for (int64_t row = 0; row < rows; row += kRows) {
      kernel(a + row * pairs + pair * kRows, panel, count, out + row * stride + column, stride, rows - row, last,
             accumulate || pair > 0);
    }
    pair += count;
  } while (pair < pairs);
}

// The matrix itself, or a copy if no stride is 1.
Tensor with_neighbours(const Tensor& x) {
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : torch::stable::contiguous(x);
}

// `outer` is the dimension of the outer index.
Operand make_operand(const Tensor& x, int outer) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "operands must be float32 or bfloat16, got ", toString(dtype));
  return {x.const_data_ptr(), x.stride(outer),   x.stride(1 - outer),
          x.size(outer),      x.size(1 - outer), dtype == ScalarType::BFloat16};
}

int64_t up(int64_t size) { return (size + kVector - 1) / kVector * kVector; }

}  // namespace

bool has_rounded_gemm() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq"); }

void multiply_rounded(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  STD_TORCH_CHECK(has_rounded_gemm(), "this CPU has no AVX512-BF16");
  const Tensor near_a = with_neighbours(a), near_b = with_neighbours(b);
  const Operand left = make_operand(near_a, 0), right = make_operand(near_b, 1);
  const int64_t rows = left.num_outer, columns = right.num_outer, pairs = up((left.num_k + 1) / 2);
  const auto panels = std::make_unique_for_overwrite<uint32_t[]>(up(rows) * pairs);
  float* sums = static_cast<float*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, up(rows) / kVector, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kVector; row < end * kVector; row += kVector) {
      round_rows(left, row, pairs, panels.get() + row * pairs);
    }
  });
  torch::stable::parallel_for(0, (columns + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      multiply_columns(panels.get(), right, pairs, i * kColumns, sums, out.stride(0), rows, accumulate);
    }
  });
}

#else

bool has_rounded_gemm() { return false; }

void multiply_rounded(const Tensor&, const Tensor&, const Tensor&, bool) {
  STD_TORCH_CHECK(false, "this CPU has no AVX512-BF16");
}

#endif

namespace {

void multiply_rounded_(Tensor a, Tensor b, Tensor out, bool accumulate) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), "operands must be (M, K) and (K, N)");
  check_matrix("out", out, a.size(0), b.size(1));
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float, "out must be float32");
  multiply_rounded(out, a, b, accumulate);
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) { m.impl("multiply_rounded_", TORCH_BOX(&rlft::multiply_rounded_)); }

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CompositeExplicitAutograd, m) {
  m.impl("has_rounded_gemm", TORCH_BOX(&rlft::has_rounded_gemm));
}
