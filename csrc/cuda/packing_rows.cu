// Packing on CUDA: the operators that move rows, padded (B, L, *) <-> packed (T, *).
//
// They differ in the source of a row. A row without a source (-1) is filled.
//
//   unpad           packed[t]    <- padded[b, column(t)]             b = the sequence of t
//   pad             padded[b, l] <- packed[t]                        the t of b with column(t) = l, if there is one
//   segment_expand  out[t]       <- values[b]
//   take_rows       out[m]       <- values[index[m]]
//
// column(t) is columns[t] if columns are given, else t - cu[b] + shift_b. shift_b is L - length_b if left, else 0.
// unpad and pad take any number of tensors of any dtypes and row sizes. The kernel's parameters hold the addresses of
// kTableSize tensors per launch.
//
// Bytes moved: every output row is written once, and each of its sources is read once. Operators with cu_seqlens read
// its B + 1 offsets, and add per row a binary search of log2(B) cached reads. Columns add 4 bytes per row of unpad, and
// a search of log2(length_b) cached reads per row of pad. take_rows reads 8 bytes per place.
//
// A row is copied in the widest word (1 to 16 bytes) that divides the row size and both addresses. The threads of a
// warp take consecutive words of a row, then consecutive rows, so that accesses to narrow rows coalesce, too.
//
// cu_seqlens, columns and row indices are not checked, because a check would sync with the host. They may hold any
// values: a row is filled if no sequence covers it or if its source lies outside of the input. Nothing is written
// outside of the output. The result is deterministic, because every output row has one source.
#include <bit>
#include <optional>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda/packing.cuh"
#include "packing.h"

namespace rlft {
namespace {

constexpr int kTableSize = 32;  // tensors per launch; the table is 1.5 KB of the 4 KB that kernel parameters may take

// ---- kernels ---------------------------------------------------------------------------------------------------

// The places of the tokens in the padded tensor. `columns` has T entries; it is null if each sequence is contiguous.
struct Places {
  const int32_t* cu_seqlens;
  const int32_t* columns;
  int64_t B, L, T;
  bool left;
  __device__ int64_t shift(int64_t length) const { return left ? L - length : 0; }
};

struct UnpadSource {
  Places places;
  __device__ int64_t operator()(int64_t t) const {
    const auto& [cu_seqlens, columns, B, L, T, left] = places;
    const int64_t b = covering_sequence(cu_seqlens, B, t);
    if (b < 0) return -1;
    const int64_t start = cu_seqlens[b], length = cu_seqlens[b + 1] - start;
    const int64_t column = columns != nullptr ? columns[t] : t - start + places.shift(length);
    return column >= 0 && column < L ? b * L + column : -1;
  }
};

struct PadSource {
  Places places;
  __device__ int64_t operator()(int64_t row) const {
    const auto& [cu_seqlens, columns, B, L, T, left] = places;
    const int64_t b = row / L, column = row % L;
    const int64_t start = max(static_cast<int64_t>(cu_seqlens[b]), int64_t{0});
    const int64_t end = min(static_cast<int64_t>(cu_seqlens[b + 1]), T);
    if (columns == nullptr) {
      const int64_t place = column - places.shift(cu_seqlens[b + 1] - start);
      return place >= 0 && place < end - start ? start + place : -1;
    }
    int64_t low = start, high = end;  // tokens before low have smaller columns, tokens from high on do not
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      columns[middle] < column ? low = middle + 1 : high = middle;
    }
    return low < end && columns[low] == column ? low : -1;
  }
};

struct ExpandSource {
  const int32_t* cu_seqlens;
  int64_t B;
  __device__ int64_t operator()(int64_t t) const { return covering_sequence(cu_seqlens, B, t); }
};

struct IndexSource {
  const int64_t* index;
  int64_t rows;
  __device__ int64_t operator()(int64_t m) const { return index[m] >= 0 && index[m] < rows ? index[m] : -1; }
};

// One tensor of a copy. A row of `out` is a copy of a row of `in`, or is filled with the pattern. 2^log2_lanes threads
// share a row.
struct Copy {
  const void* in;
  void* out;
  int64_t row_words;
  uint64_t pattern;
  int log2_word, log2_lanes;
};

struct CopyTable {
  Copy copy[kTableSize];
  int64_t first_block[kTableSize + 1];
  int count;
};

template <class Word>
__device__ Word repeated(uint64_t pattern) {
  if constexpr (sizeof(Word) == 16) {
    const auto low = static_cast<uint32_t>(pattern), high = static_cast<uint32_t>(pattern >> 32);
    return make_uint4(low, high, low, high);
  } else {
    return static_cast<Word>(pattern);
  }
}

template <class Word>
__device__ void copy_row(const Copy& copy, int64_t row, int64_t from, int lane, int lanes) {
  constexpr int kBatch = 4;  // words that a thread loads before it writes any, so that it waits once for four
  const int64_t words = copy.row_words;
  Word* destination = static_cast<Word*>(copy.out) + row * words;
  int64_t w = lane;
  if (from < 0) {
    for (; w < words; w += lanes) destination[w] = repeated<Word>(copy.pattern);
    return;
  }
  const Word* origin = static_cast<const Word*>(copy.in) + from * words;
  for (; w + (kBatch - 1) * lanes < words; w += kBatch * lanes) {
    Word batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) batch[k] = __ldg(origin + w + k * lanes);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) destination[w + k * lanes] = batch[k];
  }
  for (; w < words; w += lanes) destination[w] = __ldg(origin + w);
}

// A block takes kThreads / lanes rows of one tensor. The threads of a row run the same search on the same addresses, so
// a step of the search costs one broadcast read.
template <class Source>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ CopyTable table, int64_t rows, Source source) {
  for (int64_t block = blockIdx.x; block < table.first_block[table.count]; block += gridDim.x) {
    int i = 0;
    while (block >= table.first_block[i + 1]) ++i;
    const Copy& copy = table.copy[i];
    const int lanes = 1 << copy.log2_lanes, lane = threadIdx.x & (lanes - 1);
    const int64_t first_row = (block - table.first_block[i]) * (kThreads >> copy.log2_lanes);
    const int64_t row = first_row + (threadIdx.x >> copy.log2_lanes);
    if (row >= rows) continue;
    const int64_t from = source(row);
    switch (copy.log2_word) {
      case 4: copy_row<uint4>(copy, row, from, lane, lanes); break;
      case 3: copy_row<uint64_t>(copy, row, from, lane, lanes); break;
      case 2: copy_row<uint32_t>(copy, row, from, lane, lanes); break;
      case 1: copy_row<uint16_t>(copy, row, from, lane, lanes); break;
      default: copy_row<uint8_t>(copy, row, from, lane, lanes);
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------

Copy copy_of(const Tensor& in, const Tensor& out, int64_t row_bytes, uint64_t pattern) {
  const void* source = in.const_data_ptr();
  void* destination = out.mutable_data_ptr();
  const auto bits = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(destination) |
                    static_cast<uintptr_t>(row_bytes);
  const int log2_word = std::min(4, std::countr_zero(bits));
  const int64_t row_words = row_bytes >> log2_word;
  return {source, destination, row_words, pattern, log2_word, log2_lanes(row_words)};
}

// Each launch copies up to kTableSize tensors. All tensors have `rows` rows.
template <class Source>
void launch_copies(const std::vector<Copy>& copies, int64_t rows, const Source& source, const Launcher& launch) {
  for (size_t begin = 0; begin < copies.size(); begin += kTableSize) {
    CopyTable table{};
    for (size_t i = begin; i < std::min(copies.size(), begin + kTableSize); ++i) {
      if (rows == 0 || copies[i].row_words == 0) continue;
      const int64_t rows_per_block = kThreads >> copies[i].log2_lanes;
      table.copy[table.count] = copies[i];
      table.first_block[table.count + 1] =
          table.first_block[table.count] + (rows + rows_per_block - 1) / rows_per_block;
      ++table.count;
    }
    if (table.count == 0) continue;
    launch(copy_rows<Source>, blocks_for(table.first_block[table.count], 1), kThreads, table, rows, source);
  }
}

// ---- binding ---------------------------------------------------------------------------------------------------

const int32_t* columns_of(const std::optional<Tensor>& columns) {
  return columns ? static_cast<const int32_t*>(columns->const_data_ptr()) : nullptr;
}

std::vector<Tensor> unpad(const std::vector<Tensor>& padded, const Tensor& cu_seqlens,
                          const std::optional<Tensor>& columns, int64_t num_tokens, bool left) {
  if (padded.empty()) return {};
  const Launcher launch(cu_seqlens);
  const int64_t B = padded[0].size(0), L = padded[0].size(1);
  STD_TORCH_CHECK(B == cu_seqlens.size(0) - 1 && (!columns || columns->size(0) >= num_tokens),
                  "cu_seqlens and columns must describe the rows of the padded tensors");
  std::vector<Tensor> inputs, outputs;
  std::vector<Copy> copies;
  for (const Tensor& tensor : padded) {
    STD_TORCH_CHECK(tensor.size(0) == B && tensor.size(1) == L, "padded tensors must share B and L");
    inputs.push_back(torch::stable::contiguous(tensor));
    outputs.push_back(torch::stable::new_empty(tensor, with_trailing({num_tokens}, tensor, 2)));
    copies.push_back(copy_of(inputs.back(), outputs.back(), row_bytes(tensor, 2), 0));
  }
  const Places places{offsets(cu_seqlens), columns_of(columns), B, L, num_tokens, left};
  launch_copies(copies, num_tokens, UnpadSource{places}, launch);
  return outputs;
}

std::vector<Tensor> pad(const std::vector<Tensor>& packed, const Tensor& cu_seqlens,
                        const std::optional<Tensor>& columns, int64_t max_seqlen, bool left,
                        const std::vector<double>& values) {
  if (packed.empty()) return {};
  const Launcher launch(cu_seqlens);
  const int64_t B = cu_seqlens.size(0) - 1, T = packed[0].size(0);
  STD_TORCH_CHECK(values.size() == packed.size() && (!columns || columns->size(0) >= T),
                  "values and columns must describe the packed tensors");
  std::vector<Tensor> inputs, outputs;
  std::vector<Copy> copies;
  for (size_t i = 0; i < packed.size(); ++i) {
    STD_TORCH_CHECK(packed[i].size(0) == T, "packed tensors must share T");
    inputs.push_back(torch::stable::contiguous(packed[i]));
    outputs.push_back(torch::stable::new_empty(packed[i], with_trailing({B, max_seqlen}, packed[i], 1)));
    copies.push_back(
        copy_of(inputs[i], outputs[i], row_bytes(packed[i], 1), fill_pattern(values[i], packed[i].scalar_type())));
  }
  const Places places{offsets(cu_seqlens), columns_of(columns), B, max_seqlen, T, left};
  launch_copies(copies, B * max_seqlen, PadSource{places}, launch);
  return outputs;
}

Tensor segment_expand(const Tensor& values, const Tensor& cu_seqlens, int64_t num_tokens) {
  const Launcher launch(values);
  const Tensor input = torch::stable::contiguous(values);
  Tensor out = torch::stable::new_empty(input, with_trailing({num_tokens}, input, 1));
  const ExpandSource source{offsets(cu_seqlens), input.size(0)};
  launch_copies({copy_of(input, out, row_bytes(input, 1), 0)}, num_tokens, source, launch);
  return out;
}

Tensor take_rows(const Tensor& values, const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
  const Launcher launch(values);
  const Tensor input = torch::stable::contiguous(values);
  STD_TORCH_CHECK(input.size(0) == cu_uses.size(0) - 1 && order.size(0) == index.size(0),
                  "the row index must describe the rows of the values");
  const int64_t M = index.size(0);
  Tensor out = torch::stable::new_empty(input, with_trailing({M}, input, 1));
  const IndexSource source{static_cast<const int64_t*>(index.const_data_ptr()), input.size(0)};
  launch_copies({copy_of(input, out, row_bytes(input, 1), 0)}, M, source, launch);
  return out;
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
  m.impl("unpad", TORCH_BOX(&rlft::unpad));
  m.impl("pad", TORCH_BOX(&rlft::pad));
  m.impl("segment_expand", TORCH_BOX(&rlft::segment_expand));
  m.impl("take_rows", TORCH_BOX(&rlft::take_rows));
}
