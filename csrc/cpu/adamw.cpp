// AdamW over a list of parameters on the CPU; the formula is in csrc/adamw.h.
//
// Gradients are read and never written: a gradient is multiplied by the clip coefficient after it is read. If found_inf
// is not 0, nothing is written. float32 moves 28 bytes per element: p, g, m and v are read, p, m and v are written. With
// bfloat16 moments it moves 20.
//
// Parameters and gradients narrower than float32 are converted block by block, in L1. One loop per compute type then
// serves all pairs of dtypes. Elements are independent, so the result does not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "adamw.h"
#include "multiversion.h"
#include "pieces.h"
#include "stable.h"

namespace rlft {
namespace {

constexpr int64_t kBlock = 2048;  // elements converted at once: 8 KiB, a quarter of L1

// ---- kernels ---------------------------------------------------------------------------------------------------

// `begin` is the index of the first element in its tensor.
template <class C, class M>
RLFT_INLINE void update_inline(C* __restrict weight, const C* __restrict gradient, M* __restrict exp_avg,
                               M* __restrict exp_avg_sq, int64_t begin, int64_t numel, const AdamWFactors<C>& factors) {
  const AdamWFactors<C> f = factors;  // a copy: the stores cannot change it, so it stays in registers
  const auto first = static_cast<uint32_t>(begin);
  for (int64_t i = 0; i < numel; ++i) {
    adamw_element(weight[i], gradient[i], exp_avg[i], exp_avg_sq[i], first + static_cast<uint32_t>(i), f);
  }
}

template <class To, class From>
RLFT_INLINE void convert_inline(const From* __restrict from, To* __restrict to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = static_cast<To>(from[i]);
}

RLFT_MULTIVERSION void update(float* weight, const float* gradient, float* exp_avg, float* exp_avg_sq, int64_t begin,
                              int64_t numel, const AdamWFactors<float>& f) {
  update_inline(weight, gradient, exp_avg, exp_avg_sq, begin, numel, f);
}
RLFT_MULTIVERSION void update(float* weight, const float* gradient, RoundedMoment* exp_avg, RoundedMoment* exp_avg_sq,
                              int64_t begin, int64_t numel, const AdamWFactors<float>& f) {
  update_inline(weight, gradient, exp_avg, exp_avg_sq, begin, numel, f);
}
RLFT_MULTIVERSION void update(double* weight, const double* gradient, double* exp_avg, double* exp_avg_sq,
                              int64_t begin, int64_t numel, const AdamWFactors<double>& f) {
  update_inline(weight, gradient, exp_avg, exp_avg_sq, begin, numel, f);
}
RLFT_MULTIVERSION void convert(const BFloat16* from, float* to, int64_t numel) { convert_inline(from, to, numel); }
RLFT_MULTIVERSION void convert(const Half* from, float* to, int64_t numel) { convert_inline(from, to, numel); }
RLFT_MULTIVERSION void convert(const float* from, BFloat16* to, int64_t numel) { convert_inline(from, to, numel); }
RLFT_MULTIVERSION void convert(const float* from, Half* to, int64_t numel) { convert_inline(from, to, numel); }

// `master` is the parameter itself if the parameter has the compute type.
template <class P, class G, class M, class C>
void update_piece(P* param, const G* grad, M* exp_avg, M* exp_avg_sq, C* master, int64_t first, int64_t numel,
                  const AdamWFactors<C>& factors) {
  if constexpr (std::is_same_v<P, C> && std::is_same_v<G, C>) {
    return update(master, grad, exp_avg, exp_avg_sq, first, numel, factors);
  }
  [[maybe_unused]] C wide[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, numel - begin);
    const C* gradient;
    if constexpr (std::is_same_v<G, C>) {
      gradient = grad + begin;
    } else {
      convert(grad + begin, wide, count);
      gradient = wide;
    }
    update(master + begin, gradient, exp_avg + begin, exp_avg_sq + begin, first + begin, count, factors);
    if constexpr (!std::is_same_v<P, C>) convert(master + begin, param + begin, count);
  }
}

// ---- binding ---------------------------------------------------------------------------------------------------

template <class P, class G, class M>
void update_all(const AdamWLists& lists, const AdamWSettings& settings, double coefficient) {
  using C = Compute<P>;
  std::vector<AdamWFactors<C>> factors;
  for (const Tensor& step : lists.steps) {
    auto* count = static_cast<float*>(step.data_ptr());
    *count += 1;
    factors.push_back(adamw_factors<C>(settings, coefficient, *count, static_cast<int64_t>(factors.size())));
  }
  const std::vector<Tensor>& weights = std::is_same_v<P, C> ? lists.params : lists.masters;
  const std::vector<Piece> pieces = cut(lists.params);
  for_each_piece(pieces, [&](int64_t i) {
    const Piece& piece = pieces[i];
    update_piece(piece.in<P>(lists.params), piece.in<const G>(lists.grads), piece.in<M>(lists.exp_avgs),
                 piece.in<M>(lists.exp_avg_sqs), piece.in<C>(weights), piece.begin, piece.numel, factors[piece.tensor]);
  });
}

double value_or(const std::optional<Tensor>& scalar, double value) {
  return scalar.has_value() ? *static_cast<const float*>(scalar->const_data_ptr()) : value;
}

void multi_tensor_adamw_(const std::vector<Tensor>& params, const std::vector<Tensor>& grads,
                         const std::vector<Tensor>& exp_avgs, const std::vector<Tensor>& exp_avg_sqs,
                         const std::vector<Tensor>& masters, const std::vector<Tensor>& steps, double lr,
                         const std::optional<Tensor>& lr_tensor, double beta1, double beta2, double weight_decay,
                         double eps, const std::optional<Tensor>& coefficient, const std::optional<Tensor>& found_inf) {
  if (params.empty()) return;
  const AdamWLists lists{params, grads, exp_avgs, exp_avg_sqs, masters, steps};
  check_adamw(lists, lr_tensor, coefficient, found_inf);
  if (value_or(found_inf, 0) != 0) return;
  const AdamWSettings settings{value_or(lr_tensor, lr), beta1, beta2, weight_decay, eps};
  dispatch(params[0].scalar_type(), [&]<class P>(P*) {
    dispatch(grads[0].scalar_type(), [&]<class G>(G*) {
      if constexpr (std::is_same_v<Compute<P>, Compute<G>>) {
        dispatch_moments<Compute<P>>(exp_avgs[0].scalar_type(), [&]<class M>(M*) {
          update_all<P, G, M>(lists, settings, value_or(coefficient, 1));
        });
      }
    });
  });
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) { m.impl("multi_tensor_adamw_", TORCH_BOX(&rlft::multi_tensor_adamw_)); }
