// This header maps a tensor's dtype to the C++ type of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "stable.h"

namespace rlft {

template <class T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<__half> = ScalarType::Half;
template <>
inline constexpr ScalarType kScalarType<__nv_bfloat16> = ScalarType::BFloat16;

// Calls f(T*) with a null pointer, where T is the C++ type of the dtype. T must be one of Types.
template <class... Types, class F>
void dispatch_among(ScalarType dtype, const F& f) {
  const bool known = ((dtype == kScalarType<Types> && (f(static_cast<Types*>(nullptr)), true)) || ...);
  STD_TORCH_CHECK(known, "got a ", toString(dtype), " tensor, for which there is no kernel");
}

template <class F>
void dispatch(ScalarType dtype, const F& f) {
  dispatch_among<double, float, __half, __nv_bfloat16>(dtype, f);
}

}  // namespace rlft
