// What every CUDA binding needs: the stream that torch works on, 16-byte words, and grid sizes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "stable.h"

namespace rlft {

// The stream of the caller's device. The DeviceGuard of the caller has to be alive.
inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Blocks that fill the current device when `per_multiprocessor` of them fit on one multiprocessor.
inline int64_t device_blocks(int per_multiprocessor) {
  int device = 0, multiprocessors = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return static_cast<int64_t>(multiprocessors) * per_multiprocessor;
}

// Kernels stride over their work, so any grid is correct; this one covers `items` and stays within 2^31 - 1 blocks.
inline unsigned grid_for(int64_t items, int64_t items_per_block) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, INT32_MAX));
}

}  // namespace rlft
