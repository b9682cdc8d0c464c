// Gradient norm and scaling over a list of tensors on the CPU.
//
//   multi_tensor_norm_pow   one float64 for each group of neighbours in the list: sum_i |g_i|^p, or max_i |g_i| if
//                           p = inf (NaN wins)
//   multi_tensor_scale_     g_i <- g_i * coefficient, in place; no element is touched if the coefficient is exactly 1
//   scale_                  the same for one tensor
//
// Tensors are cut into pieces of fixed size. Each piece has one partial sum, and the partial sums are added in order,
// so the result does not depend on the number of threads. The norm reads every element once. Scaling reads and writes
// every element once.
#include <cmath>
#include <vector>

#include "groups.h"
#include "multiversion.h"
#include "pieces.h"
#include "stable.h"

namespace rlft {
namespace {

constexpr int64_t kLanes = 32;   // independent sums: they vectorise, and each keeps its order of additions
constexpr int kMultiplied = 16;  // up to this whole p, powers are products: pow takes tens of times as long

// ---- kernels ---------------------------------------------------------------------------------------------------

// Returns the sum of |g|^p. Each power takes p - 1 multiplications.
template <class T>
RLFT_INLINE double sum_inline(const T* g, int64_t numel, int p) {
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    double x[kLanes], power[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) x[k] = power[k] = std::abs(static_cast<Compute<T>>(g[i + k]));
    for (int n = 1; n < p; ++n) {
      for (int64_t k = 0; k < kLanes; ++k) power[k] *= x[k];
    }
    for (int64_t k = 0; k < kLanes; ++k) lane[k] += power[k];
  }
  for (; i < numel; ++i) {
    const double x = std::abs(static_cast<Compute<T>>(g[i]));
    double power = x;
    for (int n = 1; n < p; ++n) power *= x;
    lane[0] += power;
  }
  double sum = 0;
  for (double value : lane) sum += value;
  return sum;
}

template <class T>
RLFT_INLINE double sum_powers_inline(const T* g, int64_t numel, int p) {
  return p == 2 ? sum_inline(g, numel, 2) : sum_inline(g, numel, p);  // a constant 2 removes the inner loop
}

template <class T>
RLFT_INLINE void scale_inline(T* g, int64_t numel, float coefficient) {
  for (int64_t i = 0; i < numel; ++i) g[i] = static_cast<T>(static_cast<Compute<T>>(g[i]) * coefficient);
}

// The attribute target_clones takes functions, but not templates.
RLFT_MULTIVERSION double sum_powers(const double* g, int64_t n, int p) { return sum_powers_inline(g, n, p); }
RLFT_MULTIVERSION double sum_powers(const float* g, int64_t n, int p) { return sum_powers_inline(g, n, p); }
RLFT_MULTIVERSION double sum_powers(const Half* g, int64_t n, int p) { return sum_powers_inline(g, n, p); }
RLFT_MULTIVERSION double sum_powers(const BFloat16* g, int64_t n, int p) { return sum_powers_inline(g, n, p); }
RLFT_MULTIVERSION void scale(double* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }
RLFT_MULTIVERSION void scale(float* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }
RLFT_MULTIVERSION void scale(Half* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }
RLFT_MULTIVERSION void scale(BFloat16* g, int64_t numel, float coefficient) { scale_inline(g, numel, coefficient); }

double max_with_nan(double a, double b) { return a >= b || std::isnan(a) ? a : b; }

template <class T>
double norm_pow(const T* g, int64_t numel, double p) {
  if (p >= 1 && p <= kMultiplied && p == std::floor(p)) return sum_powers(g, numel, static_cast<int>(p));
  double result = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const double magnitude = std::abs(static_cast<double>(static_cast<Compute<T>>(g[i])));
    result = std::isinf(p) ? max_with_nan(result, magnitude) : result + std::pow(magnitude, p);
  }
  return result;
}

// ---- binding ---------------------------------------------------------------------------------------------------

void check_same(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == tensors[0].scalar_type(),
                    "tensors must be contiguous CPU tensors of one dtype");
  }
}

Tensor multi_tensor_norm_pow(const std::vector<Tensor>& tensors, const std::vector<int64_t>& group_sizes,
                             double norm_type) {
  STD_TORCH_CHECK(!tensors.empty(), "multi_tensor_norm_pow needs at least one tensor");
  check_same(tensors);
  check_groups(tensors, group_sizes);
  const std::vector<Piece> pieces = cut(tensors);
  std::vector<double> partial(pieces.size());
  dispatch(tensors[0].scalar_type(), [&]<class T>(T*) {
    for_each_piece(
        pieces, [&](int64_t i) { partial[i] = norm_pow(pieces[i].in<const T>(tensors), pieces[i].numel, norm_type); });
  });
  Tensor out = torch::stable::new_zeros(tensors[0], {static_cast<int64_t>(group_sizes.size())}, ScalarType::Double);
  auto* total = static_cast<double*>(out.mutable_data_ptr());
  auto size = group_sizes.begin();
  int64_t end = *size;
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (; pieces[i].tensor >= end; end += *++size) ++total;
    *total = std::isinf(norm_type) ? max_with_nan(*total, partial[i]) : *total + partial[i];
  }
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
    for_each_piece(pieces, [&](int64_t i) { scale(pieces[i].in<T>(tensors), pieces[i].numel, factor); });
  });
}

void scale_(const Tensor& x, const Tensor& coefficient) { multi_tensor_scale_({x}, coefficient); }

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("multi_tensor_norm_pow", TORCH_BOX(&rlft::multi_tensor_norm_pow));
  m.impl("multi_tensor_scale_", TORCH_BOX(&rlft::multi_tensor_scale_));
  m.impl("scale_", TORCH_BOX(&rlft::scale_));
}
