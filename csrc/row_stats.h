// What the CPU and the CUDA side of linear_logprob share: the statistics of a row, where the passes write them, and the
// upstream gradients that the passes read. csrc/cpu/logprob_rows.cpp has the equations.
#pragma once

#include <cstdint>
#include <limits>

#include "portable.h"

namespace rlft {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr float kMinExponent = -87.0f;  // exp(-87) = 1.6e-38 is the smallest normal float

struct Sums {
  float exp = 0, shift = 0, squared = 0;  // of exp(x - max), exp(x - max) (x - max), exp(x - max)^2
};

struct RowStats {
  float max = kMinusInf;
  Sums sums;

  // The statistics of the union of two column sets. Each backend brings its own Math::exp and Math::max.
  template <class Math>
  RLFT_INLINE void merge(const RowStats& other) {
    const float top = Math::max(max, other.max);
    const float shift = top == kMinusInf ? 0.0f : top;  // -inf - -inf is nan; an empty set must stay empty
    const float a = Math::max(max - shift, kMinExponent), b = Math::max(other.max - shift, kMinExponent);
    const float wa = Math::exp(max - shift), wb = Math::exp(other.max - shift);
    sums.shift = wa * (sums.shift + a * sums.exp) + wb * (other.sums.shift + b * other.sums.exp);
    sums.exp = wa * sums.exp + wb * other.sums.exp;
    sums.squared = wa * wa * sums.squared + wb * wb * other.sums.squared;
    max = top;
  }
};

struct StatsOut {  // (R,) each; sum_exp_shift is null without the entropy, sum_exp_squared without the sum of p^2
  float *max, *sum_exp, *sum_exp_shift, *sum_exp_squared, *target_logit;

  template <bool kEntropy, bool kSquares>
  RLFT_INLINE RowStats load(int64_t row) const {
    return {max[row], {sum_exp[row], kEntropy ? sum_exp_shift[row] : 0, kSquares ? sum_exp_squared[row] : 0}};
  }

  template <bool kEntropy, bool kSquares>
  RLFT_INLINE void store(int64_t row, const RowStats& stats) const {
    max[row] = stats.max;
    sum_exp[row] = stats.sums.exp;
    if (kEntropy) sum_exp_shift[row] = stats.sums.shift;
    if (kSquares) sum_exp_squared[row] = stats.sums.squared;
  }
};

struct Upstream {  // (R,) each; entropy and grad_entropy are null without a gradient of the entropy
  const float *max, *log_sum, *entropy, *grad_logprob, *grad_entropy;
};

struct FrozenOut {
  StatsOut stats;
  float *sum_others, *target_slope;  // (R,) each: sum exp(x - max) without the target, dx/dz at the target
  float* accumulator;                // (R, D)
  int64_t dim;
};

}  // namespace rlft
