// Gradient norm and scaling over a list of tensors on the CPU.
//
//   multi_tensor_norm_pow   sum_i |g_i|^p in double, returned as float32; max_i |g_i| for p = inf (NaN wins)
//   multi_tensor_scale_     g_i <- g_i * coefficient, in place; nothing is touched where the coefficient is exactly 1
//
// Tensors are cut into pieces of fixed size. Each piece has one partial sum, and the partials are added in order: the
// result does not depend on the number of threads. Bytes moved: one read (norm), one read and one write (scale).
#include <algorithm>
#include <cmath>
#include <vector>

#include "stable.h"

// One binary for every x86-64, still vectorised: the loader picks the widest version that the processor runs.
#if defined(__x86_64__)
#define RLFT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RLFT_CLONES
#endif
#define RLFT_INLINE inline __attribute__((always_inline))

namespace rlft {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kPieceElements = 64 * 1024;
constexpr int64_t kLanes = 32;  // independent sums, so that the additions vectorise without reordering any of them

constexpr int64_t kGrainElements = 32 * 1024;  // fewer per thread than this and starting the thread costs more

struct Piece {
  char* data;
  int64_t numel;
  int64_t position;  // elements in front of it in the whole list
};

std::vector<Piece> cut(const std::vector<Tensor>& tensors) {
  std::vector<Piece> pieces;
  int64_t position = 0;
  for (const Tensor& tensor : tensors) {
    const auto element_size = static_cast<int64_t>(tensor.element_size());
    char* data = static_cast<char*>(tensor.data_ptr());
    for (int64_t begin = 0; begin < tensor.numel(); begin += kPieceElements) {
      pieces.push_back({data + begin * element_size, std::min(kPieceElements, tensor.numel() - begin), position});
      position += pieces.back().numel;
    }
  }
  return pieces;
}

// Calls f(i) for every piece. Threads share the elements, not the pieces, evenly: pieces of small tensors are small.
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

// Double for double, float for everything narrower.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- kernels ---------------------------------------------------------------------------------------------------

template <class T>
RLFT_INLINE double sum_squares_inline(const T* g, int64_t numel) {
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) {
      const double x = static_cast<Compute<T>>(g[i + k]);
      lane[k] += x * x;
    }
  }
  for (; i < numel; ++i) lane[0] += static_cast<double>(static_cast<Compute<T>>(g[i])) * static_cast<Compute<T>>(g[i]);
  double sum = 0;
  for (double value : lane) sum += value;
  return sum;
}

template <class T>
RLFT_INLINE void scale_inline(T* g, int64_t numel, float coefficient) {
  for (int64_t i = 0; i < numel; ++i) g[i] = static_cast<T>(static_cast<Compute<T>>(g[i]) * coefficient);
}

// target_clones needs functions, not templates.
RLFT_CLONES double sum_squares(const double* g, int64_t numel) { return sum_squares_inline(g, numel); }
RLFT_CLONES double sum_squares(const float* g, int64_t numel) { return sum_squares_inline(g, numel); }
RLFT_CLONES double sum_squares(const Half* g, int64_t numel) { return sum_squares_inline(g, numel); }
RLFT_CLONES double sum_squares(const BFloat16* g, int64_t numel) { return sum_squares_inline(g, numel); }
RLFT_CLONES void scale(double* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }
RLFT_CLONES void scale(float* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }
RLFT_CLONES void scale(Half* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }
RLFT_CLONES void scale(BFloat16* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }

double max_with_nan(double a, double b) { return a >= b || std::isnan(a) ? a : b; }

template <class T>
double norm_pow(const T* g, int64_t numel, double p) {
  if (p == 2) return sum_squares(g, numel);
  double result = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const double magnitude = std::abs(static_cast<double>(static_cast<Compute<T>>(g[i])));
    if (std::isinf(p)) {
      result = max_with_nan(result, magnitude);
    } else {
      result += p == 1 ? magnitude : std::pow(magnitude, p);
    }
  }
  return result;
}

// ---- binding ---------------------------------------------------------------------------------------------------

// Calls f(T*) with a null pointer of the tensors' type.
template <class F>
void dispatch(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Double: return f(static_cast<double*>(nullptr));
    case ScalarType::Float: return f(static_cast<float*>(nullptr));
    case ScalarType::Half: return f(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16: return f(static_cast<BFloat16*>(nullptr));
    default: STD_TORCH_CHECK(false, "gradients must be float64, float32, float16 or bfloat16, got ", toString(dtype));
  }
}

void check_same(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == tensors[0].scalar_type(),
                    "tensors must be contiguous CPU tensors of one dtype");
  }
}

Tensor multi_tensor_norm_pow(const std::vector<Tensor>& tensors, double norm_type) {
  STD_TORCH_CHECK(!tensors.empty(), "multi_tensor_norm_pow needs at least one tensor");
  check_same(tensors);
  const std::vector<Piece> pieces = cut(tensors);
  std::vector<double> partial(pieces.size());
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    for_each_piece(pieces, [&](int64_t i) {
      partial[i] = norm_pow(reinterpret_cast<const T*>(pieces[i].data), pieces[i].numel, norm_type);
    });
  });
  double total = 0;
  for (double value : partial) total = std::isinf(norm_type) ? max_with_nan(total, value) : total + value;
  Tensor out = torch::stable::new_empty(tensors[0], {}, ScalarType::Float);
  *static_cast<float*>(out.mutable_data_ptr()) = static_cast<float>(total);
  return out;
}

void multi_tensor_scale_(const std::vector<Tensor>& tensors, const Tensor& coefficient) {
  STD_TORCH_CHECK(coefficient.is_cpu() && coefficient.numel() == 1 && coefficient.scalar_type() == ScalarType::Float,
                  "coefficient must be one float32 on the CPU");
  const float factor = *static_cast<const float*>(coefficient.const_data_ptr());
  if (tensors.empty() || factor == 1) return;
  check_same(tensors);
  const std::vector<Piece> pieces = cut(tensors);
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    for_each_piece(pieces, [&](int64_t i) { scale(reinterpret_cast<T*>(pieces[i].data), pieces[i].numel, factor); });
  });
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("multi_tensor_norm_pow", TORCH_BOX(&rlft::multi_tensor_norm_pow));
  m.impl("multi_tensor_scale_", TORCH_BOX(&rlft::multi_tensor_scale_));
}
