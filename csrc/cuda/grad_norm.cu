// Gradient norm and scaling over a list of tensors on CUDA.
//
//   multi_tensor_norm_pow   sum_i |g_i|^p as float32; max_i |g_i| for p = inf (nan wins)      one read, two launches
//   multi_tensor_scale_     g_i <- g_i * coefficient, in place; nothing moves where the       one read, one write, one
//                           coefficient on the device is exactly 1                            launch
//
// The tensors are cut into chunks of kChunk elements. A table in device memory holds every tensor's address and, in
// running totals, its first chunk and its number of elements; a block finds the tensor of its chunk by binary search.
// The table goes over in one asynchronous copy from pinned memory, which torch keeps until the stream has read it.
// The other way, the table in the kernel's parameters, holds a few hundred tensors per launch (4 KB on older drivers):
// a model has thousands, and FSDP2 moves the gradients every step, so that would be many launches instead of one copy.
//
// Deterministic: the grid depends only on the device and on the sizes, each thread adds its elements in ascending
// order, fixed trees add the threads, and one block adds the blocks in double. No atomics. No host sync.
//
// Accumulators are fp32 (fp64 for fp64 gradients), eight or sixteen per thread side by side; all indices are 64-bit.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "launch.cuh"

namespace rlft {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerMultiprocessor = 4;  // 4 * 512 threads fill a multiprocessor
constexpr int kResidentBlocks = 2;           // at least; without this bound ptxas spills to reach all four
constexpr int64_t kChunk = 32 * 1024;        // elements; many times what a block reads per step, few enough to balance

enum class Norm { kTwo, kMax, kAny };

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Device memory: addresses[count], first_chunk[count + 1], numel[count].
struct Table {
  const int64_t* data;
  int64_t count;
  int64_t chunks;
};

// ---- kernels ---------------------------------------------------------------------------------------------------

template <class T>
struct Chunk {
  T* data;
  int64_t numel;
};

template <class T>
__device__ Chunk<T> find_chunk(const Table& table, int64_t chunk) {
  const int64_t* first_chunk = table.data + table.count;
  int64_t low = 0, high = table.count;  // first_chunk[low] <= chunk < first_chunk[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (first_chunk[middle] <= chunk ? low : high) = middle;
  }
  const int64_t begin = (chunk - first_chunk[low]) * kChunk;
  const int64_t numel = table.data[2 * table.count + 1 + low];
  return {reinterpret_cast<T*>(table.data[low]) + begin, min(kChunk, numel - begin)};
}

template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T element[kSize];
};

// Elements in front of the first 16-byte boundary. Tensors are aligned to their element size, sharded ones to no more.
template <class T>
__device__ int64_t unaligned_head(const Chunk<T>& chunk) {
  const auto bytes = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(chunk.data) % 16) % 16);
  return min(bytes / static_cast<int64_t>(sizeof(T)), chunk.numel);
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

// Sum (or maximum) over the block; valid in thread 0.
template <Norm norm, class C>
__device__ C reduce_block(C value) {
  __shared__ C shared[kThreads];
  shared[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = combine<norm>(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  return shared[threadIdx.x];
}

// Stage one: partial[block] = sum over the chunks block, block + grid, ...
template <class T, Norm norm>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    norm_chunks(Table table, float p, Compute<T>* __restrict__ partial) {
  using C = Compute<T>;
  constexpr int kSize = Vector<T>::kSize;
  C sum[kSize] = {};
  for (int64_t index = blockIdx.x; index < table.chunks; index += gridDim.x) {
    const Chunk<T> chunk = find_chunk<T>(table, index);
    const int64_t head = unaligned_head(chunk);
    const int64_t vectors = (chunk.numel - head) / kSize;
    const int64_t tail = head + vectors * kSize;
    const auto* vector = reinterpret_cast<const Vector<T>*>(chunk.data + head);
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      const Vector<T> x = vector[v];
#pragma unroll
      for (int k = 0; k < kSize; ++k) sum[k] = accumulate<norm, C>(sum[k], static_cast<C>(x.element[k]), p);
    }
    // Head and tail together are shorter than two vectors, so the first threads take one element each.
    const int64_t edge = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
    if (edge < chunk.numel) sum[0] = accumulate<norm, C>(sum[0], static_cast<C>(chunk.data[edge]), p);
  }
#pragma unroll
  for (int k = 1; k < kSize; ++k) sum[0] = combine<norm>(sum[0], sum[k]);
  const C total = reduce_block<norm>(sum[0]);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// Stage two, one block: out = sum of the partials, in double.
template <class C, Norm norm>
__global__ void __launch_bounds__(kThreads) norm_partials(const C* __restrict__ partial, int64_t count, float* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum = combine<norm>(sum, static_cast<double>(partial[i]));
  const double total = reduce_block<norm>(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(total);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    scale_chunks(Table table, const float* __restrict__ coefficient) {
  using C = Compute<T>;
  constexpr int kSize = Vector<T>::kSize;
  const C factor = *coefficient;
  if (factor == C(1)) return;
  for (int64_t index = blockIdx.x; index < table.chunks; index += gridDim.x) {
    const Chunk<T> chunk = find_chunk<T>(table, index);
    const int64_t head = unaligned_head(chunk);
    const int64_t vectors = (chunk.numel - head) / kSize;
    const int64_t tail = head + vectors * kSize;
    auto* vector = reinterpret_cast<Vector<T>*>(chunk.data + head);
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      Vector<T> x = vector[v];
#pragma unroll
      for (int k = 0; k < kSize; ++k) x.element[k] = static_cast<T>(static_cast<C>(x.element[k]) * factor);
      vector[v] = x;
    }
    const int64_t edge = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
    if (edge < chunk.numel) chunk.data[edge] = static_cast<T>(static_cast<C>(chunk.data[edge]) * factor);
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------

template <class T, Norm norm>
void launch_norm(const Table& table, unsigned blocks, float p, void* partial, float* out, cudaStream_t stream) {
  using C = Compute<T>;
  norm_chunks<T, norm><<<blocks, kThreads, 0, stream>>>(table, p, static_cast<C*>(partial));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  norm_partials<C, norm><<<1, kThreads, 0, stream>>>(static_cast<const C*>(partial), blocks, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
void launch_norm(const Table& table, unsigned blocks, double p, void* partial, float* out, cudaStream_t stream) {
  const auto power = static_cast<float>(p);
  if (p == 2) return launch_norm<T, Norm::kTwo>(table, blocks, power, partial, out, stream);
  if (std::isinf(p)) return launch_norm<T, Norm::kMax>(table, blocks, power, partial, out, stream);
  launch_norm<T, Norm::kAny>(table, blocks, power, partial, out, stream);
}

template <class T>
void launch_scale(const Table& table, unsigned blocks, const float* coefficient, cudaStream_t stream) {
  scale_chunks<T><<<blocks, kThreads, 0, stream>>>(table, coefficient);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// ---- binding ---------------------------------------------------------------------------------------------------

// Calls f(T*) with a null pointer of the tensors' type.
template <class F>
void dispatch(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Double: return f(static_cast<double*>(nullptr));
    case ScalarType::Float: return f(static_cast<float*>(nullptr));
    case ScalarType::Half: return f(static_cast<__half*>(nullptr));
    case ScalarType::BFloat16: return f(static_cast<__nv_bfloat16*>(nullptr));
    default: STD_TORCH_CHECK(false, "gradients must be float64, float32, float16 or bfloat16, got ", toString(dtype));
  }
}

// The table, and the tensor that owns its memory until the launches are enqueued.
struct OwnedTable {
  Tensor storage;
  Table table;
  unsigned blocks() const {
    return static_cast<unsigned>(std::min(table.chunks, device_blocks(kBlocksPerMultiprocessor)));
  }
};

OwnedTable make_table(const std::vector<Tensor>& tensors) {
  const auto count = static_cast<int64_t>(tensors.size());
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor host = torch::stable::empty({3 * count + 1}, ScalarType::Long, std::nullopt, cpu, /*pin_memory=*/true);
  auto* address = static_cast<int64_t*>(host.mutable_data_ptr());
  int64_t* first_chunk = address + count;
  int64_t* numel = first_chunk + count + 1;
  first_chunk[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& tensor = tensors[i];
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.device() == tensors[0].device() &&
                        tensor.scalar_type() == tensors[0].scalar_type(),
                    "tensors must be contiguous, on one device and of one dtype");
    address[i] = reinterpret_cast<int64_t>(tensor.data_ptr());
    numel[i] = tensor.numel();
    first_chunk[i + 1] = first_chunk[i] + (numel[i] + kChunk - 1) / kChunk;
  }
  const int64_t chunks = first_chunk[count];
  const Tensor storage = torch::stable::to(host, tensors[0].device(), /*non_blocking=*/true);
  return {storage, {static_cast<const int64_t*>(storage.const_data_ptr()), count, chunks}};
}

Tensor multi_tensor_norm_pow(const std::vector<Tensor>& tensors, double norm_type) {
  STD_TORCH_CHECK(!tensors.empty(), "multi_tensor_norm_pow needs at least one tensor");
  const torch::stable::accelerator::DeviceGuard guard(tensors[0].get_device_index());
  const cudaStream_t stream = current_stream(tensors[0]);
  const OwnedTable owned = make_table(tensors);
  Tensor out = torch::stable::new_empty(tensors[0], {}, ScalarType::Float);
  if (owned.table.chunks == 0) return torch::stable::zero_(out);
  const unsigned blocks = owned.blocks();
  const Tensor partial = torch::stable::new_empty(tensors[0], {blocks}, ScalarType::Double);  // wide enough for both
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    launch_norm<T>(owned.table, blocks, norm_type, partial.mutable_data_ptr(),
                   static_cast<float*>(out.mutable_data_ptr()), stream);
  });
  return out;
}

void multi_tensor_scale_(const std::vector<Tensor>& tensors, const Tensor& coefficient) {
  if (tensors.empty()) return;
  STD_TORCH_CHECK(coefficient.device() == tensors[0].device() && coefficient.numel() == 1 &&
                      coefficient.scalar_type() == ScalarType::Float,
                  "coefficient must be one float32 on the tensors' device");
  const torch::stable::accelerator::DeviceGuard guard(tensors[0].get_device_index());
  const cudaStream_t stream = current_stream(tensors[0]);
  const OwnedTable owned = make_table(tensors);
  if (owned.table.chunks == 0) return;
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    launch_scale<T>(owned.table, owned.blocks(), static_cast<const float*>(coefficient.const_data_ptr()), stream);
  });
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
  m.impl("multi_tensor_norm_pow", TORCH_BOX(&rlft::multi_tensor_norm_pow));
  m.impl("multi_tensor_scale_", TORCH_BOX(&rlft::multi_tensor_scale_));
}
