// Checks of what linear_logprob's passes read and write: a wrong size would reach memory of others. The operators are
// called by the project alone, but everybody can call them.
#pragma once

#include <cstdint>
#include <optional>

#include "stable.h"

namespace rlft {

// One element for each of `size` rows or columns.
inline void check_vector(const char* name, const Tensor& x, int64_t size, ScalarType dtype = ScalarType::Float) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == size && x.scalar_type() == dtype && x.is_contiguous(), name,
                  " must be a contiguous ", toString(dtype), " tensor of ", size, " elements");
}

inline void check_vector(const char* name, const std::optional<Tensor>& x, int64_t size,
                         ScalarType dtype = ScalarType::Float) {
  if (x.has_value()) check_vector(name, *x, size, dtype);
}

// A matrix whose rows may lie apart.
inline void check_matrix(const char* name, const Tensor& x, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == columns && (columns <= 1 || x.stride(1) == 1) &&
                      (rows <= 1 || x.stride(0) >= columns),
                  name, " must be a tensor of ", rows, " x ", columns, " elements with contiguous rows");
}

inline void check_contiguous(const char* name, const Tensor& x, int64_t rows, int64_t columns) {
  check_matrix(name, x, rows, columns);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous(), name, " must be float32 and contiguous");
}

// What all passes over a tile are given beside its logits.
inline void check_problem(int64_t rows, int64_t columns, const Tensor& target, const std::optional<Tensor>& bias,
                          const Tensor& inv_temperature) {
  check_vector("target", target, rows, ScalarType::Long);
  check_vector("bias", bias, columns);
  check_vector("inv_temperature", inv_temperature,
               inv_temperature.dim() == 1 && inv_temperature.size(0) == 1 ? 1 : rows);
}

inline void check_stats(int64_t rows, const Tensor& max, const Tensor& excess,
                        const std::optional<Tensor>& sum_exp_shift, const std::optional<Tensor>& sum_exp_squared,
                        const Tensor& target_logit, const std::optional<Tensor>& sum_logits) {
  check_vector("max", max, rows);
  check_vector("excess", excess, rows);
  check_vector("sum_exp_shift", sum_exp_shift, rows);
  check_vector("sum_exp_squared", sum_exp_squared, rows);
  check_vector("target_logit", target_logit, rows);
  check_vector("sum_logits", sum_logits, rows, ScalarType::Double);
}

inline void check_frozen(int64_t rows, const Tensor& sum_others, const Tensor& target_slope,
                         const Tensor& accumulator) {
  check_vector("sum_others", sum_others, rows);
  check_vector("target_slope", target_slope, rows);
  STD_TORCH_CHECK(accumulator.dim() == 2, "accumulator must be a matrix");
  check_contiguous("accumulator", accumulator, rows, accumulator.size(1));
}

inline void check_upstream(int64_t rows, const Tensor& max, const Tensor& log_sum, const std::optional<Tensor>& entropy,
                           const Tensor& grad_logprob, const std::optional<Tensor>& grad_entropy) {
  check_vector("max", max, rows);
  check_vector("log_sum", log_sum, rows);
  check_vector("entropy", entropy, rows);
  check_vector("grad_logprob", grad_logprob, rows);
  check_vector("grad_entropy", grad_entropy, rows);
  STD_TORCH_CHECK(entropy.has_value() || !grad_entropy.has_value(), "grad_entropy needs the entropy");
}

}  // namespace rlft
