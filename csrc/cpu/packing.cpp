// Packing on the CPU: padded (B, L, *) <-> packed (T, *), and tensors that are derived from cu_seqlens (B + 1).
//
//   unpad               packed[cu[b] + i]    = padded[b, column(b, i)]
//   pad                 padded[b, column(b, i)] = packed[cu[b] + i], and the tensor's fill value at all other places
//   mask_columns        out[cu[b] + i]       = column of the i-th true entry of mask[b]
//   position_ids        out[cu[b] + i]       = i
//   next_token_targets  out[cu[b] + i]       = ids[cu[b] + i + 1], and ignore_index at the last position of b
//   segment_sum         out[b]               = sum_i values[cu[b] + i]         double accumulators, ascending i
//   segment_expand      out[cu[b] + i]       = values[b]
//   take_rows           out[m]               = values[index[m]]
//   sum_rows            out[t]               = sum_{index[m] = t} values[m]    fp32 (fp64 for fp64), ascending m
//
// order lists the m by index[m], then ascending, and cu_uses[t] to cu_uses[t + 1] are the places of t in this list.
//
// column(b, i) is columns[cu[b] + i] if columns are given, else i + shift_b. shift_b is L - length_b if left, else 0.
// Packed rows from cu[B] on belong to no sequence. They get 0 in most outputs, ignore_index in targets, and -1 in
// columns.
//
// Tokens in consecutive columns form a run, which is contiguous on both sides. Each thread copies its part of a run by
// one memcpy per tensor. Threads share the destination bytes of all tensors together, not the sequences. All threads
// can therefore work on one long sequence, and they start once for any number of tensors.
#include <algorithm>
#include <numeric>
#include <optional>
#include <sstream>
#include <vector>

#include "memory.h"
#include "packing.h"

namespace rlft {
namespace {

constexpr int64_t kGrainBytes = 64 * 1024;  // with less per thread, starting the thread costs more than its work

int64_t grain_rows(int64_t row_bytes) { return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes)); }

// ---- which tokens lie where ------------------------------------------------------------------------------------

struct Sequences {
  const int32_t* cu_seqlens;
  int64_t B;
  int64_t begin(int64_t b) const { return cu_seqlens[b]; }
  int64_t end(int64_t b) const { return cu_seqlens[b + 1]; }
  int64_t length(int64_t b) const { return end(b) - begin(b); }
  int64_t num_tokens() const { return cu_seqlens[B]; }
};

// Calls f(b, first, last) for the part of each sequence that lies in the packed tokens [begin, end).
template <class F>
void for_each_part(const Sequences& sequences, int64_t begin, int64_t end, const F& f) {
  end = std::min(end, sequences.num_tokens());
  for (int64_t b = sequence_of(sequences.cu_seqlens, sequences.B, begin); begin < end; ++b) {
    const int64_t last = std::min(end, sequences.end(b));
    if (begin < last) f(b, begin, last);
    begin = last;
  }
}

// The places of the tokens in the padded tensor.
struct Places {
  Sequences sequences;
  const int32_t* columns;  // one per token; null if each sequence is contiguous
  int64_t L;
  bool left;

  int64_t shift(int64_t b) const { return left ? L - sequences.length(b) : 0; }

  // Calls f(packed row, padded row, count) for the tokens [first, last) of sequence b, in runs of consecutive columns.
  template <class F>
  void for_each_run(int64_t b, int64_t first, int64_t last, const F& f) const {
    if (columns == nullptr) return f(first, b * L + shift(b) + first - sequences.begin(b), last - first);
    while (first < last) {
      // Columns ascend. If two columns are as far apart as their tokens, the columns between them have no gap.
      const bool whole = columns[last - 1] - columns[first] == last - 1 - first;
      int64_t next = whole ? last : first + 1;
      while (next < last && columns[next] == columns[next - 1] + 1) ++next;
      f(first, b * L + columns[first], next - first);
      first = next;
    }
  }

  // Returns the first token of sequence b in column `column` or a later column.
  int64_t token_at(int64_t b, int64_t column) const {
    const int64_t begin = sequences.begin(b), end = sequences.end(b);
    if (columns == nullptr) return begin + std::clamp<int64_t>(column - shift(b), 0, end - begin);
    return std::lower_bound(columns + begin, columns + end, column) - columns;
  }
};

// Calls f(source row, destination row, count) for the runs whose packed rows lie in [begin, end).
struct UnpadRuns {
  Places places;
  template <class F>
  void operator()(int64_t begin, int64_t end, const F& f) const {
    for_each_part(places.sequences, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      places.for_each_run(b, first, last, [&](int64_t packed, int64_t padded, int64_t n) { f(padded, packed, n); });
    });
  }
};

// Calls f(source row, destination row, count) for the runs whose padded rows lie in [begin, end).
struct PadRuns {
  Places places;
  template <class F>
  void operator()(int64_t begin, int64_t end, const F& f) const {
    for (int64_t b = begin / places.L; b * places.L < end; ++b) {
      const int64_t first = places.token_at(b, std::max<int64_t>(0, begin - b * places.L));
      const int64_t last = places.token_at(b, std::min(places.L, end - b * places.L));
      if (first < last) places.for_each_run(b, first, last, f);
    }
  }
};

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

// One tensor of a copy. A row of `out` is a copy of a row of `in`, or is filled with the pattern.
struct Copy {
  const char* in;
  char* out;
  int64_t row_bytes;
  uint64_t pattern;
};

template <class Runs>
void copy_kernel(std::vector<Copy> copies, int64_t rows, const Runs& runs) {
  std::erase_if(copies, [](const Copy& copy) { return copy.row_bytes == 0; });  // memset and memcpy refuse null
  const auto add = [](int64_t bytes, const Copy& copy) { return bytes + copy.row_bytes; };
  const int64_t row_bytes = std::accumulate(copies.begin(), copies.end(), int64_t{0}, add);
  if (row_bytes == 0) return;
  torch::stable::parallel_for(0, rows, grain_rows(row_bytes), [&](int64_t begin, int64_t end) {
    int64_t done = begin;
    const auto fill_until = [&](int64_t row) {
      for (const auto& [in, out, bytes, pattern] : copies) fill(out + done * bytes, (row - done) * bytes, pattern);
    };
    runs(begin, end, [&](int64_t from, int64_t to, int64_t count) {
      if (done < to) fill_until(to);
      for (const auto& [in, out, bytes, pattern] : copies) {
        std::memcpy(out + to * bytes, in + from * bytes, count * bytes);
      }
      done = to + count;
    });
    if (done < end) fill_until(end);
  });
}

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

void segment_expand_kernel(const char* values, const Sequences& sequences, char* out, int64_t T, int64_t row) {
  torch::stable::parallel_for(0, T, grain_rows(row), [&](int64_t begin, int64_t end) {
    for_each_part(sequences, begin, end, [&](int64_t b, int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) std::memcpy(out + t * row, values + b * row, row);
    });
  });
  std::memset(out + sequences.num_tokens() * row, 0, (T - sequences.num_tokens()) * row);
}

void take_rows_kernel(const char* values, const int64_t* index, char* out, int64_t M, int64_t row) {
  torch::stable::parallel_for(0, M, grain_rows(row), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) std::memcpy(out + m * row, values + index[m] * row, row);
  });
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

// std::invalid_argument arrives in Python as ValueError.
template <class... Parts>
void check_value(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

constexpr int64_t kUnbounded = INT64_MAX;

// cu_seqlens must start at 0, never decrease, and end within the packed rows.
Sequences checked(const Tensor& cu_seqlens, int64_t num_tokens, int64_t max_seqlen) {
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
  check_value(cu[B] <= num_tokens, "cu_seqlens ends at ", cu[B], ", but the packed side has ", num_tokens,
              " rows; it needs at least as many.");
  return {cu, B};
}

// Returns whether the columns of a sequence ascend and lie in [0, L).
bool are_columns(const int32_t* column, int64_t length, int64_t L) {
  if (length == 0) return true;
  bool ascend = column[0] >= 0 && column[length - 1] < L;
  for (int64_t i = 1; i < length; ++i) ascend &= column[i - 1] < column[i];
  return ascend;
}

Places checked(const Sequences& sequences, const std::optional<Tensor>& columns, int64_t L, bool left) {
  if (!columns) return {sequences, nullptr, L, left};
  check_value(columns->size(0) >= sequences.num_tokens(), "column_T has ", columns->size(0),
              " entries, but cu_seqlens ends at ", sequences.num_tokens(), "; both come from one mask.");
  const auto* column = static_cast<const int32_t*>(columns->const_data_ptr());
  for (int64_t b = 0; b < sequences.B; ++b) {
    check_value(are_columns(column + sequences.begin(b), sequences.length(b), L), "column_T of sequence ", b,
                " must ascend from 0 or more to less than the padded length ", L,
                "; take cu_seqlens and column_T from the mask of this tensor.");
  }
  return {sequences, column, L, left};
}

std::vector<Tensor> contiguous(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(torch::stable::contiguous(tensor));
  return result;
}

Copy copy_of(const Tensor& in, const Tensor& out, int64_t row_bytes, uint64_t pattern) {
  return {static_cast<const char*>(in.const_data_ptr()), static_cast<char*>(with_huge_pages(out)), row_bytes, pattern};
}

std::vector<Tensor> unpad(const std::vector<Tensor>& padded, const Tensor& cu_seqlens,
                          const std::optional<Tensor>& columns, int64_t num_tokens, bool left) {
  if (padded.empty()) return {};
  const std::vector<Tensor> inputs = contiguous(padded);
  const int64_t B = inputs[0].size(0), L = inputs[0].size(1);
  const Places places = checked(checked(cu_seqlens, num_tokens, L), columns, L, left);
  std::vector<Tensor> outputs;
  std::vector<Copy> copies;
  for (const Tensor& input : inputs) {
    check_value(input.size(0) == B && input.size(1) == L && B == places.sequences.B, "a padded tensor has ",
                input.size(0), " x ", input.size(1), " tokens, expected ", places.sequences.B, " x ", L, ".");
    outputs.push_back(torch::stable::new_empty(input, with_trailing({num_tokens}, input, 2)));
    copies.push_back(copy_of(input, outputs.back(), row_bytes(input, 2), 0));
  }
  copy_kernel(copies, num_tokens, UnpadRuns{places});
  return outputs;
}

std::vector<Tensor> pad(const std::vector<Tensor>& packed, const Tensor& cu_seqlens,
                        const std::optional<Tensor>& columns, int64_t max_seqlen, bool left,
                        const std::vector<double>& values) {
  if (packed.empty()) return {};
  const std::vector<Tensor> inputs = contiguous(packed);
  const int64_t T = inputs[0].size(0);
  const Places places = checked(checked(cu_seqlens, T, max_seqlen), columns, max_seqlen, left);
  std::vector<Tensor> outputs;
  std::vector<Copy> copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_value(inputs[i].size(0) == T, "a packed tensor has ", inputs[i].size(0), " rows, expected ", T, ".");
    const uint64_t pattern = fill_pattern(values.at(i), inputs[i].scalar_type());
    outputs.push_back(
        torch::stable::new_empty(inputs[i], with_trailing({places.sequences.B, max_seqlen}, inputs[i], 1)));
    copies.push_back(copy_of(inputs[i], outputs[i], row_bytes(inputs[i], 1), pattern));
  }
  copy_kernel(copies, places.sequences.B * max_seqlen, PadRuns{places});
  return outputs;
}

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

Tensor segment_expand(const Tensor& values, const Tensor& cu_seqlens, int64_t num_tokens) {
  const Tensor input = torch::stable::contiguous(values);
  const Sequences sequences = checked(cu_seqlens, num_tokens, kUnbounded);
  check_value(sequences.B == input.size(0), "values has ", input.size(0), " rows, but cu_seqlens describes ",
              sequences.B, " sequences.");
  Tensor out = torch::stable::new_empty(input, with_trailing({num_tokens}, input, 1));
  if (out.numel() > 0) {
    segment_expand_kernel(static_cast<const char*>(input.const_data_ptr()), sequences,
                          static_cast<char*>(out.mutable_data_ptr()), num_tokens, row_bytes(input, 1));
  }
  return out;
}

struct RowIndex {
  const int64_t *index, *order;
  const int32_t* cu_uses;
  int64_t M, T;
};

// order must list every m once, grouped by index[m], and cu_uses must be the boundaries of the groups.
RowIndex checked(const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
  const RowIndex rows{static_cast<const int64_t*>(index.const_data_ptr()),
                      static_cast<const int64_t*>(order.const_data_ptr()),
                      static_cast<const int32_t*>(cu_uses.const_data_ptr()), index.size(0), cu_uses.size(0) - 1};
  check_value(order.size(0) == rows.M && rows.T >= 0 && rows.cu_uses[0] == 0 && rows.cu_uses[rows.T] == rows.M,
              "index has ", rows.M, " entries, order has ", order.size(0), ", and cu_uses ends at ",
              rows.T >= 0 ? rows.cu_uses[rows.T] : 0, "; take all three from row_index().");
  for (int64_t t = 0; t < rows.T; ++t) {
    check_value(rows.cu_uses[t] <= rows.cu_uses[t + 1] && rows.cu_uses[t + 1] <= rows.M, "cu_uses does not ascend to ",
                rows.M, " at row ", t, "; take it from row_index().");
    for (int64_t u = rows.cu_uses[t], before = -1; u < rows.cu_uses[t + 1]; before = rows.order[u++]) {
      const int64_t m = rows.order[u];
      check_value(m > before && m < rows.M && rows.index[m] == t, "order does not list the places of row ", t,
                  " in ascending order; take it from row_index().");
    }
  }
  return rows;
}

Tensor take_rows(const Tensor& values, const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
  const Tensor input = torch::stable::contiguous(values);
  const RowIndex rows = checked(index, order, cu_uses);
  check_value(input.size(0) == rows.T, "values has ", input.size(0), " rows, but cu_uses describes ", rows.T, ".");
  Tensor out = torch::stable::new_empty(input, with_trailing({rows.M}, input, 1));
  if (out.numel() > 0) {
    take_rows_kernel(static_cast<const char*>(input.const_data_ptr()), rows.index,
                     static_cast<char*>(with_huge_pages(out)), rows.M, row_bytes(input, 1));
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
  m.impl("unpad", TORCH_BOX(&rlft::unpad));
  m.impl("pad", TORCH_BOX(&rlft::pad));
  m.impl("mask_columns", TORCH_BOX(&rlft::mask_columns));
  m.impl("position_ids", TORCH_BOX(&rlft::position_ids));
  m.impl("next_token_targets", TORCH_BOX(&rlft::next_token_targets));
  m.impl("segment_sum", TORCH_BOX(&rlft::segment_sum));
  m.impl("segment_expand", TORCH_BOX(&rlft::segment_expand));
  m.impl("take_rows", TORCH_BOX(&rlft::take_rows));
  m.impl("sum_rows", TORCH_BOX(&rlft::sum_rows));
}
