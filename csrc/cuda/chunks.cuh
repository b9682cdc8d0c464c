// A list of tensors on CUDA is cut into chunks, which the blocks of one launch share.
//
// A table in device memory holds for every tensor the index of its first chunk, the number of its elements, and one
// address per list. Several lists can run in parallel, such as parameters and gradients. A block finds the tensor of
// its chunk by binary search.
//
// The table reaches the device by one asynchronous copy from pinned memory. A table in the kernel's parameters (4 KB on
// older drivers) would hold only a few hundred tensors. A model has thousands, and FSDP2 moves the gradients every
// step, so every step would need many launches instead of one copy.
//
// All indices are 64-bit.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cuda/dtypes.cuh"
#include "cuda/launch.cuh"

namespace rlft {

constexpr int kThreads = 512;
constexpr int kBlocksPerMultiprocessor = 4;  // 4 * 512 threads fill a multiprocessor
constexpr int kResidentBlocks = 2;           // the least; without this bound ptxas spills registers to fit four
constexpr int64_t kChunk = 32 * 1024;        // elements: many reads per thread, yet many chunks to balance blocks

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct Chunk {
  int64_t tensor;
  int64_t begin;
  int64_t numel;
};

// The data are first_chunk[count + 1], numel[count], address[list][count], and the appendix of make_table.
struct Table {
  const int64_t* data;
  int64_t count;
  int64_t chunks;

  __device__ Chunk find(int64_t chunk) const {
    int64_t low = 0, high = count;  // first_chunk[low] <= chunk < first_chunk[high]
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (data[middle] <= chunk ? low : high) = middle;
    }
    const int64_t begin = (chunk - data[low]) * kChunk;
    const int64_t numel = data[count + 1 + low];
    return {low, begin, min(kChunk, numel - begin)};
  }

  template <class T>
  __device__ T* tensor(int list, int64_t index) const {
    return reinterpret_cast<T*>(data[(list + 2) * count + 1 + index]);
  }

  template <class T>
  __device__ T* at(int list, const Chunk& chunk) const {
    return tensor<T>(list, chunk.tensor) + chunk.begin;
  }
};

// A table, and the tensor that owns its memory. The tensor must live until the launches are enqueued.
struct OwnedTable {
  Tensor storage;
  Table table;
  int64_t blocks() const { return std::min(table.chunks, device_blocks(kBlocksPerMultiprocessor)); }
};

// The numbers of elements come from the first list. All tensors must be contiguous and on one device.
inline OwnedTable make_table(const std::vector<const std::vector<Tensor>*>& lists,
                             const std::vector<int64_t>& appendix = {}) {
  const std::vector<Tensor>& tensors = *lists[0];
  // A replay of the graph would read the pinned memory again, which torch may have reused by then.
  STD_TORCH_CHECK(!is_recording(tensors[0]),
                  "a CUDA graph cannot record an operator on a list of tensors (the gradient's ",
                  "norm, its clipping, FusedAdamW): call it outside of torch.cuda.graph");
  const auto count = static_cast<int64_t>(tensors.size());
  const auto size = static_cast<int64_t>((lists.size() + 2) * tensors.size() + 1 + appendix.size());
  const Tensor host = pinned_int64(size);
  auto* first_chunk = static_cast<int64_t*>(host.mutable_data_ptr());
  int64_t* numel = first_chunk + count + 1;
  int64_t* address = numel + count;
  first_chunk[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    numel[i] = tensors[i].numel();
    first_chunk[i + 1] = first_chunk[i] + (numel[i] + kChunk - 1) / kChunk;
  }
  for (const std::vector<Tensor>* list : lists) {
    for (const Tensor& tensor : *list) *address++ = reinterpret_cast<int64_t>(tensor.data_ptr());
  }
  std::copy(appendix.begin(), appendix.end(), address);
  const int64_t chunks = first_chunk[count];
  const Tensor storage = torch::stable::to(host, tensors[0].device(), /*non_blocking=*/true);
  return {storage, {static_cast<const int64_t*>(storage.const_data_ptr()), count, chunks}};
}

}  // namespace rlft
