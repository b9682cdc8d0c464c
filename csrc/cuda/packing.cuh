// Packing on CUDA: what the operators that move rows share with the operators that make numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "packing.h"

namespace rlft {

constexpr int kThreads = 256;

// Returns the sequence of token t, or -1 if no sequence covers t.
__device__ inline int64_t covering_sequence(const int32_t* cu_seqlens, int64_t B, int64_t t) {
  if (B == 0 || t >= cu_seqlens[B]) return -1;
  return sequence_of(cu_seqlens, B, t);
}

// log2 of the number of threads that share a row of `width` words or columns: as many as the row needs, at most a warp.
inline int log2_lanes(int64_t width) { return std::min<int>(5, std::bit_width(static_cast<uint64_t>(width - 1))); }

inline const int32_t* offsets(const Tensor& cu_seqlens) {
  return static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
}

}  // namespace rlft
