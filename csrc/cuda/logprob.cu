// linear_logprob on CUDA: the passes between the GEMMs, each over one (R, C) tile of raw float32 logits.
//
// The equations are in csrc/cpu/logprob_rows.cpp. Bytes moved per logit:
//
//   logprob_stats_    4 read
//   logprob_grad_     4 read, 2 or 4 written (dlogits in the dtype of the GEMM that follows)
//   logprob_frozen_   4 read twice, the second time mostly from L2, 2 or 4 written; 8 per element of the accumulator
//
// The loads hide one exp per logit (two in frozen) as long as little else is done per logit. A thread therefore issues
// the loads of its 32 columns of a block at once. The maximum of the block is found first, so that every exp is
// computed once, relative to this maximum. The block is then merged into the statistics of the row, which all threads
// hold in registers. Features that only some problems need (a bias, a softcap, the target's column) are tested once per
// block. A block of threads owns a row. In grad, which reduces nothing, it owns kGradBlock columns of a row.
//
// The result is deterministic: lanes and warps are added in a fixed order, and blocks of kBlock columns are merged from
// left to right. A row therefore has the same bits in one launch and in several tiles, if the tiles are multiples of
// kBlock. There are no atomics and no host syncs.
#include <cmath>
#include <cstring>
#include <optional>

#include "checks.h"
#include "cuda/dtypes.cuh"
#include "cuda/launch.cuh"
#include "row_stats.h"

namespace rlft {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 4;  // floats of one 16-byte access
// The columns that a thread holds, and the columns that a block of threads holds (_GPU_BLOCK in ops/logprob/tiles.py).
constexpr int kPerThread = 32, kBlock = kThreads * kPerThread;
constexpr int kGradPerThread = 8, kGradBlock = kThreads * kGradPerThread;

struct Tile {
  const float* logits;  // (R, C), row stride `stride`
  int64_t rows, columns, stride;
  const int64_t* target;  // (R,), as vocabulary ids
  int64_t vocab_start;    // vocabulary id of column 0
  const float* inv_temperature;
  int64_t inv_temperature_stride;  // 0: one value for all rows
  const float* bias;               // (C,) or null
  float softcap;                   // 0: none
  float scale;

  __device__ bool plain() const { return bias == nullptr && softcap <= 0; }
};

// ---- one row -------------------------------------------------------------------------------------------------------

struct Row {
  const float* logits;
  float inv_temperature;
  int64_t target;  // column in this tile; outside of the tile if the target is in another tile

  __device__ Row(const Tile& tile, int64_t r)
      : logits(tile.logits + r * tile.stride),
        inv_temperature(tile.inv_temperature[r * tile.inv_temperature_stride]),
        target(tile.target[r] - tile.vocab_start) {}
};

// Returns the k-th column of this thread within a block. Neighbouring threads read neighbouring words of 16 bytes.
__device__ int column_of(int k) {
  return (k / kVector) * (kThreads * kVector) + static_cast<int>(threadIdx.x) * kVector + k % kVector;
}

__device__ float softmax_logit(const Tile& tile, float z, int64_t column, float inv_temperature) {
  if (tile.bias != nullptr) z += tile.bias[column];
  if (tile.softcap > 0) return tile.softcap * inv_temperature * tanhf(z * (tile.scale / tile.softcap));
  return z * (tile.scale * inv_temperature);
}

// Returns dx/dz. The derivative of softcap tanh(u) by u is softcap (1 - tanh^2 u).
__device__ float slope_of(const Tile& tile, float x, float inv_temperature) {
  const float slope = tile.scale * inv_temperature;
  if (tile.softcap <= 0) return slope;
  const float u = x / (tile.softcap * inv_temperature);
  return slope * (1.0f - u * u);
}

// Loads the logits that the softmax sees. Columns beyond the tile get -inf.
template <bool kAligned, int kCount>
__device__ void load_block(const Tile& tile, const Row& row, int64_t begin, float (&x)[kCount]) {
  if (kAligned && tile.plain() && begin + kThreads * kCount <= tile.columns) {
    const float4* words = reinterpret_cast<const float4*>(row.logits + begin);
    float4 word[kCount / kVector];
#pragma unroll
    for (int v = 0; v < kCount / kVector; ++v) word[v] = words[v * kThreads + threadIdx.x];
    const float factor = tile.scale * row.inv_temperature;
#pragma unroll
    for (int v = 0; v < kCount / kVector; ++v) {
      x[v * kVector] = word[v].x * factor, x[v * kVector + 1] = word[v].y * factor;
      x[v * kVector + 2] = word[v].z * factor, x[v * kVector + 3] = word[v].w * factor;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; k += kVector) {
    const int64_t column = begin + column_of(k);
    float z[kVector];
    if (kAligned && column + kVector <= tile.columns) {
      const float4 word = *reinterpret_cast<const float4*>(row.logits + column);
      z[0] = word.x, z[1] = word.y, z[2] = word.z, z[3] = word.w;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] = column + i < tile.columns ? row.logits[column + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[k + i] = column + i < tile.columns ? softmax_logit(tile, z[i], column + i, row.inv_temperature) : -INFINITY;
    }
  }
}

// Calls f(k) if column `begin` + column_of(k) of this thread is the row's target. Most blocks do not hold the target.
template <int kCount, class F>
__device__ void at_target(const Tile& tile, const Row& row, int64_t begin, const F& f) {
  const int64_t at = row.target - begin;
  if (at < 0 || at >= kThreads * kCount || row.target >= tile.columns) return;
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    if (column_of(k) == static_cast<int>(at)) f(k);
}

template <class Out>
struct alignas(sizeof(Out) * kVector) Word {
  Out element[kVector];
};

__device__ void convert(float value, float& out) { out = value; }
__device__ void convert(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ void convert(float value, __half& out) { out = __float2half_rn(value); }

// Stores a vector of elements at an aligned address as one access. nvcc makes one store per element of a plain
// assignment beside the guarded stores of a row's end.
template <class Out>
__device__ void store_vector(const Word<Out>& word, Out* at) {
#ifdef __CUDA_ARCH__
  unsigned bits[sizeof(word) / 4];
  memcpy(bits, &word, sizeof(word));
  if constexpr (sizeof(word) == 16)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(bits[0]),
                 "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                 : "memory");
  else
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(at)), "r"(bits[0]), "r"(bits[1])
                 : "memory");
#else
  *reinterpret_cast<Word<Out>*>(at) = word;
#endif
}

template <bool kAligned, int kCount, class Out>
__device__ void store_block(const float (&value)[kCount], int64_t begin, int64_t columns, Out* row) {
#pragma unroll
  for (int k = 0; k < kCount; k += kVector) {
    const int64_t column = begin + column_of(k);
    Word<Out> word;
#pragma unroll
    for (int i = 0; i < kVector; ++i) convert(value[k + i], word.element[i]);
    if (kAligned && column + kVector <= columns) {
      store_vector(word, row + column);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column + i < columns) row[column + i] = word.element[i];
    }
  }
}

// ---- reductions ----------------------------------------------------------------------------------------------------

// Sums of a part of a block: excess leaves out the columns at the maximum, which at_max counts.
struct PartSums {
  float excess = 0, shift = 0, squared = 0, at_max = 0;
};

struct Shared {
  float max[kWarps];
  PartSums sums[kWarps];
  float logits[kWarps];
};

// Every thread gets the result. Calls of block_max and block_sum alternate, so the barrier of one call protects the
// array of the other. The array of logit_sum, which is called after them, is protected by the barriers of both.
__device__ float block_max(float value, Shared& shared) {
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) shared.max[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared.max[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) value = fmaxf(value, shared.max[w]);
  return value;
}

template <bool kAtMax, bool kEntropy, bool kSquares>
__device__ PartSums block_sum(PartSums sums, Shared& shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    sums.excess += __shfl_xor_sync(~0u, sums.excess, offset);
    if (kAtMax) sums.at_max += __shfl_xor_sync(~0u, sums.at_max, offset);
    if (kEntropy) sums.shift += __shfl_xor_sync(~0u, sums.shift, offset);
    if (kSquares) sums.squared += __shfl_xor_sync(~0u, sums.squared, offset);
  }
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = shared.sums[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    sums.excess += shared.sums[w].excess;
    if (kAtMax) sums.at_max += shared.sums[w].at_max;
    if (kEntropy) sums.shift += shared.sums[w].shift;
    if (kSquares) sums.squared += shared.sums[w].squared;
  }
  return sums;
}

struct Math {
  RLFT_INLINE static float exp(float x) { return expf(x); }
  RLFT_INLINE static float max(float a, float b) { return fmaxf(a, b); }
};

template <bool kEntropy, bool kSquares>
__device__ RowStats block_stats(const float (&x)[kPerThread], Shared& shared) {
  RowStats block;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) block.max = fmaxf(block.max, x[k]);
  block.max = block_max(block.max, shared);
  const float shift = block.max == -INFINITY ? 0.0f : block.max;
  PartSums own;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const float d = x[k] - shift, e = expf(d);
    own.excess += d == 0.0f ? 0.0f : e;
    own.at_max += d == 0.0f;
    if (kEntropy) own.shift += e * (d < kMinExponent ? kMinExponent : d);  // 0 * -inf would be nan
    if (kSquares) own.squared += e * e;
  }
  own = block_sum<true, kEntropy, kSquares>(own, shared);
  block.sums = {own.excess + (own.at_max - 1), own.shift, own.squared};
  return block;
}

// Returns the sum of the first `columns` columns of a block. The other columns hold -inf.
__device__ float logit_sum(const float (&x)[kPerThread], int64_t columns, Shared& shared) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) sum += column_of(k) < columns ? x[k] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) shared.logits[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = shared.logits[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared.logits[w];
  return sum;
}

// Merges all columns of the tile into `stats` and `sum_logits`. Stores the target's logit if this tile holds the target.
template <bool kEntropy, bool kSquares, bool kLogits, bool kAligned>
__device__ void add_columns(const Tile& tile, const Row& row, float* target_logit, Shared& shared, RowStats& stats,
                            double& sum_logits) {
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    float x[kPerThread];
    load_block<kAligned>(tile, row, begin, x);
    at_target<kPerThread>(tile, row, begin, [&](int k) { *target_logit = x[k]; });
    stats.merge<Math>(block_stats<kEntropy, kSquares>(x, shared));
    if (kLogits) sum_logits += logit_sum(x, tile.columns - begin, shared);
  }
}

// ---- kernels -------------------------------------------------------------------------------------------------------

template <bool kEntropy, bool kSquares, bool kLogits, bool kAligned>
__global__ __launch_bounds__(kThreads) void stats_kernel(Tile tile, StatsOut out) {
  __shared__ Shared shared;
  const int64_t r = blockIdx.x;
  RowStats stats = out.load<kEntropy, kSquares>(r);
  double sum_logits = kLogits ? out.sum_logits[r] : 0;
  add_columns<kEntropy, kSquares, kLogits, kAligned>(tile, Row(tile, r), out.target_logit + r, shared, stats,
                                                     sum_logits);
  if (threadIdx.x > 0) return;
  out.store<kEntropy, kSquares>(r, stats);
  if (kLogits) out.sum_logits[r] = sum_logits;
}

template <bool kEntropy, bool kAligned, class Out>
__global__ __launch_bounds__(kThreads) void grad_kernel(Tile tile, Upstream upstream, Out* out, int64_t out_stride) {
  const unsigned blocks = static_cast<unsigned>((tile.columns + kGradBlock - 1) / kGradBlock);
  const int64_t r = blockIdx.x / blocks, begin = static_cast<int64_t>(blockIdx.x % blocks) * kGradBlock;
  const Row row(tile, r);
  const float max = upstream.max[r], log_sum = upstream.log_sum[r], g = upstream.grad_logprob[r];
  const float h = kEntropy ? upstream.grad_entropy[r] : 0.0f, entropy = kEntropy ? upstream.entropy[r] : 0.0f;
  float dz[kGradPerThread] = {};
  if (g != 0 || h != 0) {  // else dz is 0, also if a logit is nan: the loss does not depend on this row
    float x[kGradPerThread];
    load_block<kAligned>(tile, row, begin, x);
#pragma unroll
    for (int k = 0; k < kGradPerThread; ++k) {
      const float log_p = (x[k] - max) - log_sum;
      const float finite = log_p < kMinExponent ? kMinExponent : log_p;  // 0 * -inf would be nan
      dz[k] = -expf(log_p) * (kEntropy ? g + h * (finite + entropy) : g);
    }
    at_target<kGradPerThread>(tile, row, begin, [&](int k) { dz[k] += g; });
#pragma unroll
    for (int k = 0; k < kGradPerThread; ++k) dz[k] *= slope_of(tile, x[k], row.inv_temperature);
  }
  store_block<kAligned>(dz, begin, tile.columns, out + r * out_stride);
}

template <bool kAligned, class Out>
__global__ __launch_bounds__(kThreads) void frozen_kernel(Tile tile, FrozenOut frozen, Out* out, int64_t out_stride) {
  __shared__ Shared shared;
  const int64_t r = blockIdx.x;
  const Row row(tile, r);
  const float before = frozen.stats.max[r];
  RowStats stats = frozen.stats.load<false, false>(r);
  double no_logits = 0;
  add_columns<false, false, false, kAligned>(tile, row, frozen.stats.target_logit + r, shared, stats, no_logits);
  const float shift = stats.max == -INFINITY ? 0.0f : stats.max;
  const float rescale = before == -INFINITY ? 0.0f : expf(before - shift);
  PartSums others;
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    float x[kPerThread];
    load_block<kAligned>(tile, row, begin, x);
    at_target<kPerThread>(tile, row, begin, [&](int k) {
      frozen.target_slope[r] = slope_of(tile, x[k], row.inv_temperature);
      x[k] = -INFINITY;
    });
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const float e = expf(x[k] - shift);
      others.excess += e;
      x[k] = e == 0.0f ? 0.0f : e * slope_of(tile, x[k], row.inv_temperature);
    }
    store_block<kAligned>(x, begin, tile.columns, out + r * out_stride);
  }
  __syncthreads();  // all threads have read the sums of the last reduction
  others = block_sum<false, false, false>(others, shared);
  float* accumulator = frozen.accumulator + r * frozen.dim;
  if (rescale != 1.0f)
    for (int64_t d = threadIdx.x; d < frozen.dim; d += kThreads) accumulator[d] *= rescale;
  if (threadIdx.x > 0) return;
  frozen.stats.store<false, false>(r, stats);
  frozen.sum_others[r] = frozen.sum_others[r] * rescale + others.excess;
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class F>
void with_bool(bool value, const F& f) {
  value ? f(std::true_type{}) : f(std::false_type{});
}

const float* floats(const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }
const float* floats(const std::optional<Tensor>& t) { return t.has_value() ? floats(*t) : nullptr; }
float* mutable_floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }
float* mutable_floats(const std::optional<Tensor>& t) { return t.has_value() ? mutable_floats(*t) : nullptr; }
double* mutable_doubles(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<double*>(t->mutable_data_ptr()) : nullptr;
}

Tile make_tile(const Tensor& logits, const Tensor& target, int64_t vocab_start, const std::optional<Tensor>& bias,
               const Tensor& inv_temperature, double softcap, double scale) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2, "logits must be a float32 tile");
  check_matrix("logits", logits, logits.size(0), logits.size(1));
  check_problem(logits.size(0), logits.size(1), target, bias, inv_temperature);
  return {
      .logits = floats(logits),
      .rows = logits.size(0),
      .columns = logits.size(1),
      .stride = logits.stride(0),
      .target = static_cast<const int64_t*>(target.const_data_ptr()),
      .vocab_start = vocab_start,
      .inv_temperature = floats(inv_temperature),
      .inv_temperature_stride = inv_temperature.size(0) == 1 ? 0 : 1,
      .bias = floats(bias),
      .softcap = static_cast<float>(softcap),
      .scale = static_cast<float>(scale),
  };
}

// Returns whether every row begins at an address that is aligned for a vector of elements.
bool aligned(const Tensor& t) {
  const int64_t bytes = kVector * static_cast<int64_t>(t.element_size());
  return t.stride(0) % kVector == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0;
}

void logprob_stats_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                    Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor excess,
                    std::optional<Tensor> sum_exp_shift, std::optional<Tensor> sum_exp_squared, Tensor target_logit,
                    std::optional<Tensor> sum_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale);
  check_stats(tile.rows, max, excess, sum_exp_shift, sum_exp_squared, target_logit, sum_logits);
  if (tile.rows == 0) return;
  const Launcher launch(logits);
  const StatsOut out{mutable_floats(max),           mutable_floats(excess),
                     mutable_floats(sum_exp_shift), mutable_floats(sum_exp_squared),
                     mutable_floats(target_logit),  mutable_doubles(sum_logits)};
  with_bool(sum_exp_shift.has_value(), [&](auto entropy) {
    with_bool(sum_exp_squared.has_value(), [&](auto squares) {
      with_bool(sum_logits.has_value(), [&](auto sums_logits) {
        with_bool(aligned(logits), [&](auto is_aligned) {
          launch(stats_kernel<entropy.value, squares.value, sums_logits.value, is_aligned.value>, tile.rows, kThreads,
                 tile, out);
        });
      });
    });
  });
}

void logprob_grad_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                   Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor log_sum,
                   std::optional<Tensor> entropy, Tensor grad_logprob, std::optional<Tensor> grad_entropy,
                   Tensor grad_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale);
  check_upstream(tile.rows, max, log_sum, entropy, grad_logprob, grad_entropy);
  check_matrix("grad_logits", grad_logits, tile.rows, tile.columns);
  if (tile.rows == 0) return;
  const Launcher launch(logits);
  const Upstream upstream{floats(max), floats(log_sum), floats(entropy), floats(grad_logprob), floats(grad_entropy)};
  const int64_t blocks = tile.rows * ((tile.columns + kGradBlock - 1) / kGradBlock);
  dispatch_among<float, __half, __nv_bfloat16>(grad_logits.scalar_type(), [&]<class Out>(Out*) {
    auto* out = static_cast<Out*>(grad_logits.mutable_data_ptr());
    with_bool(grad_entropy.has_value(), [&](auto has_entropy) {
      with_bool(aligned(logits) && aligned(grad_logits), [&](auto is_aligned) {
        launch(grad_kernel<has_entropy.value, is_aligned.value, Out>, blocks, kThreads, tile, upstream, out,
               grad_logits.stride(0));
      });
    });
  });
}

void logprob_frozen_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                     Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor excess,
                     Tensor target_logit, Tensor sum_others, Tensor target_slope, Tensor accumulator,
                     Tensor exp_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale);
  check_stats(tile.rows, max, excess, std::nullopt, std::nullopt, target_logit, std::nullopt);
  check_frozen(tile.rows, sum_others, target_slope, accumulator);
  check_matrix("exp_logits", exp_logits, tile.rows, tile.columns);
  if (tile.rows == 0) return;
  const Launcher launch(logits);
  const FrozenOut frozen{
      .stats = {mutable_floats(max), mutable_floats(excess), nullptr, nullptr, mutable_floats(target_logit)},
      .sum_others = mutable_floats(sum_others),
      .target_slope = mutable_floats(target_slope),
      .accumulator = mutable_floats(accumulator),
      .dim = accumulator.size(1)};
  dispatch_among<float, __half, __nv_bfloat16>(exp_logits.scalar_type(), [&]<class Out>(Out*) {
    auto* out = static_cast<Out*>(exp_logits.mutable_data_ptr());
    with_bool(aligned(logits) && aligned(exp_logits), [&](auto is_aligned) {
      launch(frozen_kernel<is_aligned.value, Out>, tile.rows, kThreads, tile, frozen, out, exp_logits.stride(0));
    });
  });
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
  m.impl("logprob_stats_", TORCH_BOX(&rlft::logprob_stats_));
  m.impl("logprob_grad_", TORCH_BOX(&rlft::logprob_grad_));
  m.impl("logprob_frozen_", TORCH_BOX(&rlft::logprob_frozen_));
}
