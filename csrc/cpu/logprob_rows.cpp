// linear_logprob on the CPU: the passes between the GEMMs, each over one tile of raw logits z (R, C).
//
//   x      = softcap * tanh(scale * (z + bias) / softcap) * inv_temperature      the logits that the softmax sees
//   stats  : online over tiles, per row: m = max x,  s = sum exp(x - m), kept as s - 1,  q = sum exp(x - m) (x - m),
//            r = sum exp(x - m)^2,  l = sum x,  x_target
//            -> logprob = (x_target - m) - log s,  entropy = log s - q / s,  sum p^2 = r / s^2,  mean x = l / V
//   grad   : dz = (g (onehot - p) - h p (log p + entropy)) * dx/dz,  log p = (x - m) - log s
//            dz overwrites z. g and h are the upstream gradients of logprob and entropy.
//   frozen : e = exp(x - m) dx/dz, and 0 at the target y
//            e overwrites z. The row's accumulator acc is rescaled to the new m. A GEMM then adds sum_j e_j w_j to acc.
//            -> d logprob / d hidden = dx_y/dz_y (o / s) w_y - acc / s,  o = sum of exp(x_j - m) over j != y
//            No two nearly equal numbers are subtracted, however peaked p is.
//
// m and log s stay two numbers: at m = -150, rounding m + log s to one float would cost p five digits.
//
// Memory: stats reads a tile once, grad reads and writes it once, frozen reads it twice and writes it once. All other
// loops run over one block, which stays in L1.
// Determinism: one thread sums a row of a tile in a fixed order, so the same inputs give the same bits.
#include "logprob.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "multiversion.h"

namespace rlft {
namespace {

// exp(x) for x up to about 0, by Cephes' range reduction and degree-5 polynomial. The error is about 1 ulp. The result
// is 0 if exp(x) would be subnormal. NaN fails the last comparison, so it stays NaN.
RLFT_INLINE float exp_nonpositive(float x) {
  // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits. Adding 127 makes the integer a
  // biased exponent.
  constexpr float kRound = 12582912.0f + 127.0f;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return x < kMinExponent ? 0.0f : p * std::bit_cast<float>(std::bit_cast<uint32_t>(shifted) << 23);
}

// tanh(x) with an error of about 1 ulp. Near 0 it is Cephes' polynomial, because the quotient of exponentials would
// lose digits there. NaN stays NaN.
RLFT_INLINE float hyperbolic_tangent(float x) {
  const float magnitude = std::fabs(x), square = x * x, e = exp_nonpositive(-2.0f * magnitude);
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const float small = p * square * x + x, large = std::copysign((1.0f - e) / (1.0f + e), x);
  return magnitude < 0.625f ? small : large;
}

// Writes x of columns [begin, begin + count) into `out`, and -inf into the rest of the block.
RLFT_INLINE void transform_block(const Transform& t, const float* z, int64_t begin, int64_t count,
                                 float inv_temperature, float (&out)[kBlock]) {
  const float factor = t.softcap > 0 ? t.scale / t.softcap : t.scale * inv_temperature;
  if (t.bias != nullptr) {
    for (int64_t j = 0; j < count; ++j) out[j] = (z[j] + t.bias[begin + j]) * factor;
  } else {
    for (int64_t j = 0; j < count; ++j) out[j] = z[j] * factor;
  }
  if (t.softcap > 0) {
    const float cap = t.softcap * inv_temperature;
    for (int64_t j = 0; j < count; ++j) out[j] = cap * hyperbolic_tangent(out[j]);
  }
  std::fill(out + count, out + kBlock, kMinusInf);
}

// Compilers vectorise loops with independent iterations. They do not vectorise a sum of floats, whose order they must
// keep, so reductions are written with vectors. A vector of 32 bytes fits AVX2 and AVX-512. Vectors are passed by
// reference, because each architecture passes them by value in its own way.
using Vector [[gnu::vector_size(32)]] = float;

struct Max {
  static constexpr float kNeutral = kMinusInf;
  RLFT_INLINE void operator()(Vector& a, const Vector& b) const { a = b > a ? b : a; }  // keeps a if b is NaN
};

struct Add {
  static constexpr float kNeutral = 0;
  RLFT_INLINE void operator()(Vector& a, const Vector& b) const { a += b; }
};

// Reduces a block by op. Its four parts are independent, so that no operation waits for the one before it.
template <class Op>
RLFT_INLINE float reduce(const float (&x)[kBlock], const Op& op) {
  constexpr int64_t kStep = 32, kVector = 8;
  static_assert(kBlock % kStep == 2 * kVector);
  Vector parts[4], next;
  for (Vector& part : parts) part = Vector{} + Op::kNeutral;
  for (int64_t j = 0; j < kBlock - kStep; j += kStep) {
    for (int64_t k = 0; k < 4; ++k) {
      std::memcpy(&next, x + j + k * kVector, sizeof(next));
      op(parts[k], next);
    }
  }
  for (int64_t k = 0; k < 2; ++k) {
    std::memcpy(&next, x + kBlock - (2 - k) * kVector, sizeof(next));
    op(parts[k], next);
  }
  op(parts[0], parts[2]);
  op(parts[1], parts[3]);
  op(parts[0], parts[1]);
  Vector y = parts[0];
  op(y, __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3));
  op(y, __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5));
  op(y, __builtin_shufflevector(y, y, 1, 0, 3, 2, 5, 4, 7, 6));
  return y[0];
}

struct Math {
  RLFT_INLINE static float exp(float x) { return exp_nonpositive(x); }
  RLFT_INLINE static float max(float a, float b) { return std::max(a, b); }
};

// Returns the statistics of one block. Columns beyond the tile hold -inf and add 0 to every sum.
template <bool kEntropy>
RLFT_INLINE RowStats block_stats(const float (&x)[kBlock], bool squares) {
  RowStats stats;
  stats.max = reduce(x, Max());
  const float shift = stats.max == kMinusInf ? 0.0f : stats.max;
  float terms[kBlock], tops[kBlock], others[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    const float d = x[j] - shift, e = exp_nonpositive(d);
    tops[j] = e == 1.0f ? 1.0f : 0.0f;
    terms[j] = e == 1.0f ? 0.0f : e;
    if (kEntropy) others[j] = e * (d < kMinExponent ? kMinExponent : d);  // 0 * -inf would be NaN
  }
  stats.sums.excess = reduce(terms, Add()) + (reduce(tops, Add()) - 1);
  if (kEntropy) stats.sums.shift = reduce(others, Add());
  if (squares) {
    for (int64_t j = 0; j < kBlock; ++j) others[j] = (terms[j] + tops[j]) * (terms[j] + tops[j]);  // one of them is 0
    stats.sums.squared = reduce(others, Add());
  }
  return stats;
}

// Returns the sum of the first `count` columns of a block. The other columns hold -inf.
RLFT_INLINE float sum_of(const float (&x)[kBlock], int64_t count) {
  float inside[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) inside[j] = j < count ? x[j] : 0.0f;
  return reduce(inside, Add());
}

RLFT_INLINE void store(const StatsOut& out, int64_t i, const RowStats& row) {
  out.store<false, false>(i, row);
  if (out.sum_exp_shift != nullptr) out.sum_exp_shift[i] = row.sums.shift;
  if (out.sum_exp_squared != nullptr) out.sum_exp_squared[i] = row.sums.squared;
}

// Asks which sums are wanted once per block: to compile the row for each answer took a gigabyte and four times as long.
RLFT_INLINE void stats_row(const Tile& tile, const StatsOut& out, int64_t i) {
  float x[kBlock];
  const float* z = tile.logits + i * tile.stride;
  const float inv_temperature = tile.inv_temperature[i * tile.inv_temperature_stride];
  const int64_t target = tile.target[i] - tile.vocab_start;
  const bool entropy = out.sum_exp_shift != nullptr, squares = out.sum_exp_squared != nullptr;
  RowStats row = out.load<false, false>(i);
  if (entropy) row.sums.shift = out.sum_exp_shift[i];
  if (squares) row.sums.squared = out.sum_exp_squared[i];
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, tile.columns - begin);
    transform_block(tile.transform, z + begin, begin, count, inv_temperature, x);
    if (target >= begin && target < begin + count) out.target_logit[i] = x[target - begin];
    row.merge<Math>(entropy ? block_stats<true>(x, squares) : block_stats<false>(x, squares));
    if (out.sum_logits != nullptr) out.sum_logits[i] += sum_of(x, count);
  }
  store(out, i, row);
}

}  // namespace

RLFT_MULTIVERSION void stats_rows(const Tile& tile, const StatsOut& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) stats_row(tile, out, i);
}

RLFT_MULTIVERSION void merge_blocks(const float* partial, int64_t blocks, int64_t rows, const StatsOut& out) {
  for (int64_t r = 0; r < rows; ++r) {
    RowStats row;
    for (int64_t i = 0; i < blocks; ++i) {
      const float* own = partial + kNumStats * i * rows + r;
      row.merge<Math>({own[0], {own[rows], own[2 * rows]}});
    }
    store(out, r, row);
  }
}

namespace {
RLFT_INLINE void grad_row(const Tile& tile, const Upstream& upstream, int64_t i) {
  float x[kBlock];
  const float* z = tile.logits + i * tile.stride;
  float* dz = tile.out + i * tile.stride;
  const Transform& t = tile.transform;
  const float inv_temperature = tile.inv_temperature[i * tile.inv_temperature_stride];
  const int64_t target = tile.target[i] - tile.vocab_start;
  const float g = upstream.grad_logprob[i], max = upstream.max[i], log_sum = upstream.log_sum[i];
  const float h = upstream.grad_entropy != nullptr ? upstream.grad_entropy[i] : 0.0f;
  const float entropy = upstream.grad_entropy != nullptr ? upstream.entropy[i] : 0.0f;
  if (g == 0 && h == 0) {  // also if a logit is NaN: the loss does not depend on this row
    std::fill_n(dz, tile.columns, 0.0f);
    return;
  }
  const float dx_dz = t.scale * inv_temperature;
  const float inv_cap = t.softcap > 0 ? 1.0f / (t.softcap * inv_temperature) : 0.0f;
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, tile.columns - begin);
    transform_block(t, z + begin, begin, count, inv_temperature, x);
    const int64_t hit = target >= begin && target < begin + count ? target - begin : -1;
    if (h == 0) {
      for (int64_t j = 0; j < count; ++j) dz[begin + j] = -g * exp_nonpositive((x[j] - max) - log_sum);
    } else {
      for (int64_t j = 0; j < count; ++j) {
        const float log_p = (x[j] - max) - log_sum;
        const float finite = log_p < kMinExponent ? kMinExponent : log_p;  // 0 * -inf would be NaN
        dz[begin + j] = -exp_nonpositive(log_p) * (g + h * (finite + entropy));
      }
    }
    if (hit >= 0) dz[begin + hit] += g;
    if (t.softcap > 0) {  // d softcap tanh(u) / du = softcap (1 - tanh^2 u)
      for (int64_t j = 0; j < count; ++j) dz[begin + j] *= dx_dz * (1.0f - (x[j] * inv_cap) * (x[j] * inv_cap));
    } else if (dx_dz != 1.0f) {
      for (int64_t j = 0; j < count; ++j) dz[begin + j] *= dx_dz;
    }
  }
}

}  // namespace

RLFT_MULTIVERSION void grad_rows(const Tile& tile, const Upstream& upstream, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) grad_row(tile, upstream, i);
}

namespace {
RLFT_INLINE void frozen_row(const Tile& tile, const FrozenOut& out, int64_t i) {
  const float before = out.stats.max[i];
  stats_row(tile, out.stats, i);
  const float max = out.stats.max[i];
  const float rescale = before == kMinusInf ? 0.0f : exp_nonpositive(before - max);
  float* accumulator = out.accumulator + i * out.dim;
  if (rescale != 1.0f) {
    for (int64_t d = 0; d < out.dim; ++d) accumulator[d] *= rescale;
  }
  float x[kBlock], sum_others = 0;
  const float* z = tile.logits + i * tile.stride;
  float* weights = tile.out + i * tile.stride;
  const Transform& t = tile.transform;
  const float inv_temperature = tile.inv_temperature[i * tile.inv_temperature_stride];
  const int64_t target = tile.target[i] - tile.vocab_start;
  const float slope = t.scale * inv_temperature, inv_cap = t.softcap > 0 ? 1.0f / (t.softcap * inv_temperature) : 0.0f;
  const float shift = max == kMinusInf ? 0.0f : max;
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, tile.columns - begin);
    transform_block(t, z + begin, begin, count, inv_temperature, x);
    if (target >= begin && target < begin + count) {
      const float u = t.softcap > 0 ? x[target - begin] * inv_cap : 0.0f;  // at x = -inf, -inf * 0 would be NaN
      out.target_slope[i] = slope * (1.0f - u * u);
      x[target - begin] = kMinusInf;
    }
    float terms[kBlock];
    for (int64_t j = 0; j < kBlock; ++j) terms[j] = exp_nonpositive(x[j] - shift);
    sum_others += reduce(terms, Add());
    if (t.softcap > 0) {  // d softcap tanh(u) / du = softcap (1 - tanh^2 u); at x = -inf, 0 * -inf would be NaN
      for (int64_t j = 0; j < count; ++j) {
        const float e = terms[j], u = x[j] * inv_cap;
        weights[begin + j] = e == 0.0f ? 0.0f : e * slope * (1.0f - u * u);
      }
    } else {
      for (int64_t j = 0; j < count; ++j) weights[begin + j] = terms[j] * slope;
    }
  }
  out.sum_others[i] = out.sum_others[i] * rescale + sum_others;
}

}  // namespace

RLFT_MULTIVERSION void frozen_rows(const Tile& tile, const FrozenOut& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) frozen_row(tile, out, i);
}

}  // namespace rlft
