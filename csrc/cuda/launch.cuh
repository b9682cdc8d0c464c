// All that the kernels' files need of CUDA's runtime and of torch's devices. Nothing else here talks to either, so a host
// can stand in for a GPU by replacing this header: tests/cuda_emulator.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>
#include <cstdint>

#include "stable.h"

namespace rlft {

// Launches kernels on a tensor's device, which is the current one while this lives, in the stream that torch works on.
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

// Blocks that cover `items`, for kernels that stride over their work, so that any number is correct.
inline int64_t blocks_for(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, INT32_MAX);
}

// Blocks that fill the current device when `per_multiprocessor` of them fit on one multiprocessor.
inline int64_t device_blocks(int per_multiprocessor) {
  int device = 0, multiprocessors = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return static_cast<int64_t>(multiprocessors) * per_multiprocessor;
}

// Whether a CUDA graph is being recorded from the stream that torch works on.
inline bool is_recording(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STD_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Host memory from which a copy to the device is asynchronous; torch keeps it until the stream has read it.
inline Tensor pinned_int64(int64_t size) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::empty({size}, ScalarType::Long, std::nullopt, cpu, /*pin_memory=*/true);
}

}  // namespace rlft
