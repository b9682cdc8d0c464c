// Packing on the CPU: which tokens lie where, and the checks of the tensors that say so.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>

#include "packing.h"

namespace rlft {

constexpr int64_t kGrainBytes = 64 * 1024;  // with less per thread, starting the thread costs more than its work

inline int64_t grain_rows(int64_t row_bytes) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes));
}

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

// ---- checks ----------------------------------------------------------------------------------------------------

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
inline Sequences checked(const Tensor& cu_seqlens, int64_t num_tokens, int64_t max_seqlen) {
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

struct RowIndex {
  const int64_t *index, *order;
  const int32_t* cu_uses;
  int64_t M, T;
};

// order must list every m once, grouped by index[m], and cu_uses must be the boundaries of the groups.
inline RowIndex checked(const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
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

}  // namespace rlft
