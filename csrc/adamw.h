// Both backends of AdamW share this header: the formula of one element, its factors, and the checks of the lists.
//
//   g = coefficient * gradient
//   m = m + (1 - beta1) (g - m)                               v = beta2 v + (1 - beta2) g^2
//   w = (1 - lr * weight_decay) w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// w is the parameter, or its float32 master if the parameter is narrower than 32 bits. t is the number of steps, this
// step included. The factors of a whole tensor are computed in double, because 1 - 0.999f has only four digits left.
// The correction of the second moment, c = sqrt(1 - beta2^t), is a part of two factors, so that each element needs only
// one division: m / (sqrt(v) / c + eps) = c m / (sqrt(v) + c eps).
//
// float32 computation may keep its moments in bfloat16. They are rounded stochastically: up with a probability that is
// the distance to the lower neighbour, so that the expected moment is exact. Rounded to nearest, a moment would stand
// still, because beta2 = 0.999 changes it by less than half of a bfloat16's last place, 2^-9. The weight moves by the
// moments before they are rounded.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "portable.h"
#include "stable.h"

namespace rlft {

struct AdamWSettings {
  double lr, beta1, beta2, weight_decay, eps;
};

// The factors of one tensor in one step. C is the type of the computation.
template <class C>
struct AdamWFactors {
  C coefficient;
  C decay;  // 1 - lr * weight_decay
  C beta1, one_minus_beta1;
  C beta2, one_minus_beta2;
  C step_size;   // c * lr / (1 - beta1^t)
  C eps;         // c * eps
  bool is_slow;  // beta1 > 1/2; adamw_element says why
  uint32_t seed;
};

// A hash whose bits are independent of each other: lowbias32 of C. Wellons' "Prospecting for hash functions", 2018.
RLFT_INLINE uint32_t hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// `tensor` is the index of the tensor in the operator's lists.
template <class C>
RLFT_INLINE AdamWFactors<C> adamw_factors(const AdamWSettings& s, double coefficient, double step, int64_t tensor) {
  const double correction = std::sqrt(1 - std::pow(s.beta2, step));
  return {
      static_cast<C>(coefficient),
      static_cast<C>(1 - s.lr * s.weight_decay),
      static_cast<C>(s.beta1),
      static_cast<C>(1 - s.beta1),
      static_cast<C>(s.beta2),
      static_cast<C>(1 - s.beta2),
      static_cast<C>(correction * s.lr / (1 - std::pow(s.beta1, step))),
      static_cast<C>(correction * s.eps),
      s.beta1 > 0.5,
      hash(hash(static_cast<uint32_t>(step)) + static_cast<uint32_t>(tensor)),
  };
}

struct RoundedMoment {
  uint16_t bits;  // of a bfloat16
};

RLFT_INLINE float widened(RoundedMoment moment) {
  const uint32_t bits = static_cast<uint32_t>(moment.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// `random` is uniform in [0, 2^16), the weight of the bits that are dropped.
RLFT_INLINE RoundedMoment rounded(float value, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits = is_finite ? bits + random : is_nan ? bits | 0x00400000u : bits;
  return {static_cast<uint16_t>(bits >> 16)};
}

template <class C>
RLFT_INLINE void adamw_element(C& weight, C gradient, C& exp_avg, C& exp_avg_sq, const AdamWFactors<C>& f) {
  const C g = gradient * f.coefficient;
  // The interpolation starts at the nearer end, as in torch.lerp. With beta1 = 0 the moment is then exactly g, whereas
  // m + (g - m) would be rounded.
  const C near = f.is_slow ? exp_avg : g;
  const C far = f.is_slow ? g : exp_avg;
  exp_avg = near + (f.is_slow ? f.one_minus_beta1 : f.beta1) * (far - near);
  exp_avg_sq = f.beta2 * exp_avg_sq + f.one_minus_beta2 * g * g;
  weight = f.decay * weight - f.step_size * exp_avg / (std::sqrt(exp_avg_sq) + f.eps);
}

// `index` is the element's in its tensor, modulo 2^32. M is C, or RoundedMoment.
template <class C, class M>
RLFT_INLINE void adamw_element(C& weight, C gradient, M& exp_avg, M& exp_avg_sq, uint32_t index,
                               const AdamWFactors<C>& f) {
  if constexpr (std::is_same_v<M, C>) {
    adamw_element(weight, gradient, exp_avg, exp_avg_sq, f);
  } else {
    C m = widened(exp_avg), v = widened(exp_avg_sq);
    adamw_element(weight, gradient, m, v, f);
    const uint32_t random = hash(f.seed + index * 0x9e3779b9u);
    exp_avg = rounded(m, random & 0xffff);
    exp_avg_sq = rounded(v, random >> 16);
  }
}

// Calls f(M*) with a null pointer, where M is the type of moments of this dtype.
template <class C, class F>
void dispatch_moments(ScalarType dtype, const F& f) {
  if constexpr (std::is_same_v<C, float>) {
    if (dtype == ScalarType::BFloat16) return f(static_cast<RoundedMoment*>(nullptr));
  }
  f(static_cast<C*>(nullptr));
}

// The operator's lists have one entry per parameter. `masters` is empty if the parameters are float32 or float64.
struct AdamWLists {
  const std::vector<Tensor>& params;
  const std::vector<Tensor>& grads;
  const std::vector<Tensor>& exp_avgs;
  const std::vector<Tensor>& exp_avg_sqs;
  const std::vector<Tensor>& masters;
  const std::vector<Tensor>& steps;
};

inline void check_adamw(const AdamWLists& lists, const std::optional<Tensor>& lr,
                        const std::optional<Tensor>& coefficient, const std::optional<Tensor>& found_inf) {
  const Tensor& first = lists.params[0];
  const bool is_double = first.scalar_type() == ScalarType::Double;
  const ScalarType compute = is_double ? ScalarType::Double : ScalarType::Float;
  const auto check = [&](const char* name, const std::vector<Tensor>& list, ScalarType dtype) {
    STD_TORCH_CHECK(list.size() == lists.params.size(), name, " has ", list.size(), " tensors, expected ",
                    lists.params.size());
    for (size_t i = 0; i < list.size(); ++i) {
      STD_TORCH_CHECK(list[i].device() == first.device() && list[i].scalar_type() == dtype && list[i].is_contiguous() &&
                          list[i].numel() == lists.params[i].numel(),
                      name, "[", i, "] must be contiguous, ", toString(dtype), ", on the parameters' device, of ",
                      lists.params[i].numel(), " elements");
    }
  };
  check("params", lists.params, first.scalar_type());
  check("grads", lists.grads, lists.grads.empty() ? compute : lists.grads[0].scalar_type());
  STD_TORCH_CHECK((lists.grads[0].scalar_type() == ScalarType::Double) == is_double,
                  "parameters and gradients must both be float64 or neither");
  const bool are_rounded =
      !is_double && !lists.exp_avgs.empty() && lists.exp_avgs[0].scalar_type() == ScalarType::BFloat16;
  check("exp_avgs", lists.exp_avgs, are_rounded ? ScalarType::BFloat16 : compute);
  check("exp_avg_sqs", lists.exp_avg_sqs, are_rounded ? ScalarType::BFloat16 : compute);
  if (first.scalar_type() != compute) check("masters", lists.masters, compute);
  STD_TORCH_CHECK(lists.steps.size() == lists.params.size(), "steps must be as many as params");
  const auto check_scalar = [&](const char* name, const Tensor& scalar) {
    STD_TORCH_CHECK(
        scalar.device() == first.device() && scalar.scalar_type() == ScalarType::Float && scalar.numel() == 1, name,
        " must be one float32 on the parameters' device");
  };
  for (const Tensor& step : lists.steps) check_scalar("a step", step);
  if (lr.has_value()) check_scalar("lr_tensor", *lr);
  if (coefficient.has_value()) check_scalar("coefficient", *coefficient);
  if (found_inf.has_value()) check_scalar("found_inf", *found_inf);
}

}  // namespace rlft
