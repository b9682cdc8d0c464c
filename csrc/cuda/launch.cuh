// This header holds all uses of CUDA's runtime and of torch's devices. Tests replace it and run the kernels without a
// GPU (tests/cuda_emulator).
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>
#include <cstdint>

#include "stable.h"

namespace rlft {

// Launches kernels on a tensor's device, in torch's current stream. The device is the current device while the Launcher
// lives.
class Launcher {
 public:
  explicit Launcher(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, const Arguments&... arguments) const {
    STD_TORCH_CHECK(blocks <= INT32_MAX, "got work for ", blocks, " blocks, more than a launch may have (2^31 - 1)");
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream_>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Returns the number of blocks that cover `items`, within the limit of a launch. Kernels must stride over their work,
// so that any number of blocks is correct.
inline int64_t blocks_for(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, INT32_MAX);
}

// Returns the number of blocks that fill the current device if `per_multiprocessor` blocks fit on one multiprocessor.
inline int64_t device_blocks(int per_multiprocessor) {
  int device = 0, multiprocessors = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return static_cast<int64_t>(multiprocessors) * per_multiprocessor;
}

// Returns whether a CUDA graph is being recorded from torch's current stream.
inline bool is_recording(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STD_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Returns pinned host memory. A copy from it to the device is asynchronous, and torch keeps the memory until the stream
// has read it.
inline Tensor pinned_int64(int64_t size) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::empty({size}, ScalarType::Long, std::nullopt, cpu, /*pin_memory=*/true);
}

}  // namespace rlft
