// Packing on CUDA: the operators that make numbers of cu_seqlens (B + 1) int32, a mask (B, L) or packed rows (T, *).
//
//   mask_columns        out[cu[b] + i] = column of the i-th true entry of mask[b], and -1 from cu[B] on
//   position_ids        out[t] = t - cu[b]
//   next_token_targets  out[t] = ids[t + 1], and ignore_index where t + 1 == cu[b + 1]
//   segment_sum         out[b] = sum_{t in b} values[t], fp32 (fp64 for fp64)
//   sum_rows            out[t] = sum_{m: index[m] = t} values[m], added in fp32 (fp64 for fp64)
//
// sum_rows gets the places m of each row from the host: order lists them by row, and cu_uses holds the boundaries. The
// backward of torch's embedding would sort the index again in every layer of a model.
//
// Bytes moved: every output row is written once, and each of its sources is read once. Operators with cu_seqlens read
// its B + 1 offsets, and position_ids and next_token_targets add per row a binary search of log2(B) cached reads.
// sum_rows reads 8 bytes per place and 4 bytes per row. mask_columns reads B L bytes and writes 4 T bytes.
//
// cu_seqlens and row indices are not checked, because a check would sync with the host. They may hold any values: a sum
// skips sources that lie outside of the input. Nothing is written outside of the output.
//
// Sums are deterministic: a thread adds its tokens or places in ascending order, and in segment_sum a fixed tree adds
// the threads. There are no atomics.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <type_traits>
#include <vector>

#include "cuda/dtypes.cuh"
#include "cuda/launch.cuh"
#include "cuda/packing.cuh"
#include "packing.h"

namespace rlft {
namespace {

constexpr int kWarps = kThreads / 32;

// ---- kernels ---------------------------------------------------------------------------------------------------

// Returns the sum of `count` over the threads before this thread. `total` gets the sum over all threads.
__device__ int exclusive_scan(int count, int* total) {
  __shared__ int warp_total[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = count;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) warp_total[warp] = inclusive;
  __syncthreads();
  int before = inclusive - count;
  *total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_total[w];
    *total += warp_total[w];
  }
  return before;
}

constexpr int kMaskBytes = 16;  // per thread and tile

// Returns mask[0] to mask[count - 1] as bits, at most kMaskBytes. The bytes are read at once, except at the end of a
// row and in unaligned rows.
__device__ uint32_t mask_bits(const uint8_t* mask, int64_t count) {
  uint32_t bits = 0;
  if (count >= kMaskBytes && reinterpret_cast<uintptr_t>(mask) % kMaskBytes == 0) {
    const uint4 vector = *reinterpret_cast<const uint4*>(mask);
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int k = 0; k < kMaskBytes; ++k) bits |= ((words[k / 4] >> (8 * (k % 4)) & 0xff) != 0) << k;
  } else {
    for (int k = 0; k < min(count, int64_t{kMaskBytes}); ++k) bits |= (mask[k] != 0) << k;
  }
  return bits;
}

// One block takes one row of the mask, tile by tile. The columns of a tile are collected in shared memory, so that
// consecutive threads write them in order.
__global__ void __launch_bounds__(kThreads)
    mask_columns_kernel(const uint8_t* __restrict__ mask, const int32_t* __restrict__ cu_seqlens,
                        int32_t* __restrict__ columns, int64_t B, int64_t L, int64_t T) {
  constexpr int kTile = kThreads * kMaskBytes;
  __shared__ int32_t column[kTile];
  for (int64_t b = blockIdx.x; b < B; b += gridDim.x) {
    int64_t t = cu_seqlens[b];
    for (int64_t tile = 0; tile < L; tile += kTile) {
      const int64_t begin = tile + threadIdx.x * kMaskBytes;
      uint32_t bits = begin < L ? mask_bits(mask + b * L + begin, L - begin) : 0;
      int total;
      int place = exclusive_scan(__popc(bits), &total);
      for (; bits != 0; bits &= bits - 1) column[place++] = static_cast<int32_t>(begin) + __ffs(bits) - 1;
      __syncthreads();
      for (int64_t i = threadIdx.x; i < total; i += kThreads) {
        if (t + i >= 0 && t + i < T) columns[t + i] = column[i];
      }
      t += total;  // the scan of the next tile has a barrier before the next write to `column`
    }
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t end = max(static_cast<int64_t>(cu_seqlens[B]), int64_t{0});
  for (int64_t t = end + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < T; t += stride) columns[t] = -1;
}

__global__ void __launch_bounds__(kThreads)
    position_ids_kernel(const int32_t* __restrict__ cu_seqlens, int64_t* __restrict__ out, int64_t B, int64_t T) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < T; t += stride) {
    const int64_t b = covering_sequence(cu_seqlens, B, t);
    out[t] = b < 0 ? 0 : t - cu_seqlens[b];
  }
}

__global__ void __launch_bounds__(kThreads)
    next_token_targets_kernel(const int64_t* __restrict__ input_ids, const int32_t* __restrict__ cu_seqlens,
                              int64_t* __restrict__ out, int64_t B, int64_t T, int64_t ignore_index) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < T; t += stride) {
    const int64_t b = covering_sequence(cu_seqlens, B, t);
    const bool followed = b >= 0 && t + 1 < cu_seqlens[b + 1] && t + 1 < T;
    out[t] = followed ? input_ids[t + 1] : ignore_index;
  }
}

// One block takes blockDim.x columns of one sequence. Thread (x, y) adds tokens y, y + blockDim.y, ... of column x. A
// tree then adds the blockDim.y partial sums of a column. blockDim.x * blockDim.y == kThreads, and both are powers of
// two.
template <class Value, class Sum>
__global__ void __launch_bounds__(kThreads)
    segment_sum_kernel(const Value* __restrict__ values, const int32_t* __restrict__ cu_seqlens, Sum* __restrict__ out,
                       int64_t B, int64_t T, int64_t D) {
  __shared__ Sum partial[kThreads];
  const int64_t column_blocks = (D + blockDim.x - 1) / blockDim.x;
  const int slot = threadIdx.y * blockDim.x + threadIdx.x;
  for (int64_t task = blockIdx.x; task < B * column_blocks; task += gridDim.x) {
    const int64_t b = task / column_blocks, d = task % column_blocks * blockDim.x + threadIdx.x;
    const int64_t begin = max(static_cast<int64_t>(cu_seqlens[b]), int64_t{0});
    const int64_t end = min(static_cast<int64_t>(cu_seqlens[b + 1]), T);
    Sum sum = 0;
    if (d < D) {
      for (int64_t t = begin + threadIdx.y; t < end; t += blockDim.y) sum += static_cast<Sum>(values[t * D + d]);
    }
    partial[slot] = sum;
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half) partial[slot] += partial[slot + half * blockDim.x];
    }
    if (threadIdx.y == 0 && d < D) out[b * D + d] = partial[slot];
    __syncthreads();  // the next task overwrites partial
  }
}

template <class Value, int kElements>
struct alignas(kElements * sizeof(Value)) Vector {
  Value element[kElements];
};

constexpr int kSumResidentBlocks = 4;  // without this bound, ptxas aims at eight blocks and spills registers

// 2^log2_lanes threads share an output row. Each adds the uses of its vectors in ascending order.
template <class Value, class Sum, int kElements>
__global__ void __launch_bounds__(kThreads, kSumResidentBlocks)
    sum_rows_kernel(const Vector<Value, kElements>* __restrict__ values, const int64_t* __restrict__ order,
                    const int32_t* __restrict__ cu_uses, Vector<Value, kElements>* __restrict__ out, int64_t T,
                    int64_t M, int64_t vectors, int log2_lanes) {
  const int64_t rows_per_block = kThreads >> log2_lanes, lanes = int64_t{1} << log2_lanes;
  const int64_t lane = threadIdx.x & (lanes - 1);
  const int64_t first = blockIdx.x * rows_per_block + (threadIdx.x >> log2_lanes);
  for (int64_t t = first; t < T; t += gridDim.x * rows_per_block) {
    const int64_t begin = max(static_cast<int64_t>(cu_uses[t]), int64_t{0});
    const int64_t end = min(static_cast<int64_t>(cu_uses[t + 1]), M);
    for (int64_t v = lane; v < vectors; v += lanes) {
      Sum sum[kElements] = {};
#pragma unroll 4
      for (int64_t u = begin; u < end; ++u) {
        const int64_t m = order[u];
        if (m < 0 || m >= M) continue;
        const Vector<Value, kElements> value = values[m * vectors + v];
#pragma unroll
        for (int k = 0; k < kElements; ++k) sum[k] += static_cast<Sum>(value.element[k]);
      }
      Vector<Value, kElements> total;
#pragma unroll
      for (int k = 0; k < kElements; ++k) total.element[k] = static_cast<Value>(sum[k]);
      out[t * vectors + v] = total;
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------

template <class Value, class Sum>
void launch_segment_sum(const void* values, const int32_t* cu_seqlens, void* out, int64_t B, int64_t T, int64_t D,
                        const Launcher& launch) {
  if (B == 0 || D == 0) return;
  const unsigned x = 1u << log2_lanes(D);
  const dim3 block(x, kThreads / x);
  launch(segment_sum_kernel<Value, Sum>, blocks_for(B * ((D + x - 1) / x), 1), block, static_cast<const Value*>(values),
         cu_seqlens, static_cast<Sum*>(out), B, T, D);
}

// Rows are read in vectors of 16 bytes where their size and both addresses allow it.
template <class Value, class Sum>
void launch_sum_rows(const void* values, const int64_t* order, const int32_t* cu_uses, void* out, int64_t T, int64_t M,
                     int64_t D, const Launcher& launch) {
  const auto start = [&]<int kElements>(std::integral_constant<int, kElements>) {
    using Elements = Vector<Value, kElements>;
    const int64_t vectors = D / kElements;
    const int lanes = std::min<int>(8, std::bit_width(static_cast<uint64_t>(vectors - 1)));
    launch(sum_rows_kernel<Value, Sum, kElements>, blocks_for(T, kThreads >> lanes), kThreads,
           static_cast<const Elements*>(values), order, cu_uses, static_cast<Elements*>(out), T, M, vectors, lanes);
  };
  const auto bits = reinterpret_cast<uintptr_t>(values) | reinterpret_cast<uintptr_t>(out) | D * sizeof(Value);
  if (bits % 16 == 0) {
    start(std::integral_constant<int, 16 / sizeof(Value)>());
  } else {
    start(std::integral_constant<int, 1>());
  }
}

// ---- binding ---------------------------------------------------------------------------------------------------

Tensor mask_columns(const Tensor& mask, const Tensor& cu_seqlens, int64_t num_tokens) {
  const Launcher launch(mask);
  const Tensor input = torch::stable::contiguous(mask);
  const int64_t B = input.size(0), L = input.size(1);
  STD_TORCH_CHECK(B == cu_seqlens.size(0) - 1, "the mask and cu_seqlens must describe the same sequences");
  Tensor columns = torch::stable::new_empty(input, {num_tokens}, ScalarType::Int);
  if (num_tokens == 0) return columns;
  launch(mask_columns_kernel, blocks_for(B, 1), kThreads, static_cast<const uint8_t*>(input.const_data_ptr()),
         offsets(cu_seqlens), static_cast<int32_t*>(columns.mutable_data_ptr()), B, L, num_tokens);
  return columns;
}

Tensor position_ids(const Tensor& cu_seqlens, int64_t num_tokens) {
  const Launcher launch(cu_seqlens);
  Tensor out = torch::stable::new_empty(cu_seqlens, {num_tokens}, ScalarType::Long);
  if (num_tokens == 0) return out;
  launch(position_ids_kernel, blocks_for(num_tokens, kThreads), kThreads, offsets(cu_seqlens),
         static_cast<int64_t*>(out.mutable_data_ptr()), cu_seqlens.size(0) - 1, num_tokens);
  return out;
}

Tensor next_token_targets(const Tensor& input_ids, const Tensor& cu_seqlens, int64_t ignore_index) {
  const Launcher launch(input_ids);
  const Tensor input = torch::stable::contiguous(input_ids);
  const int64_t T = input.size(0);
  Tensor out = torch::stable::new_empty(input, {T});
  if (T == 0) return out;
  launch(next_token_targets_kernel, blocks_for(T, kThreads), kThreads,
         static_cast<const int64_t*>(input.const_data_ptr()), offsets(cu_seqlens),
         static_cast<int64_t*>(out.mutable_data_ptr()), cu_seqlens.size(0) - 1, T, ignore_index);
  return out;
}

Tensor segment_sum(const Tensor& values, const Tensor& cu_seqlens) {
  const Launcher launch(values);
  const Tensor input = torch::stable::contiguous(values);
  const ScalarType dtype = input.scalar_type();
  const int64_t B = cu_seqlens.size(0) - 1, T = input.size(0);
  const int64_t D = row_bytes(input, 1) / static_cast<int64_t>(input.element_size());
  Tensor out = torch::stable::new_empty(input, with_trailing({B}, input, 1),
                                        dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  const void* in = input.const_data_ptr();
  void* sums = out.mutable_data_ptr();
  switch (dtype) {
    case ScalarType::Double: launch_segment_sum<double, double>(in, offsets(cu_seqlens), sums, B, T, D, launch); break;
    case ScalarType::Float: launch_segment_sum<float, float>(in, offsets(cu_seqlens), sums, B, T, D, launch); break;
    case ScalarType::Half: launch_segment_sum<__half, float>(in, offsets(cu_seqlens), sums, B, T, D, launch); break;
    case ScalarType::BFloat16:
      launch_segment_sum<__nv_bfloat16, float>(in, offsets(cu_seqlens), sums, B, T, D, launch);
      break;
    default: STD_TORCH_CHECK(false, "segment_sum: unsupported dtype ", toString(dtype));
  }
  return out;
}

Tensor sum_rows(const Tensor& values, const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
  const Launcher launch(values);
  const Tensor input = torch::stable::contiguous(values);
  const int64_t M = index.size(0), T = cu_uses.size(0) - 1;
  STD_TORCH_CHECK(input.size(0) == M && order.size(0) == M, "the row index must describe the rows of the values");
  const int64_t D = row_bytes(input, 1) / static_cast<int64_t>(input.element_size());
  Tensor out = torch::stable::new_empty(input, with_trailing({T}, input, 1));
  if (T == 0 || D == 0) return out;
  dispatch(input.scalar_type(), [&]<class Value>(Value*) {
    using Sum = std::conditional_t<std::is_same_v<Value, double>, double, float>;
    launch_sum_rows<Value, Sum>(input.const_data_ptr(), static_cast<const int64_t*>(order.const_data_ptr()),
                                offsets(cu_uses), out.mutable_data_ptr(), T, M, D, launch);
  });
  return out;
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
  m.impl("mask_columns", TORCH_BOX(&rlft::mask_columns));
  m.impl("position_ids", TORCH_BOX(&rlft::position_ids));
  m.impl("next_token_targets", TORCH_BOX(&rlft::next_token_targets));
  m.impl("segment_sum", TORCH_BOX(&rlft::segment_sum));
  m.impl("sum_rows", TORCH_BOX(&rlft::sum_rows));
}
