// Packing on the CPU: padded (B, L, *) <-> packed (T, *), and what follows from cu_seqlens (B + 1).
//
//   unpad               packed[cu[b] + l]    = padded[b, l + shift_b]          shift_b = L - length_b if left, else 0
//   pad                 padded[b, l + shift_b] = packed[cu[b] + l], every other place holds `value`
//   position_ids        out[cu[b] + l]       = l
//   next_token_targets  out[cu[b] + l]       = ids[cu[b] + l + 1], and ignore_index at the last position of b
//   segment_sum         out[b]               = sum_l values[cu[b] + l]         double accumulators, ascending l
//   segment_expand      out[cu[b] + l]       = values[b]
//
// A sequence is contiguous on both sides, so a copy is one memcpy per sequence and thread. Work is cut by destination
// bytes, never by sequences: one long sequence is shared by all threads.
#include <algorithm>
#include <sstream>
#include <utility>


#include "memory.h"
#include "packing.h"

namespace rlft {
namespace {

constexpr int64_t kGrainBytes = 64 * 1024;  // less per thread than this and starting the thread costs more

int64_t grain_rows(int64_t row_bytes) { return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes)); }

// ---- kernels ---------------------------------------------------------------------------------------------------

void fill(char* destination, int64_t bytes, uint64_t pattern) {
  if (pattern == 0) {
    std::memset(destination, 0, bytes);
    return;
  }
  int64_t offset = 0;
  for (; offset + 8 <= bytes; offset += 8) std::memcpy(destination + offset, &pattern, 8);
  std::memcpy(destination + offset, &pattern, bytes - offset);
}

// Calls f(b, first, last) for the part of each sequence that lies in the packed tokens [begin, end).
template <class F>
void for_each_run(const int32_t* cu_seqlens, int64_t B, int64_t begin, int64_t end, const F& f) {
  for (int64_t b = sequence_of(cu_seqlens, B, begin); begin < end; ++b) {
    const int64_t last = std::min<int64_t>(end, cu_seqlens[b + 1]);
    if (begin < last) f(b, begin, last);
    begin = last;
  }
}

void unpad_kernel(const char* padded, const int32_t* cu_seqlens, char* packed, int64_t B, int64_t L, int64_t T,
                  int64_t row, bool left) {
  torch::stable::parallel_for(0, T, grain_rows(row), [&](int64_t begin, int64_t end) {
    for_each_run(cu_seqlens, B, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      const int64_t shift = left ? L - (cu_seqlens[b + 1] - cu_seqlens[b]) : 0;
      const int64_t column = first - cu_seqlens[b] + shift;
      std::memcpy(packed + first * row, padded + (b * L + column) * row, (last - first) * row);
    });
  });
}

void pad_kernel(const char* packed, const int32_t* cu_seqlens, char* padded, int64_t B, int64_t L, int64_t row,
                bool left, uint64_t pattern) {
  torch::stable::parallel_for(0, B * L, grain_rows(row), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t b = begin / L;
      const int64_t stop = std::min(end, (b + 1) * L);
      const int64_t length = cu_seqlens[b + 1] - cu_seqlens[b];
      const int64_t shift = left ? L - length : 0;
      const int64_t first = std::clamp(b * L + shift, begin, stop);
      const int64_t last = std::clamp(b * L + shift + length, first, stop);
      fill(padded + begin * row, (first - begin) * row, pattern);
      if (first < last) {
        const int64_t token = cu_seqlens[b] + first - b * L - shift;
        std::memcpy(padded + first * row, packed + token * row, (last - first) * row);
      }
      fill(padded + last * row, (stop - last) * row, pattern);
      begin = stop;
    }
  });
}

void position_ids_kernel(const int32_t* cu_seqlens, int64_t* out, int64_t B, int64_t T) {
  torch::stable::parallel_for(0, T, grain_rows(sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    for_each_run(cu_seqlens, B, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) out[t] = t - cu_seqlens[b];
    });
  });
}

void next_token_targets_kernel(const int64_t* input_ids, const int32_t* cu_seqlens, int64_t* out, int64_t B, int64_t T,
                               int64_t ignore_index) {
  torch::stable::parallel_for(0, T, grain_rows(sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    for_each_run(cu_seqlens, B, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      const bool reaches_end = last == cu_seqlens[b + 1];
      const int64_t shifted = last - reaches_end;
      std::memcpy(out + first, input_ids + first + 1, (shifted - first) * sizeof(int64_t));
      if (reaches_end) out[shifted] = ignore_index;
    });
  });
}

void segment_expand_kernel(const char* values, const int32_t* cu_seqlens, char* out, int64_t B, int64_t T,
                           int64_t row) {
  torch::stable::parallel_for(0, T, grain_rows(row), [&](int64_t begin, int64_t end) {
    for_each_run(cu_seqlens, B, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) std::memcpy(out + t * row, values + b * row, row);
    });
  });
}

// Columns are taken in blocks whose accumulators stay in the first-level cache.
template <class Value, class Sum>
void segment_sum_kernel(const Value* values, const int32_t* cu_seqlens, Sum* out, int64_t B, int64_t D) {
  constexpr int64_t kBlock = 256;
  const int64_t blocks = (D + kBlock - 1) / kBlock;
  torch::stable::parallel_for(0, B * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / blocks, column = task % blocks * kBlock, width = std::min(kBlock, D - column);
      double sum[kBlock] = {};
      for (int64_t t = cu_seqlens[b]; t < cu_seqlens[b + 1]; ++t) {
        const Value* value = values + t * D + column;
        for (int64_t d = 0; d < width; ++d) sum[d] += static_cast<double>(static_cast<Sum>(value[d]));
      }
      for (int64_t d = 0; d < width; ++d) out[b * D + column + d] = static_cast<Sum>(sum[d]);
    }
  });
}

// ---- binding ---------------------------------------------------------------------------------------------------

// std::invalid_argument arrives in Python as ValueError.
template <class... Parts>
void check_value(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// cu_seqlens must start at 0, never decrease, and end at num_tokens; returns its data and B.
std::pair<const int32_t*, int64_t> checked(const Tensor& cu_seqlens, int64_t num_tokens, int64_t max_seqlen) {
  const auto* cu = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  const int64_t B = cu_seqlens.size(0) - 1;
  check_value(B >= 0 && cu[0] == 0, "cu_seqlens must be [0, end of sequence 0, ...], but it does not start with 0.");
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = static_cast<int64_t>(cu[b + 1]) - cu[b];
    check_value(length >= 0, "cu_seqlens must not decrease, but goes from ", cu[b], " to ", cu[b + 1], " at sequence ",
                b, "; pass cumulative lengths, not lengths.");
    check_value(length <= max_seqlen, "sequence ", b, " has ", length, " tokens, more than the padded length ",
                max_seqlen, "; raise the padded length or shorten the sequence.");
  }
  check_value(cu[B] == num_tokens, "cu_seqlens ends at ", cu[B], ", but the packed side has ", num_tokens,
              " tokens; both must agree.");
  return {cu, B};
}

constexpr int64_t kAnyLength = INT64_MAX;

Tensor unpad(const Tensor& padded, const Tensor& cu_seqlens, int64_t num_tokens, bool left) {
  const Tensor input = torch::stable::contiguous(padded);
  const auto [cu, B] = checked(cu_seqlens, num_tokens, input.size(1));
  check_value(B == input.size(0), "padded has ", input.size(0), " rows, but cu_seqlens describes ", B, " sequences.");
  Tensor packed = torch::stable::new_empty(input, with_trailing({num_tokens}, input, 2));
  if (packed.numel() > 0) {
    const int64_t row = row_bytes(input, 2);
    unpad_kernel(static_cast<const char*>(input.const_data_ptr()), cu,
                 static_cast<char*>(with_huge_pages(packed)), B, input.size(1), num_tokens, row, left);
  }
  return packed;
}

Tensor pad(const Tensor& packed, const Tensor& cu_seqlens, int64_t max_seqlen, bool left, double value) {
  const Tensor input = torch::stable::contiguous(packed);
  const auto [cu, B] = checked(cu_seqlens, input.size(0), max_seqlen);
  const uint64_t pattern = fill_pattern(value, input.scalar_type());
  Tensor padded = torch::stable::new_empty(input, with_trailing({B, max_seqlen}, input, 1));
  if (padded.numel() > 0) {
    const int64_t row = row_bytes(input, 1);
    pad_kernel(static_cast<const char*>(input.const_data_ptr()), cu,
               static_cast<char*>(with_huge_pages(padded)), B, max_seqlen, row, left, pattern);
  }
  return padded;
}

Tensor position_ids(const Tensor& cu_seqlens, int64_t num_tokens) {
  const auto [cu, B] = checked(cu_seqlens, num_tokens, kAnyLength);
  Tensor out = torch::stable::new_empty(cu_seqlens, {num_tokens}, ScalarType::Long);
  position_ids_kernel(cu, static_cast<int64_t*>(out.mutable_data_ptr()), B, num_tokens);
  return out;
}

Tensor next_token_targets(const Tensor& input_ids, const Tensor& cu_seqlens, int64_t ignore_index) {
  const Tensor input = torch::stable::contiguous(input_ids);
  const auto [cu, B] = checked(cu_seqlens, input.size(0), kAnyLength);
  Tensor out = torch::stable::new_empty(input, {input.size(0)});
  next_token_targets_kernel(static_cast<const int64_t*>(input.const_data_ptr()), cu,
                            static_cast<int64_t*>(out.mutable_data_ptr()), B, input.size(0), ignore_index);
  return out;
}

template <class Value, class Sum>
void segment_sum_typed(const Tensor& values, const int32_t* cu, Tensor& out, int64_t B) {
  const int64_t D = row_bytes(values, 1) / static_cast<int64_t>(sizeof(Value));
  segment_sum_kernel(static_cast<const Value*>(values.const_data_ptr()), cu, static_cast<Sum*>(out.mutable_data_ptr()),
                     B, D);
}

Tensor segment_sum(const Tensor& values, const Tensor& cu_seqlens) {
  const Tensor input = torch::stable::contiguous(values);
  const auto [cu, B] = checked(cu_seqlens, input.size(0), kAnyLength);
  const ScalarType dtype = input.scalar_type();
  Tensor out = torch::stable::new_empty(input, with_trailing({B}, input, 1),
                                        dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  switch (dtype) {
    case ScalarType::Double: segment_sum_typed<double, double>(input, cu, out, B); break;
    case ScalarType::Float: segment_sum_typed<float, float>(input, cu, out, B); break;
    case ScalarType::Half: segment_sum_typed<torch::headeronly::Half, float>(input, cu, out, B); break;
    case ScalarType::BFloat16: segment_sum_typed<torch::headeronly::BFloat16, float>(input, cu, out, B); break;
    default: STD_TORCH_CHECK(false, "segment_sum: unsupported dtype ", toString(dtype));
  }
  return out;
}

Tensor segment_expand(const Tensor& values, const Tensor& cu_seqlens, int64_t num_tokens) {
  const Tensor input = torch::stable::contiguous(values);
  const auto [cu, B] = checked(cu_seqlens, num_tokens, kAnyLength);
  check_value(B == input.size(0), "values has ", input.size(0), " rows, but cu_seqlens describes ", B, " sequences.");
  Tensor out = torch::stable::new_empty(input, with_trailing({num_tokens}, input, 1));
  if (out.numel() > 0) {
    segment_expand_kernel(static_cast<const char*>(input.const_data_ptr()), cu,
                          static_cast<char*>(out.mutable_data_ptr()), B, num_tokens, row_bytes(input, 1));
  }
  return out;
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("unpad", TORCH_BOX(&rlft::unpad));
  m.impl("pad", TORCH_BOX(&rlft::pad));
  m.impl("position_ids", TORCH_BOX(&rlft::position_ids));
  m.impl("next_token_targets", TORCH_BOX(&rlft::next_token_targets));
  m.impl("segment_sum", TORCH_BOX(&rlft::segment_sum));
  m.impl("segment_expand", TORCH_BOX(&rlft::segment_expand));
}
