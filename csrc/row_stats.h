// The CPU and the CUDA side of linear_logprob share this header: the statistics of a row, the arrays that the passes
// write, and the upstream gradients that the passes read. The equations are in csrc/cpu/logprob_rows.cpp.
#pragma once

#include <cstdint>
#include <limits>

#include "portable.h"

namespace rlft {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr float kMinExponent = -87.0f;  // exp(-87) = 1.6e-38 is the smallest normal float

// excess is the sum of exp(x - max), less the 1 of the maximum itself, and -1 without any column. If nearly all of the
// mass is at the maximum, the sum itself would hold few digits of the other columns.
struct Sums {
  float excess = -1, shift = 0, squared = 0;  // the other two: sums of exp(x - max) (x - max) and exp(x - max)^2
};

struct RowStats {
  float max = kMinusInf;
  Sums sums;

  // Merges the statistics of other columns of the same row. Each backend passes its own Math::exp and Math::max.
  template <class Math>
  RLFT_INLINE void merge(const RowStats& other) {
    const float top = Math::max(max, other.max);
    const float shift = top == kMinusInf ? 0.0f : top;  // the max of no columns is -inf; -inf - -inf would be nan
    // a and b are bounded, because 0 * -inf would be nan.
    const float a = Math::max(max - shift, kMinExponent), b = Math::max(other.max - shift, kMinExponent);
    const float wa = max == top ? 1.0f : Math::exp(max - shift),
                wb = other.max == top ? 1.0f : Math::exp(other.max - shift);
    sums.shift = wa * (sums.shift + a * (1 + sums.excess)) + wb * (other.sums.shift + b * (1 + other.sums.excess));
    sums.excess = wa * sums.excess + wb * other.sums.excess + (wa < wb ? wa : wb);  // the greater weight is 1
    sums.squared = wa * wa * sums.squared + wb * wb * other.sums.squared;
    max = top;
  }
};

// Each array is (R,). sum_exp_shift is null if no entropy is computed, sum_exp_squared if no sum of p^2 is computed, and
// sum_logits if no mean of the logits is computed. A sum of logits does not depend on the maximum, so it is no part of
// RowStats. It is in double, because one float rounding per block would add up to more than PyTorch's error of a mean.
struct StatsOut {
  float *max, *excess, *sum_exp_shift, *sum_exp_squared, *target_logit;
  double* sum_logits = nullptr;

  template <bool kEntropy, bool kSquares>
  RLFT_INLINE RowStats load(int64_t row) const {
    return {max[row], {excess[row], kEntropy ? sum_exp_shift[row] : 0, kSquares ? sum_exp_squared[row] : 0}};
  }

  template <bool kEntropy, bool kSquares>
  RLFT_INLINE void store(int64_t row, const RowStats& stats) const {
    max[row] = stats.max;
    excess[row] = stats.sums.excess;
    if (kEntropy) sum_exp_shift[row] = stats.sums.shift;
    if (kSquares) sum_exp_squared[row] = stats.sums.squared;
  }
};

// Each array is (R,). entropy and grad_entropy are null if the entropy has no gradient.
struct Upstream {
  const float *max, *log_sum, *entropy, *grad_logprob, *grad_entropy;
};

struct FrozenOut {
  StatsOut stats;
  float *sum_others, *target_slope;  // each (R,): sum of exp(x - max) without the target; dx/dz at the target
  float* accumulator;                // (R, D)
  int64_t dim;
};

}  // namespace rlft
