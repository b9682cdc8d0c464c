// Packing on the CPU: the operators that make numbers of cu_seqlens (B + 1), a mask (B, L) or packed rows (T, *).
//
//   mask_columns        out[cu[b] + i]       = column of the i-th true entry of mask[b]
//   position_ids        out[cu[b] + i]       = i
//   next_token_targets  out[cu[b] + i]       = ids[cu[b] + i + 1], and ignore_index at the last position of b
//   segment_sum         out[b]               = sum_i values[cu[b] + i]         double accumulators, ascending i
//   sum_rows            out[t]               = sum_{index[m] = t} values[m]    fp32 (fp64 for fp64), ascending m
//
// order lists the m by index[m], then ascending, and cu_uses[t] to cu_uses[t + 1] are the places of t in this list.
//
// Packed rows from cu[B] on belong to no sequence. They get 0 in position_ids, ignore_index in targets, and -1 in
// columns.
#include <algorithm>
#include <numeric>
#include <vector>

#include "memory.h"
#include "packing.h"
#include "sequences.h"

namespace rlft {
namespace {

void mask_columns_kernel(const uint8_t* mask, const Sequences& sequences, int32_t* columns, int64_t L, int64_t T) {
  torch::stable::parallel_for(0, sequences.B, grain_rows(L), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int64_t t = sequences.begin(b);
      // Without a branch: every column is written, and t moves on only if the entry is true.
      for (int64_t l = 0; l < L && t < sequences.end(b); ++l) {
        columns[t] = static_cast<int32_t>(l);
        t += mask[b * L + l] != 0;
      }
    }
  });
  std::fill(columns + sequences.num_tokens(), columns + T, -1);
}

void position_ids_kernel(const Sequences& sequences, int64_t* out, int64_t T) {
  torch::stable::parallel_for(0, T, grain_rows(sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    for_each_part(sequences, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      std::iota(out + first, out + last, first - sequences.begin(b));
    });
  });
  std::fill(out + sequences.num_tokens(), out + T, 0);
}

void next_token_targets_kernel(const int64_t* input_ids, const Sequences& sequences, int64_t* out, int64_t T,
                               int64_t ignore_index) {
  torch::stable::parallel_for(0, T, grain_rows(sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    for_each_part(sequences, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      const bool reaches_end = last == sequences.end(b);
      const int64_t shifted = last - reaches_end;
      std::memcpy(out + first, input_ids + first + 1, (shifted - first) * sizeof(int64_t));
      if (reaches_end) out[shifted] = ignore_index;
    });
  });
  std::fill(out + sequences.num_tokens(), out + T, ignore_index);
}

// Most rows have one use, and are copied.
template <class Value, class Sum>
void sum_rows_kernel(const Value* values, const int64_t* order, const int32_t* cu_uses, Value* out, int64_t T,
                     int64_t D) {
  constexpr int64_t kBlock = 256;
  torch::stable::parallel_for(0, T, grain_rows(D * sizeof(Value)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t *use = order + cu_uses[t], uses = cu_uses[t + 1] - cu_uses[t];
      if (uses == 1) {
        std::memcpy(out + t * D, values + *use * D, D * sizeof(Value));
        continue;
      }
      for (int64_t column = 0; column < D; column += kBlock) {
        const int64_t width = std::min(kBlock, D - column);
        Sum sum[kBlock] = {};
        for (int64_t u = 0; u < uses; ++u) {
          const Value* value = values + use[u] * D + column;
          for (int64_t d = 0; d < width; ++d) sum[d] += static_cast<Sum>(value[d]);
        }
        for (int64_t d = 0; d < width; ++d) out[t * D + column + d] = static_cast<Value>(sum[d]);
      }
    }
  });
}

// The columns are summed in blocks, so that the accumulators of a block stay in L1.
template <class Value, class Sum>
void segment_sum_kernel(const Value* values, const Sequences& sequences, Sum* out, int64_t D) {
  constexpr int64_t kBlock = 256;
  const int64_t blocks = (D + kBlock - 1) / kBlock;
  torch::stable::parallel_for(0, sequences.B * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / blocks, column = task % blocks * kBlock, width = std::min(kBlock, D - column);
      double sum[kBlock] = {};
      for (int64_t t = sequences.begin(b); t < sequences.end(b); ++t) {
        const Value* value = values + t * D + column;
        for (int64_t d = 0; d < width; ++d) sum[d] += static_cast<double>(static_cast<Sum>(value[d]));
      }
      for (int64_t d = 0; d < width; ++d) out[b * D + column + d] = static_cast<Sum>(sum[d]);
    }
  });
}

// ---- binding ---------------------------------------------------------------------------------------------------

Tensor mask_columns(const Tensor& mask, const Tensor& cu_seqlens, int64_t num_tokens) {
  const Tensor input = torch::stable::contiguous(mask);
  const Sequences sequences = checked(cu_seqlens, kUnbounded, input.size(1));
  check_value(sequences.num_tokens() <= num_tokens, "the mask has ", sequences.num_tokens(),
              " tokens, more than max_tokens = ", num_tokens, "; raise the bound or cut the batch.");
  check_value(sequences.B == input.size(0), "the mask has ", input.size(0), " rows, but cu_seqlens describes ",
              sequences.B, " sequences.");
  Tensor columns = torch::stable::new_empty(input, {num_tokens}, ScalarType::Int);
  mask_columns_kernel(static_cast<const uint8_t*>(input.const_data_ptr()), sequences,
                      static_cast<int32_t*>(columns.mutable_data_ptr()), input.size(1), num_tokens);
  return columns;
}

Tensor position_ids(const Tensor& cu_seqlens, int64_t num_tokens) {
  const Sequences sequences = checked(cu_seqlens, num_tokens, kUnbounded);
  Tensor out = torch::stable::new_empty(cu_seqlens, {num_tokens}, ScalarType::Long);
  position_ids_kernel(sequences, static_cast<int64_t*>(out.mutable_data_ptr()), num_tokens);
  return out;
}

Tensor next_token_targets(const Tensor& input_ids, const Tensor& cu_seqlens, int64_t ignore_index) {
  const Tensor input = torch::stable::contiguous(input_ids);
  const Sequences sequences = checked(cu_seqlens, input.size(0), kUnbounded);
  Tensor out = torch::stable::new_empty(input, {input.size(0)});
  next_token_targets_kernel(static_cast<const int64_t*>(input.const_data_ptr()), sequences,
                            static_cast<int64_t*>(out.mutable_data_ptr()), input.size(0), ignore_index);
  return out;
}

template <class Value, class Sum>
void segment_sum_typed(const Tensor& values, const Sequences& sequences, Tensor& out) {
  const int64_t D = row_bytes(values, 1) / static_cast<int64_t>(sizeof(Value));
  segment_sum_kernel(static_cast<const Value*>(values.const_data_ptr()), sequences,
                     static_cast<Sum*>(out.mutable_data_ptr()), D);
}

Tensor segment_sum(const Tensor& values, const Tensor& cu_seqlens) {
  const Tensor input = torch::stable::contiguous(values);
  const Sequences sequences = checked(cu_seqlens, input.size(0), kUnbounded);
  const ScalarType dtype = input.scalar_type();
  Tensor out = torch::stable::new_empty(input, with_trailing({sequences.B}, input, 1),
                                        dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  switch (dtype) {
    case ScalarType::Double: segment_sum_typed<double, double>(input, sequences, out); break;
    case ScalarType::Float: segment_sum_typed<float, float>(input, sequences, out); break;
    case ScalarType::Half: segment_sum_typed<torch::headeronly::Half, float>(input, sequences, out); break;
    case ScalarType::BFloat16: segment_sum_typed<torch::headeronly::BFloat16, float>(input, sequences, out); break;
    default: STD_TORCH_CHECK(false, "segment_sum: unsupported dtype ", toString(dtype));
  }
  return out;
}

template <class Value, class Sum>
void sum_rows_typed(const Tensor& values, const RowIndex& rows, Tensor& out) {
  const int64_t D = row_bytes(values, 1) / static_cast<int64_t>(sizeof(Value));
  sum_rows_kernel<Value, Sum>(static_cast<const Value*>(values.const_data_ptr()), rows.order, rows.cu_uses,
                              static_cast<Value*>(with_huge_pages(out)), rows.T, D);
}

Tensor sum_rows(const Tensor& values, const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
  const Tensor input = torch::stable::contiguous(values);
  const RowIndex rows = checked(index, order, cu_uses);
  check_value(input.size(0) == rows.M, "values has ", input.size(0), " rows, but index has ", rows.M, " entries.");
  Tensor out = torch::stable::new_empty(input, with_trailing({rows.T}, input, 1));
  if (out.numel() == 0) return out;
  switch (input.scalar_type()) {
    case ScalarType::Double: sum_rows_typed<double, double>(input, rows, out); break;
    case ScalarType::Float: sum_rows_typed<float, float>(input, rows, out); break;
    case ScalarType::Half: sum_rows_typed<torch::headeronly::Half, float>(input, rows, out); break;
    case ScalarType::BFloat16: sum_rows_typed<torch::headeronly::BFloat16, float>(input, rows, out); break;
    default: STD_TORCH_CHECK(false, "sum_rows: unsupported dtype ", toString(input.scalar_type()));
  }
  return out;
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("mask_columns", TORCH_BOX(&rlft::mask_columns));
  m.impl("position_ids", TORCH_BOX(&rlft::position_ids));
  m.impl("next_token_targets", TORCH_BOX(&rlft::next_token_targets));
  m.impl("segment_sum", TORCH_BOX(&rlft::segment_sum));
  m.impl("sum_rows", TORCH_BOX(&rlft::sum_rows));
}
