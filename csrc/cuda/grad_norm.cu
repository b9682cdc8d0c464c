// Gradient norm and scaling over a list of tensors on CUDA.
//
//   multi_tensor_norm_pow   one float64 for each group of neighbours in the list: sum_i |g_i|^p, or max_i |g_i| if
//                           p = inf (nan wins). Every element is read once, in two launches.
//   multi_tensor_scale_     g_i <- g_i * coefficient, in place; no element is touched if the coefficient on the device
//                           is exactly 1. Every element is read and written once, in one launch.
//   scale_                  the same for one tensor. It needs no table, so that a CUDA graph can record it.
//
// The tensors are cut into chunks by chunks.cuh.
//
// The result is deterministic and the same on every device. A chunk has one partial sum: each thread adds its elements
// in ascending order, and fixed trees add the threads. One block per group adds the chunks of the group in double.
// There are no atomics and no host syncs.
//
// Inside a chunk each thread has several accumulators side by side, one per element of a 16-byte vector. They are fp64
// for fp64 gradients and fp32 for all others. Sums over chunks are fp64. The norm of fp32 gradients overflows if the
// sum of one chunk does, at norms of about 1e19, where torch's norm overflows, too.
#include <cmath>
#include <vector>

#include "cuda/chunks.cuh"
#include "groups.h"

namespace rlft {
namespace {

enum class Norm { kTwo, kMax, kAny };

// ---- kernels ---------------------------------------------------------------------------------------------------

template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T element[kSize];
};

// Returns the number of elements before the first 16-byte boundary. A shard may be aligned to its element size only.
template <class T>
__device__ int64_t unaligned_head(const T* data, int64_t numel) {
  const auto bytes = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(data) % 16) % 16);
  return min(bytes / static_cast<int64_t>(sizeof(T)), numel);
}

template <class C>
__device__ C larger_or_nan(C a, C b) {
  return a >= b || a != a ? a : b;
}

template <Norm norm, class C>
__device__ C combine(C a, C b) {
  if constexpr (norm == Norm::kMax) return larger_or_nan(a, b);
  return a + b;
}

template <Norm norm, class C>
__device__ C accumulate(C sum, C x, C p) {
  if constexpr (norm == Norm::kTwo) return fma(x, x, sum);
  if constexpr (norm == Norm::kMax) return larger_or_nan(sum, fabs(x));
  return sum + pow(fabs(x), p);
}

template <Norm norm, class C>
__device__ C reduce_warp(C value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine<norm>(value, __shfl_down_sync(0xffffffff, value, offset));
  }
  return value;
}

// Returns the sum or the maximum over the block. Only the result of thread 0 is valid.
template <Norm norm, class C>
__device__ C reduce_block(C value) {
  __shared__ C warp[kThreads / 32];
  value = reduce_warp<norm>(value);
  __syncthreads();  // all threads have read the results of the last call
  if (threadIdx.x % 32 == 0) warp[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_warp<norm>(threadIdx.x < kThreads / 32 ? warp[threadIdx.x] : C(0));
}

// Stage one: partial[chunk] = sum over the chunk.
template <class T, Norm norm>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    norm_chunks(Table table, Compute<T> p, Compute<T>* __restrict__ partial) {
  using C = Compute<T>;
  constexpr int kSize = Vector<T>::kSize;
  for (int64_t index = blockIdx.x; index < table.chunks; index += gridDim.x) {
    const Chunk chunk = table.find(index);
    const T* data = table.at<const T>(0, chunk);
    const int64_t head = unaligned_head(data, chunk.numel);
    const int64_t vectors = (chunk.numel - head) / kSize;
    const int64_t tail = head + vectors * kSize;
    const auto* vector = reinterpret_cast<const Vector<T>*>(data + head);
    C sum[kSize] = {};
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      const Vector<T> x = vector[v];
#pragma unroll
      for (int k = 0; k < kSize; ++k) sum[k] = accumulate<norm, C>(sum[k], static_cast<C>(x.element[k]), p);
    }
    // Head and tail together are shorter than two vectors, so the first threads take one element each.
    const int64_t edge = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
    if (edge < chunk.numel) sum[0] = accumulate<norm, C>(sum[0], static_cast<C>(data[edge]), p);
#pragma unroll
    for (int k = 1; k < kSize; ++k) sum[0] = combine<norm>(sum[0], sum[k]);
    const C total = reduce_block<norm>(sum[0]);
    if (threadIdx.x == 0) partial[index] = total;
  }
}

// Stage two has one block per group: out[group] = sum of `partial` over the chunks of the group, in double. groups[i]
// is the index of the first tensor of group i.
template <class C, Norm norm>
__global__ void __launch_bounds__(kThreads)
    norm_groups(Table table, const int64_t* __restrict__ groups, const C* __restrict__ partial, double* out) {
  const int64_t end = table.data[groups[blockIdx.x + 1]];
  double sum = 0;
  for (int64_t i = table.data[groups[blockIdx.x]] + threadIdx.x; i < end; i += kThreads) {
    sum = combine<norm>(sum, static_cast<double>(partial[i]));
  }
  const double total = reduce_block<norm>(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

// Scales a chunk. All threads of the block take part.
template <class T>
__device__ void scale_chunk(T* data, int64_t numel, Compute<T> factor) {
  using C = Compute<T>;
  constexpr int kSize = Vector<T>::kSize;
  const int64_t head = unaligned_head(data, numel);
  const int64_t vectors = (numel - head) / kSize;
  const int64_t tail = head + vectors * kSize;
  auto* vector = reinterpret_cast<Vector<T>*>(data + head);
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    Vector<T> x = vector[v];
#pragma unroll
    for (int k = 0; k < kSize; ++k) x.element[k] = static_cast<T>(static_cast<C>(x.element[k]) * factor);
    vector[v] = x;
  }
  const int64_t edge = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
  if (edge < numel) data[edge] = static_cast<T>(static_cast<C>(data[edge]) * factor);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    scale_chunks(Table table, const float* __restrict__ coefficient) {
  const Compute<T> factor = *coefficient;
  if (factor == 1) return;
  for (int64_t index = blockIdx.x; index < table.chunks; index += gridDim.x) {
    const Chunk chunk = table.find(index);
    scale_chunk(table.at<T>(0, chunk), chunk.numel, factor);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    scale_one(T* data, int64_t numel, const float* __restrict__ coefficient) {
  const Compute<T> factor = *coefficient;
  if (factor == 1) return;
  for (int64_t begin = blockIdx.x * kChunk; begin < numel; begin += gridDim.x * kChunk) {
    scale_chunk(data + begin, min(kChunk, numel - begin), factor);
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------

struct Groups {
  const int64_t* first_tensor;  // on the device
  unsigned count;
};

template <class T, Norm norm>
void launch_norm(const OwnedTable& owned, const Groups& groups, Compute<T> p, void* partial, double* out,
                 const Launcher& launch) {
  auto* sums = static_cast<Compute<T>*>(partial);
  if (owned.table.chunks > 0) {
    launch(norm_chunks<T, norm>, owned.blocks(), kThreads, owned.table, p, sums);
  }
  launch(norm_groups<Compute<T>, norm>, groups.count, kThreads, owned.table, groups.first_tensor, sums, out);
}

template <class T>
void launch_norm(const OwnedTable& owned, const Groups& groups, double p, void* partial, double* out,
                 const Launcher& launch) {
  const auto power = static_cast<Compute<T>>(p);
  if (p == 2) return launch_norm<T, Norm::kTwo>(owned, groups, power, partial, out, launch);
  if (std::isinf(p)) return launch_norm<T, Norm::kMax>(owned, groups, power, partial, out, launch);
  launch_norm<T, Norm::kAny>(owned, groups, power, partial, out, launch);
}

// ---- binding ---------------------------------------------------------------------------------------------------

void check_same(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.device() == tensors[0].device() &&
                        tensor.scalar_type() == tensors[0].scalar_type(),
                    "tensors must be contiguous, on one device and of one dtype");
  }
}

Tensor multi_tensor_norm_pow(const std::vector<Tensor>& tensors, const std::vector<int64_t>& group_sizes,
                             double norm_type) {
  STD_TORCH_CHECK(!tensors.empty(), "multi_tensor_norm_pow needs at least one tensor");
  check_same(tensors);
  check_groups(tensors, group_sizes);
  const Launcher launch(tensors[0]);
  std::vector<int64_t> first_tensor{0};
  for (const int64_t size : group_sizes) first_tensor.push_back(first_tensor.back() + size);
  const OwnedTable owned = make_table({&tensors}, first_tensor);
  const auto count = static_cast<int64_t>(tensors.size());
  const Groups groups{owned.table.data + 3 * count + 1, static_cast<unsigned>(group_sizes.size())};
  Tensor out = torch::stable::new_empty(tensors[0], {groups.count}, ScalarType::Double);
  // The partial sums are float64 or float32; this has room for both.
  const Tensor partial = torch::stable::new_empty(tensors[0], {owned.table.chunks}, ScalarType::Double);
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    launch_norm<T>(owned, groups, norm_type, partial.mutable_data_ptr(), static_cast<double*>(out.mutable_data_ptr()),
                   launch);
  });
  return out;
}

void check_coefficient(const Tensor& coefficient, const Tensor& of) {
  STD_TORCH_CHECK(
      coefficient.device() == of.device() && coefficient.numel() == 1 && coefficient.scalar_type() == ScalarType::Float,
      "coefficient must be one float32 on the tensors' device");
}

void multi_tensor_scale_(const std::vector<Tensor>& tensors, const Tensor& coefficient) {
  if (tensors.empty()) return;
  check_coefficient(coefficient, tensors[0]);
  check_same(tensors);
  const Launcher launch(tensors[0]);
  const OwnedTable owned = make_table({&tensors});
  if (owned.table.chunks == 0) return;
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    launch(scale_chunks<T>, owned.blocks(), kThreads, owned.table,
           static_cast<const float*>(coefficient.const_data_ptr()));
  });
}

void scale_(const Tensor& x, const Tensor& coefficient) {
  check_coefficient(coefficient, x);
  check_same({x});
  if (x.numel() == 0) return;
  const Launcher launch(x);
  const int64_t blocks = std::min(blocks_for(x.numel(), kChunk), device_blocks(kBlocksPerMultiprocessor));
  dispatch(x.scalar_type(), [&]<class T>(T*) {
    launch(scale_one<T>, blocks, kThreads, static_cast<T*>(x.mutable_data_ptr()), x.numel(),
           static_cast<const float*>(coefficient.const_data_ptr()));
  });
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
  m.impl("multi_tensor_norm_pow", TORCH_BOX(&rlft::multi_tensor_norm_pow));
  m.impl("multi_tensor_scale_", TORCH_BOX(&rlft::multi_tensor_scale_));
  m.impl("scale_", TORCH_BOX(&rlft::scale_));
}
