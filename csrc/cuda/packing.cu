// Packing on CUDA: padded (B, L, *) <-> packed (T, *), and what follows from cu_seqlens (B + 1) int32.
//
// Three of the operators only move rows, and differ in where a row comes from (-1: from nowhere, filled instead):
//
//   unpad           packed[t]    <- padded[b, t - cu[b] + shift_b]   b = the sequence of t
//   pad             padded[b, l] <- packed[cu[b] + l - shift_b]      if 0 <= l - shift_b < length_b
//   segment_expand  out[t]       <- values[b]
//                                                                    shift_b = L - length_b if left, else 0
// and three compute:
//
//   position_ids        out[t] = t - cu[b]
//   next_token_targets  out[t] = ids[t + 1], and ignore_index where t + 1 == cu[b + 1]
//   segment_sum         out[b] = sum_{t in b} values[t], fp32 (fp64 for fp64)
//
// Bytes moved: every destination row is written once and its source read once; B + 1 integers and one binary search of
// log2(B) cached reads per row come on top. Rows travel as the widest word (16 to 1 bytes) that divides the row size
// and both addresses. No index tensor, no host sync.
//
// cu_seqlens is trusted on no account, because checking it would sync: rows that no sequence covers, or that would come
// from outside the source, are filled.
//
// Deterministic: a thread sums its tokens in ascending order, a fixed tree adds the threads. No atomics.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "launch.cuh"
#include "packing.h"

namespace rlft {
namespace {

constexpr int kThreads = 256;

// ---- kernels ---------------------------------------------------------------------------------------------------

// Sequence of token t, or -1 if none covers it.
__device__ int64_t covering_sequence(const int32_t* cu_seqlens, int64_t B, int64_t t) {
  if (B == 0 || t >= cu_seqlens[B]) return -1;
  return sequence_of(cu_seqlens, B, t);
}

struct UnpadSource {
  const int32_t* cu_seqlens;
  int64_t B, L;
  bool left;
  __device__ int64_t operator()(int64_t t) const {
    const int64_t b = covering_sequence(cu_seqlens, B, t);
    if (b < 0) return -1;
    const int64_t start = cu_seqlens[b], length = cu_seqlens[b + 1] - start;
    const int64_t column = t - start + (left ? L - length : 0);
    return column >= 0 && column < L ? b * L + column : -1;
  }
};

struct PadSource {
  const int32_t* cu_seqlens;
  int64_t T, L;
  bool left;
  __device__ int64_t operator()(int64_t row) const {
    const int64_t b = row / L;
    const int64_t start = cu_seqlens[b], length = cu_seqlens[b + 1] - start;
    const int64_t place = row % L - (left ? L - length : 0);
    const int64_t t = start + place;
    return place >= 0 && place < length && t >= 0 && t < T ? t : -1;
  }
};

struct ExpandSource {
  const int32_t* cu_seqlens;
  int64_t B;
  __device__ int64_t operator()(int64_t t) const { return covering_sequence(cu_seqlens, B, t); }
};

// A block is (words, rows): threadIdx.x walks along a row, threadIdx.y is one of the block's rows. Threads of a row run
// the same binary search on the same addresses, which costs one broadcast read per step.
template <class Word, class Source>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const Word* __restrict__ in, Word* __restrict__ out, int64_t rows, int64_t row_words, Source source,
              Word fill) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += stride) {
    const int64_t from = source(row);
    Word* destination = out + row * row_words;
    if (from < 0) {
      for (int64_t w = threadIdx.x; w < row_words; w += blockDim.x) destination[w] = fill;
    } else {
      const Word* origin = in + from * row_words;
#pragma unroll 4
      for (int64_t w = threadIdx.x; w < row_words; w += blockDim.x) destination[w] = origin[w];
    }
  }
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

// One block per (sequence, blockDim.x columns): thread (x, y) adds tokens y, y + blockDim.y, ... of column x, then the
// blockDim.y partial sums are folded in halves. blockDim.x * blockDim.y == kThreads, both powers of two.
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

// ---- launchers -------------------------------------------------------------------------------------------------

// Threads along a row: a power of two, no wider than the row needs, at most one warp.
unsigned row_threads(int64_t width) {
  unsigned threads = 1;
  while (threads < 32 && threads < width) threads *= 2;
  return threads;
}

template <class Word, class Source>
void launch_copy_words(const void* in, void* out, int64_t rows, int64_t row_bytes, const Source& source,
                       uint64_t pattern, cudaStream_t stream) {
  const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word));
  Word fill;
  for (size_t offset = 0; offset < sizeof(Word); offset += 8) {
    std::memcpy(reinterpret_cast<char*>(&fill) + offset, &pattern, std::min<size_t>(8, sizeof(Word) - offset));
  }
  const unsigned x = row_threads(row_words);
  const dim3 block(x, kThreads / x);
  copy_rows<Word><<<grid_for(rows, block.y), block, 0, stream>>>(static_cast<const Word*>(in), static_cast<Word*>(out),
                                                                rows, row_words, source, fill);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Source>
void launch_copy(const void* in, void* out, int64_t rows, int64_t row_bytes, const Source& source, uint64_t pattern,
                 cudaStream_t stream) {
  if (rows == 0 || row_bytes == 0) return;
  const auto bits =
      reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes);
  if (bits % 16 == 0) return launch_copy_words<uint4>(in, out, rows, row_bytes, source, pattern, stream);
  if (bits % 8 == 0) return launch_copy_words<uint64_t>(in, out, rows, row_bytes, source, pattern, stream);
  if (bits % 4 == 0) return launch_copy_words<uint32_t>(in, out, rows, row_bytes, source, pattern, stream);
  if (bits % 2 == 0) return launch_copy_words<uint16_t>(in, out, rows, row_bytes, source, pattern, stream);
  launch_copy_words<uint8_t>(in, out, rows, row_bytes, source, pattern, stream);
}

template <class Value, class Sum>
void launch_segment_sum(const void* values, const int32_t* cu_seqlens, void* out, int64_t B, int64_t T, int64_t D,
                        cudaStream_t stream) {
  if (B == 0 || D == 0) return;
  const unsigned x = row_threads(D);
  const dim3 block(x, kThreads / x);
  segment_sum_kernel<Value, Sum><<<grid_for(B * ((D + x - 1) / x), 1), block, 0, stream>>>(
      static_cast<const Value*>(values), cu_seqlens, static_cast<Sum*>(out), B, T, D);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// ---- binding ---------------------------------------------------------------------------------------------------

const int32_t* offsets(const Tensor& cu_seqlens) { return static_cast<const int32_t*>(cu_seqlens.const_data_ptr()); }

Tensor unpad(const Tensor& padded, const Tensor& cu_seqlens, int64_t num_tokens, bool left) {
  const torch::stable::accelerator::DeviceGuard guard(padded.get_device_index());
  const Tensor input = torch::stable::contiguous(padded);
  Tensor packed = torch::stable::new_empty(input, with_trailing({num_tokens}, input, 2));
  const UnpadSource source{offsets(cu_seqlens), input.size(0), input.size(1), left};
  launch_copy(input.const_data_ptr(), packed.mutable_data_ptr(), num_tokens, row_bytes(input, 2), source, 0,
              current_stream(input));
  return packed;
}

Tensor pad(const Tensor& packed, const Tensor& cu_seqlens, int64_t max_seqlen, bool left, double value) {
  const torch::stable::accelerator::DeviceGuard guard(packed.get_device_index());
  const Tensor input = torch::stable::contiguous(packed);
  const int64_t B = cu_seqlens.size(0) - 1;
  Tensor padded = torch::stable::new_empty(input, with_trailing({B, max_seqlen}, input, 1));
  const PadSource source{offsets(cu_seqlens), input.size(0), max_seqlen, left};
  launch_copy(input.const_data_ptr(), padded.mutable_data_ptr(), B * max_seqlen, row_bytes(input, 1), source,
              fill_pattern(value, input.scalar_type()), current_stream(input));
  return padded;
}

Tensor segment_expand(const Tensor& values, const Tensor& cu_seqlens, int64_t num_tokens) {
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const Tensor input = torch::stable::contiguous(values);
  Tensor out = torch::stable::new_empty(input, with_trailing({num_tokens}, input, 1));
  const ExpandSource source{offsets(cu_seqlens), input.size(0)};
  launch_copy(input.const_data_ptr(), out.mutable_data_ptr(), num_tokens, row_bytes(input, 1), source, 0,
              current_stream(input));
  return out;
}

Tensor position_ids(const Tensor& cu_seqlens, int64_t num_tokens) {
  const torch::stable::accelerator::DeviceGuard guard(cu_seqlens.get_device_index());
  Tensor out = torch::stable::new_empty(cu_seqlens, {num_tokens}, ScalarType::Long);
  if (num_tokens == 0) return out;
  position_ids_kernel<<<grid_for(num_tokens, kThreads), kThreads, 0, current_stream(cu_seqlens)>>>(
      offsets(cu_seqlens), static_cast<int64_t*>(out.mutable_data_ptr()), cu_seqlens.size(0) - 1, num_tokens);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

Tensor next_token_targets(const Tensor& input_ids, const Tensor& cu_seqlens, int64_t ignore_index) {
  const torch::stable::accelerator::DeviceGuard guard(input_ids.get_device_index());
  const Tensor input = torch::stable::contiguous(input_ids);
  const int64_t T = input.size(0);
  Tensor out = torch::stable::new_empty(input, {T});
  if (T == 0) return out;
  next_token_targets_kernel<<<grid_for(T, kThreads), kThreads, 0, current_stream(input)>>>(
      static_cast<const int64_t*>(input.const_data_ptr()), offsets(cu_seqlens),
      static_cast<int64_t*>(out.mutable_data_ptr()), cu_seqlens.size(0) - 1, T, ignore_index);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

Tensor segment_sum(const Tensor& values, const Tensor& cu_seqlens) {
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const Tensor input = torch::stable::contiguous(values);
  const ScalarType dtype = input.scalar_type();
  const int64_t B = cu_seqlens.size(0) - 1, T = input.size(0);
  const int64_t D = row_bytes(input, 1) / static_cast<int64_t>(input.element_size());
  Tensor out = torch::stable::new_empty(input, with_trailing({B}, input, 1),
                                        dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  const void* in = input.const_data_ptr();
  void* sums = out.mutable_data_ptr();
  const cudaStream_t stream = current_stream(input);
  switch (dtype) {
    case ScalarType::Double: launch_segment_sum<double, double>(in, offsets(cu_seqlens), sums, B, T, D, stream); break;
    case ScalarType::Float: launch_segment_sum<float, float>(in, offsets(cu_seqlens), sums, B, T, D, stream); break;
    case ScalarType::Half: launch_segment_sum<__half, float>(in, offsets(cu_seqlens), sums, B, T, D, stream); break;
    case ScalarType::BFloat16:
      launch_segment_sum<__nv_bfloat16, float>(in, offsets(cu_seqlens), sums, B, T, D, stream);
      break;
    default: STD_TORCH_CHECK(false, "segment_sum: unsupported dtype ", toString(dtype));
  }
  return out;
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
  m.impl("unpad", TORCH_BOX(&rlft::unpad));
  m.impl("pad", TORCH_BOX(&rlft::pad));
  m.impl("position_ids", TORCH_BOX(&rlft::position_ids));
  m.impl("next_token_targets", TORCH_BOX(&rlft::next_token_targets));
  m.impl("segment_sum", TORCH_BOX(&rlft::segment_sum));
  m.impl("segment_expand", TORCH_BOX(&rlft::segment_expand));
}
