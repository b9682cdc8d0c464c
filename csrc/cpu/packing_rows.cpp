// Packing on the CPU: the operators that move rows, padded (B, L, *) <-> packed (T, *).
//
//   unpad               packed[cu[b] + i]    = padded[b, column(b, i)]
//   pad                 padded[b, column(b, i)] = packed[cu[b] + i], and the tensor's fill value at all other places
//   segment_expand      out[cu[b] + i]       = values[b]
//   take_rows           out[m]               = values[index[m]]
//
// column(b, i) is columns[cu[b] + i] if columns are given, else i + shift_b. shift_b is L - length_b if left, else 0.
// Packed rows from cu[B] on belong to no sequence. They get 0.
//
// Tokens in consecutive columns form a run, which is contiguous on both sides. Each thread copies its part of a run by
// one memcpy per tensor. Threads share the destination bytes of all tensors together, not the sequences. All threads
// can therefore work on one long sequence, and they start once for any number of tensors.
#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "memory.h"
#include "packing.h"
#include "sequences.h"

namespace rlft {
namespace {

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

// ---- binding ---------------------------------------------------------------------------------------------------

// Returns whether the columns of a sequence ascend and lie in [0, L).
bool are_columns(const int32_t* column, int64_t length, int64_t L) {
  if (length == 0) return true;
  bool ascend = column[0] >= 0 && column[length - 1] < L;
  for (int64_t i = 1; i < length; ++i) ascend &= column[i - 1] < column[i];
  return ascend;
}

Places checked_places(const Sequences& sequences, const std::optional<Tensor>& columns, int64_t L, bool left) {
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
  const Places places = checked_places(checked(cu_seqlens, num_tokens, L), columns, L, left);
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
  const Places places = checked_places(checked(cu_seqlens, T, max_seqlen), columns, max_seqlen, left);
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

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("unpad", TORCH_BOX(&rlft::unpad));
  m.impl("pad", TORCH_BOX(&rlft::pad));
  m.impl("segment_expand", TORCH_BOX(&rlft::segment_expand));
  m.impl("take_rows", TORCH_BOX(&rlft::take_rows));
}
