// linear_logprob on the CPU: everything that happens between the GEMMs, on one tile of raw logits z (R, C).
//
//   x      = softcap * tanh(scale * (z + bias) / softcap) * inv_temperature      the logits that the softmax sees
//   stats  : online over tiles, per row: m = max x,  s = sum exp(x - m),  q = sum exp(x - m) (x - m),
//            r = sum exp(x - m)^2,  x_target
//            -> logprob = (x_target - m) - log s,  entropy = log s - q / s,  sum p^2 = r / s^2
//   grad   : dz = (g (onehot - p) - h p (log p + entropy)) * dx/dz,  log p = (x - m) - log s, in place of z
//   frozen : e = exp(x - m) dx/dz in place of z, 0 at the target, so that a GEMM adds sum_j e_j w_j to the row's
//            accumulator, which is first scaled to the new m:  d logprob / d hidden = dx_y/dz_y (o / s) w_y - acc / s
//            with o = sum of exp(x_j - m) over j != y. No difference of nearly equal numbers, however peaked p is.
//   m + log s is never rounded to one number: at m = -150 that alone would cost p five digits.
//            g, h: upstream gradients of logprob and entropy
//
// Memory: a tile is read twice by stats (the second time from cache) and read and written once by grad.
// Determinism: one row belongs to one thread and is summed in a fixed lane order, so same inputs give same bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "memory.h"
#include "multiversion.h"
#include "stable.h"

namespace rlft {
namespace {

constexpr int kLanes = 16;                // independent partial sums: one AVX-512 register, two AVX2 ones
constexpr int64_t kBlock = 31 * kLanes;   // columns transformed at once: 2 KiB, so they are still in L1 for the next loop
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr float kMinExponent = -87.0f;    // exp(-87) = 1.6e-38, the smallest normal float

struct Transform {
  const float* bias;  // (C,) or null
  float softcap;      // 0: none
  float scale;
};

struct Tile {
  const float* logits;  // (R, C), row stride `stride`
  float* out;           // as logits, and may be the same memory
  int64_t rows, columns, stride;
  const int64_t* target;  // (R,), as vocabulary ids
  int64_t vocab_start;    // vocabulary id of column 0
  const float* inv_temperature;
  int64_t inv_temperature_stride;  // 0: one value for all rows
  Transform transform;
};

// exp for x <= ~0: Cephes' range reduction and degree-5 polynomial, 1 ulp or so; 0 where it would be subnormal. NaN
// stays NaN: the comparisons are written so that NaN fails them.
RLFT_INLINE float exp_nonpositive(float exponent) {
  const float x = exponent < kMinExponent ? kMinExponent : exponent;
  // Adding 1.5 * 2^23 rounds to nearest and leaves the integer in the low bits: vectorises everywhere, defined for NaN.
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float result = p * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 127) << 23);
  return exponent < kMinExponent ? 0.0f : result;
}

// Writes the softmax's logits of columns [begin, begin + count) into out, and returns nothing else.
RLFT_INLINE void transform_block(const Transform& t, const float* z, int64_t begin, int64_t count, float inv_temperature,
                                 float* out) {
  const float factor = t.softcap > 0 ? t.scale / t.softcap : t.scale * inv_temperature;
  if (t.bias != nullptr) {
    for (int64_t j = 0; j < count; ++j) out[j] = (z[j] + t.bias[begin + j]) * factor;
  } else {
    for (int64_t j = 0; j < count; ++j) out[j] = z[j] * factor;
  }
  if (t.softcap > 0) {
    const float cap = t.softcap * inv_temperature;
    for (int64_t j = 0; j < count; ++j) out[j] = cap * std::tanh(out[j]);
  }
}

RLFT_INLINE float lane_sum(const float (&lanes)[kLanes]) {
  float sum[kLanes];
  for (int l = 0; l < kLanes; ++l) sum[l] = lanes[l];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) sum[l] += sum[l + width];
  return sum[0];
}

struct RowStats {
  float max = kMinusInf, sum_exp = 0;
  float sum_exp_shift = 0;    // sum exp(x - max) (x - max)
  float sum_exp_squared = 0;  // sum exp(x - max)^2

  // The statistics of the union of two column sets.
  RLFT_INLINE void merge(const RowStats& other) {
    const float top = std::max(max, other.max);
    const float shift = top == kMinusInf ? 0.0f : top;  // -inf - -inf is NaN; an empty set must stay empty
    const float a = std::max(max - shift, kMinExponent), b = std::max(other.max - shift, kMinExponent);
    const float wa = exp_nonpositive(max - shift), wb = exp_nonpositive(other.max - shift);
    sum_exp_shift = wa * (sum_exp_shift + a * sum_exp) + wb * (other.sum_exp_shift + b * other.sum_exp);
    sum_exp = wa * sum_exp + wb * other.sum_exp;
    sum_exp_squared = wa * wa * sum_exp_squared + wb * wb * other.sum_exp_squared;
    max = top;
  }
};

// Statistics of one block of logits, whose length is a multiple of kLanes (the caller pads with -inf).
template <bool kEntropy, bool kSquares>
RLFT_INLINE RowStats block_stats(const float* x, int64_t count) {
  float lanes[kLanes], entropy_lanes[kLanes] = {}, square_lanes[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) lanes[l] = x[l];
  for (int64_t j = kLanes; j < count; j += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
  RowStats stats;
  for (int l = 0; l < kLanes; ++l) stats.max = std::max(stats.max, lanes[l]);
  const float shift = stats.max == kMinusInf ? 0.0f : stats.max;
  for (int l = 0; l < kLanes; ++l) lanes[l] = 0;
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float d = x[j + l] - shift;
      const float e = exp_nonpositive(d);
      lanes[l] += e;
      if (kEntropy) entropy_lanes[l] += e * (d < kMinExponent ? kMinExponent : d);  // 0 * -inf would be NaN
      if (kSquares) square_lanes[l] += e * e;
    }
  }
  stats.sum_exp = lane_sum(lanes);
  if (kEntropy) stats.sum_exp_shift = lane_sum(entropy_lanes);
  if (kSquares) stats.sum_exp_squared = lane_sum(square_lanes);
  return stats;
}

struct StatsOut {  // (R,) each; sum_exp_shift and sum_exp_squared are null where nobody asks for what they give
  float *max, *sum_exp, *sum_exp_shift, *sum_exp_squared, *target_logit;
};

template <bool kEntropy, bool kSquares>
RLFT_INLINE void stats_row(const Tile& tile, const StatsOut& out, int64_t i) {
  float x[kBlock];
  const float* z = tile.logits + i * tile.stride;
  const float inv_temperature = tile.inv_temperature[i * tile.inv_temperature_stride];
  const int64_t target = tile.target[i] - tile.vocab_start;
  RowStats row{out.max[i], out.sum_exp[i], kEntropy ? out.sum_exp_shift[i] : 0.0f,
               kSquares ? out.sum_exp_squared[i] : 0.0f};
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, tile.columns - begin);
    transform_block(tile.transform, z + begin, begin, count, inv_temperature, x);
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = count; j < padded; ++j) x[j] = kMinusInf;
    if (target >= begin && target < begin + count) out.target_logit[i] = x[target - begin];
    row.merge(block_stats<kEntropy, kSquares>(x, padded));
  }
  out.max[i] = row.max;
  out.sum_exp[i] = row.sum_exp;
  if (kEntropy) out.sum_exp_shift[i] = row.sum_exp_shift;
  if (kSquares) out.sum_exp_squared[i] = row.sum_exp_squared;
}

RLFT_MULTIVERSION void stats_rows(const Tile& tile, const StatsOut& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (out.sum_exp_squared != nullptr)
      out.sum_exp_shift != nullptr ? stats_row<true, true>(tile, out, i) : stats_row<false, true>(tile, out, i);
    else
      out.sum_exp_shift != nullptr ? stats_row<true, false>(tile, out, i) : stats_row<false, false>(tile, out, i);
  }
}

constexpr int64_t kNumStats = 4;  // numbers in a RowStats

// Statistics of whole rows from those of their tiles, in the order in which stats_rows meets them: the same bits.
RLFT_MULTIVERSION void merge_tiles(const float* partial, int64_t tiles, int64_t rows, const StatsOut& out) {
  for (int64_t r = 0; r < rows; ++r) {
    RowStats row;
    for (int64_t i = 0; i < tiles; ++i) {
      const float* own = partial + kNumStats * i * rows + r;
      row.merge({own[0], own[rows], own[2 * rows], own[3 * rows]});
    }
    out.max[r] = row.max;
    out.sum_exp[r] = row.sum_exp;
    if (out.sum_exp_shift != nullptr) out.sum_exp_shift[r] = row.sum_exp_shift;
    if (out.sum_exp_squared != nullptr) out.sum_exp_squared[r] = row.sum_exp_squared;
  }
}

struct Upstream {
  const float *max, *log_sum, *entropy, *grad_logprob, *grad_entropy;  // (R,) each; entropy, grad_entropy may be null
};

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

RLFT_MULTIVERSION void grad_rows(const Tile& tile, const Upstream& upstream, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) grad_row(tile, upstream, i);
}

struct FrozenOut {
  StatsOut stats;
  float *sum_others, *target_slope;  // (R,) each: sum exp(x - max) without the target, dx/dz at the target
  float* accumulator;                // (R, D)
  int64_t dim;
};

RLFT_INLINE void frozen_row(const Tile& tile, const FrozenOut& out, int64_t i) {
  const float before = out.stats.max[i];
  stats_row<false, false>(tile, out.stats, i);
  const float max = out.stats.max[i];
  const float rescale = before == kMinusInf ? 0.0f : exp_nonpositive(before - max);
  float* accumulator = out.accumulator + i * out.dim;
  if (rescale != 1.0f) {
    for (int64_t d = 0; d < out.dim; ++d) accumulator[d] *= rescale;
  }
  float x[kBlock], lanes[kLanes] = {};
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
      const float u = x[target - begin] * inv_cap;
      out.target_slope[i] = slope * (1.0f - u * u);
      x[target - begin] = kMinusInf;
    }
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = count; j < padded; ++j) x[j] = kMinusInf;
    if (t.softcap > 0) {  // d softcap tanh(u) / du = softcap (1 - tanh^2 u)
      for (int64_t j = 0; j < padded; ++j) {
        const float e = exp_nonpositive(x[j] - shift), u = x[j] * inv_cap;
        lanes[j % kLanes] += e;
        if (j < count) weights[begin + j] = e == 0.0f ? 0.0f : e * slope * (1.0f - u * u);
      }
    } else {
      for (int64_t j = 0; j < padded; j += kLanes)
        for (int l = 0; l < kLanes; ++l) {
          x[j + l] = exp_nonpositive(x[j + l] - shift);
          lanes[l] += x[j + l];
        }
      for (int64_t j = 0; j < count; ++j) weights[begin + j] = x[j] * slope;
    }
  }
  out.sum_others[i] = out.sum_others[i] * rescale + lane_sum(lanes);
}

RLFT_MULTIVERSION void frozen_rows(const Tile& tile, const FrozenOut& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) frozen_row(tile, out, i);
}

// ---- binding -------------------------------------------------------------------------------------------------------

const float* float_or_null(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<const float*>(t->const_data_ptr()) : nullptr;
}

float* mutable_float(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

float* mutable_float_or_null(const std::optional<Tensor>& t) { return t.has_value() ? mutable_float(*t) : nullptr; }

Upstream make_upstream(const Tensor& max, const Tensor& log_sum, const std::optional<Tensor>& entropy,
                       const Tensor& grad_logprob, const std::optional<Tensor>& grad_entropy) {
  return {static_cast<const float*>(max.const_data_ptr()), static_cast<const float*>(log_sum.const_data_ptr()),
          float_or_null(entropy), static_cast<const float*>(grad_logprob.const_data_ptr()), float_or_null(grad_entropy)};
}

// A tile of a chunk's logits: `columns` vocabulary ids from `start` on, stored densely behind those of lower ids.
Tile chunk_tile(const Tile& whole, int64_t start, int64_t columns) {
  Tile tile = whole;
  tile.logits += whole.rows * start;
  tile.out += whole.rows * start;
  tile.columns = tile.stride = columns;
  tile.vocab_start = start;
  if (tile.transform.bias != nullptr) tile.transform.bias += start;
  return tile;
}

Tile make_tile(const Tensor& logits, int64_t rows, int64_t columns, int64_t stride, const Tensor& target,
               int64_t vocab_start, const std::optional<Tensor>& bias, const Tensor& inv_temperature, double softcap,
               double scale) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float, "logits must be float32");
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long && target.size(0) == rows && target.is_contiguous(),
                  "target must be a contiguous int64 tensor with one entry per row of logits");
  STD_TORCH_CHECK(inv_temperature.size(0) == 1 || inv_temperature.size(0) == rows,
                  "inv_temperature must hold one value, or one per row of logits");
  return {
      .logits = static_cast<const float*>(logits.const_data_ptr()),
      .out = static_cast<float*>(logits.mutable_data_ptr()),
      .rows = rows,
      .columns = columns,
      .stride = stride,
      .target = static_cast<const int64_t*>(target.const_data_ptr()),
      .vocab_start = vocab_start,
      .inv_temperature = static_cast<const float*>(inv_temperature.const_data_ptr()),
      .inv_temperature_stride = inv_temperature.size(0) == 1 ? 0 : 1,
      .transform = {float_or_null(bias), static_cast<float>(softcap), static_cast<float>(scale)},
  };
}

// `out` is where results of the tile's shape go; they may replace the logits.
Tile make_tile(const Tensor& logits, const Tensor& target, int64_t vocab_start, const std::optional<Tensor>& bias,
               const Tensor& inv_temperature, double softcap, double scale, const Tensor& out) {
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.size(1) == 1 || logits.stride(1) == 1),
                  "logits must be a (rows, columns) tile with contiguous rows");
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.stride(0) == logits.stride(0),
                  "results of the tile must be float32 and lie as the logits do");
  Tile tile = make_tile(logits, logits.size(0), logits.size(1), logits.stride(0), target, vocab_start, bias,
                        inv_temperature, softcap, scale);
  tile.out = mutable_float(out);
  return tile;
}

void logprob_stats_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias, Tensor inv_temperature,
                    double softcap, double scale, Tensor max, Tensor sum_exp, std::optional<Tensor> sum_exp_shift,
                    std::optional<Tensor> sum_exp_squared, Tensor target_logit) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale, logits);
  const StatsOut out{mutable_float(max), mutable_float(sum_exp), mutable_float_or_null(sum_exp_shift),
                     mutable_float_or_null(sum_exp_squared), mutable_float(target_logit)};
  torch::stable::parallel_for(0, tile.rows, 1, [&](int64_t begin, int64_t end) { stats_rows(tile, out, begin, end); });
}

void logprob_frozen_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                     Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor sum_exp,
                     Tensor target_logit, Tensor sum_others, Tensor target_slope, Tensor accumulator, Tensor exp_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale, exp_logits);
  const FrozenOut out{.stats = {mutable_float(max), mutable_float(sum_exp), nullptr, nullptr,
                                mutable_float(target_logit)},
                      .sum_others = mutable_float(sum_others),
                      .target_slope = mutable_float(target_slope),
                      .accumulator = mutable_float(accumulator),
                      .dim = accumulator.size(1)};
  torch::stable::parallel_for(0, tile.rows, 1, [&](int64_t begin, int64_t end) { frozen_rows(tile, out, begin, end); });
}

void logprob_grad_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias, Tensor inv_temperature,
                   double softcap, double scale, Tensor max, Tensor log_sum, std::optional<Tensor> entropy,
                   Tensor grad_logprob, std::optional<Tensor> grad_entropy, Tensor grad_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale, grad_logits);
  const Upstream upstream = make_upstream(max, log_sum, entropy, grad_logprob, grad_entropy);
  torch::stable::parallel_for(0, tile.rows, 1, [&](int64_t begin, int64_t end) { grad_rows(tile, upstream, begin, end); });
}

// ---- chunks --------------------------------------------------------------------------------------------------------
//
// A chunk holds the logits of all its rows over the whole vocabulary, so within 64 MiB it has few rows (341 at
// V = 49152). A GEMM with few rows that all threads share packs its tile of the weight once per thread, and that takes
// a tenth of its time. Here one thread takes a tile from end to end, GEMMs and all; inside a parallel region the
// vendor's GEMM runs on one thread.

// out (+)= a @ b. Below autograd, which the threads of a parallel region have switched on.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  STABLE_TORCH_ERROR_CODE_CHECK(accumulate ? aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1, 1)
                                           : aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

struct Chunk {
  Tensor hidden, weight, logits;  // (R, D) and (V, D) float32 or narrower, (R * V,) float32
  int64_t tile_columns;
  Tile whole;

  int64_t num_tiles() const { return (weight.size(0) + tile_columns - 1) / tile_columns; }
  int64_t start(int64_t index) const { return index * tile_columns; }
  int64_t columns(int64_t index) const { return std::min(tile_columns, weight.size(0) - start(index)); }
  Tile tile(int64_t index) const { return chunk_tile(whole, start(index), columns(index)); }

  Tensor tile_logits(int64_t index) const {  // (R, columns)
    Tensor memory = logits;
    const Tensor flat = torch::stable::narrow(memory, 0, whole.rows * start(index), whole.rows * columns(index));
    return torch::stable::view(flat, {whole.rows, columns(index)});
  }
  Tensor tile_rows(Tensor matrix, int64_t index) const {  // (columns, D) of a (V, D) matrix
    return torch::stable::narrow(matrix, 0, start(index), columns(index));
  }
  Tensor tile_weight(int64_t index) const { return torch::stable::to(tile_rows(weight, index), ScalarType::Float); }
};

Chunk make_chunk(const Tensor& hidden, const Tensor& weight, const Tensor& logits, int64_t tile_columns,
                 const Tensor& target, const std::optional<Tensor>& bias, const Tensor& inv_temperature, double softcap,
                 double scale) {
  const int64_t rows = hidden.size(0);
  STD_TORCH_CHECK(logits.numel() >= rows * weight.size(0), "logits must have room for rows x vocabulary");
  return {hidden, weight, logits, tile_columns,
          make_tile(logits, rows, 0, 0, target, 0, bias, inv_temperature, softcap, scale)};
}

void logprob_chunk_stats_(Tensor hidden, Tensor weight, Tensor logits, int64_t tile_columns, Tensor target,
                          std::optional<Tensor> bias, Tensor inv_temperature, double softcap, double scale, Tensor max,
                          Tensor sum_exp, std::optional<Tensor> sum_exp_shift, std::optional<Tensor> sum_exp_squared,
                          Tensor target_logit) {
  const Chunk chunk = make_chunk(hidden, weight, logits, tile_columns, target, bias, inv_temperature, softcap, scale);
  const int64_t rows = chunk.whole.rows, tiles = chunk.num_tiles();
  std::vector<float> partial(kNumStats * tiles * rows, 0.0f);  // per tile: RowStats of all rows, number by number
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      multiply(chunk.tile_logits(i), chunk.hidden, torch::stable::transpose(chunk.tile_weight(i), 0, 1), false);
      float* own = partial.data() + kNumStats * i * rows;
      std::fill_n(own, rows, kMinusInf);
      const StatsOut out{own, own + rows, sum_exp_shift ? own + 2 * rows : nullptr,
                         sum_exp_squared ? own + 3 * rows : nullptr, mutable_float(target_logit)};
      stats_rows(chunk.tile(i), out, 0, rows);
    }
  });
  merge_tiles(partial.data(), tiles, rows,
              {mutable_float(max), mutable_float(sum_exp), mutable_float_or_null(sum_exp_shift),
               mutable_float_or_null(sum_exp_squared), nullptr});
}

void add_column_sums(const Tile& tile, float* out, bool accumulate) {
  if (!accumulate) std::fill_n(out, tile.columns, 0.0f);
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t j = 0; j < tile.columns; ++j) out[j] += tile.out[r * tile.stride + j];
}

void logprob_chunk_grad_(Tensor hidden, Tensor weight, Tensor logits, int64_t tile_columns, Tensor target,
                         std::optional<Tensor> bias, Tensor inv_temperature, double softcap, double scale, Tensor max,
                         Tensor log_sum, std::optional<Tensor> entropy, Tensor grad_logprob,
                         std::optional<Tensor> grad_entropy, std::optional<Tensor> grad_hidden,
                         std::optional<Tensor> grad_weight, std::optional<Tensor> grad_bias, bool accumulate) {
  const Chunk chunk = make_chunk(hidden, weight, logits, tile_columns, target, bias, inv_temperature, softcap, scale);
  const Upstream upstream = make_upstream(max, log_sum, entropy, grad_logprob, grad_entropy);
  const int64_t tiles = chunk.num_tiles();
  const int64_t parts = std::min<int64_t>(torch::stable::get_num_threads(), tiles);
  Tensor part_hidden = torch::stable::new_zeros(hidden, {grad_hidden ? parts : 0, hidden.size(0), hidden.size(1)});
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      for (int64_t i = part * tiles / parts; i < (part + 1) * tiles / parts; ++i) {
        const Tile tile = chunk.tile(i);
        const Tensor z = chunk.tile_logits(i);
        grad_rows(tile, upstream, 0, tile.rows);
        if (grad_hidden) multiply(torch::stable::select(part_hidden, 0, part), z, chunk.tile_weight(i), true);
        if (grad_weight) {
          multiply(chunk.tile_rows(*grad_weight, i), torch::stable::transpose(z, 0, 1), chunk.hidden, accumulate);
        }
        if (grad_bias) add_column_sums(tile, mutable_float(*grad_bias) + chunk.start(i), accumulate);
      }
    }
  });
  if (!grad_hidden) return;
  float* out = mutable_float(*grad_hidden);
  const float* in = static_cast<const float*>(part_hidden.const_data_ptr());
  const int64_t size = hidden.numel();
  std::copy_n(in, size, out);
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) out[i] += in[part * size + i];
}

void use_huge_pages_(Tensor x) { with_huge_pages(x); }

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("logprob_stats_", TORCH_BOX(&rlft::logprob_stats_));
  m.impl("logprob_grad_", TORCH_BOX(&rlft::logprob_grad_));
  m.impl("logprob_frozen_", TORCH_BOX(&rlft::logprob_frozen_));
  m.impl("logprob_chunk_stats_", TORCH_BOX(&rlft::logprob_chunk_stats_));
  m.impl("logprob_chunk_grad_", TORCH_BOX(&rlft::logprob_chunk_grad_));
  m.impl("use_huge_pages_", TORCH_BOX(&rlft::use_huge_pages_));
}
