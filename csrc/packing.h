// The CPU and the CUDA side of packing share this header: the sequence of a packed token, fill values as bytes, and the
// sizes of rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "stable.h"

#if defined(__CUDACC__)
#define RLFT_HOST_DEVICE __host__ __device__
#else
#define RLFT_HOST_DEVICE
#endif

namespace rlft {

// Returns the sequence of packed token t: the last b with cu_seqlens[b] <= t. Requires 0 <= t < cu_seqlens[B]. The
// result is never an empty sequence.
RLFT_HOST_DEVICE inline int64_t sequence_of(const int32_t* cu_seqlens, int64_t B, int64_t t) {
  int64_t low = 0, high = B;  // cu_seqlens[low] <= t < cu_seqlens[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= t ? low : high) = middle;
  }
  return low;
}

template <class T>
uint64_t repeat_bits(T element) {
  uint64_t bits = 0;
  for (size_t offset = 0; offset < sizeof(bits); offset += sizeof(T)) {
    std::memcpy(reinterpret_cast<char*>(&bits) + offset, &element, sizeof(T));
  }
  return bits;
}

// Returns eight bytes of consecutive elements of this dtype, all equal to `value`. A fill then copies bytes and needs
// no code per dtype.
inline uint64_t fill_pattern(double value, ScalarType dtype) {
  using torch::headeronly::BFloat16;
  using torch::headeronly::Half;
  switch (dtype) {
    case ScalarType::Double: return repeat_bits(value);
    case ScalarType::Float: return repeat_bits(static_cast<float>(value));
    case ScalarType::Half: return repeat_bits(Half(static_cast<float>(value)));
    case ScalarType::BFloat16: return repeat_bits(BFloat16(static_cast<float>(value)));
    case ScalarType::Bool: return repeat_bits(static_cast<uint8_t>(value != 0));
    default: break;
  }
  if (!std::isfinite(value)) {
    throw std::invalid_argument("pad: an integer tensor cannot be filled with a non-finite value; pass a finite one.");
  }
  const auto integer = static_cast<int64_t>(value);
  switch (dtype) {
    case ScalarType::Long: return repeat_bits(integer);
    case ScalarType::Int: return repeat_bits(static_cast<int32_t>(integer));
    case ScalarType::Short: return repeat_bits(static_cast<int16_t>(integer));
    case ScalarType::Char:
    case ScalarType::Byte: return repeat_bits(static_cast<uint8_t>(integer));
    default: STD_TORCH_CHECK(false, "pad: unsupported dtype ", toString(dtype), "; use a float, integer or bool dtype");
  }
}

// Returns the size of one row of x in bytes. A row spans all dimensions but the first `leading`.
inline int64_t row_bytes(const Tensor& x, int64_t leading) {
  int64_t bytes = static_cast<int64_t>(x.element_size());
  for (int64_t d = leading; d < x.dim(); ++d) bytes *= x.size(d);
  return bytes;
}

// Returns `sizes`, followed by the sizes of x in all dimensions but the first `leading`.
inline std::vector<int64_t> with_trailing(std::vector<int64_t> sizes, const Tensor& x, int64_t leading) {
  for (int64_t d = leading; d < x.dim(); ++d) sizes.push_back(x.size(d));
  return sizes;
}

}  // namespace rlft
