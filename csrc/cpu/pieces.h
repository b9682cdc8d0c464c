// A list of tensors on the CPU is cut into pieces, which the threads share.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "stable.h"

namespace rlft {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// The type of the computation: double for double, float for all narrower types.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int64_t kPieceElements = 16 * 1024;
constexpr int64_t kGrainElements = 32 * 1024;  // with fewer per thread, starting the thread costs more than its work

struct Piece {
  int64_t tensor;
  int64_t begin;
  int64_t numel;
  int64_t position;  // number of elements before this piece in the whole list

  // Returns the address of the piece in its tensor, or in the tensor of the same index in a parallel list.
  template <class T>
  T* in(const std::vector<Tensor>& tensors) const {
    return static_cast<T*>(tensors[tensor].data_ptr()) + begin;
  }
};

inline std::vector<Piece> cut(const std::vector<Tensor>& tensors) {
  std::vector<Piece> pieces;
  int64_t position = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel();
    for (int64_t begin = 0; begin < numel; begin += kPieceElements) {
      pieces.push_back({static_cast<int64_t>(i), begin, std::min(kPieceElements, numel - begin), position});
      position += pieces.back().numel;
    }
  }
  return pieces;
}

// Calls f(i) for every piece. The threads get equal numbers of elements, not of pieces, because pieces of small tensors
// are small.
template <class F>
void for_each_piece(const std::vector<Piece>& pieces, const F& f) {
  if (pieces.empty()) return;
  const int64_t total = pieces.back().position + pieces.back().numel;
  torch::stable::parallel_for(0, total, kGrainElements, [&](int64_t begin, int64_t end) {
    const auto starts_before = [](const Piece& piece, int64_t position) { return piece.position < position; };
    auto piece = std::lower_bound(pieces.begin(), pieces.end(), begin, starts_before);
    for (; piece != pieces.end() && piece->position < end; ++piece) f(piece - pieces.begin());
  });
}

// Calls f(T*) with a null pointer, where T is the C++ type of the dtype.
template <class F>
void dispatch(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Double: return f(static_cast<double*>(nullptr));
    case ScalarType::Float: return f(static_cast<float*>(nullptr));
    case ScalarType::Half: return f(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16: return f(static_cast<BFloat16*>(nullptr));
    default: STD_TORCH_CHECK(false, "tensors must be float64, float32, float16 or bfloat16, got ", toString(dtype));
  }
}

}  // namespace rlft
