// Packing on CUDA: padded (B, L, *) <-> packed (T, *), and tensors that are derived from cu_seqlens (B + 1) int32.
//
// Four of the operators only move rows. They differ in the source of a row. A row without a source (-1) is filled.
//
//   unpad           packed[t]    <- padded[b, column(t)]             b = the sequence of t
//   pad             padded[b, l] <- packed[t]                        the t of b with column(t) = l, if there is one
//   segment_expand  out[t]       <- values[b]
//   take_rows       out[m]       <- values[index[m]]
//
// column(t) is columns[t] if columns are given, else t - cu[b] + shift_b. shift_b is L - length_b if left, else 0.
// unpad and pad take any number of tensors of any dtypes and row sizes. The kernel's parameters hold the addresses of
// kTableSize tensors per launch. The other operators compute:
//
//   mask_columns        out[cu[b] + i] = column of the i-th true entry of mask[b], and -1 from cu[B] on
//   position_ids        out[t] = t - cu[b]
//   next_token_targets  out[t] = ids[t + 1], and ignore_index where t + 1 == cu[b + 1]
//   segment_sum         out[b] = sum_{t in b} values[t], fp32 (fp64 for fp64)
//   sum_rows            out[t] = sum_{m: index[m] = t} values[m], added in fp32 (fp64 for fp64)
//
// sum_rows gets the places m of each row from the host: order lists them by row, and cu_uses holds the boundaries. The
// backward of torch's embedding would sort the index again in every layer of a model.
//
// Bytes moved: every output row is written once, and each of its sources is read once. Operators with cu_seqlens read
// its B + 1 offsets, and add per row a binary search of log2(B) cached reads. Columns add 4 bytes per row of unpad, and
// a search of log2(length_b) cached reads per row of pad. take_rows and sum_rows read 8 bytes per place, and sum_rows 4
// bytes per row. mask_columns reads B L bytes and writes 4 T bytes.
//
// A row is copied in the widest word (1 to 16 bytes) that divides the row size and both addresses. The threads of a
// warp take consecutive words of a row, then consecutive rows, so that accesses to narrow rows coalesce, too.
//
// cu_seqlens, columns and row indices are not checked, because a check would sync with the host. They may hold any
// values: a row is filled if no sequence covers it or if its source lies outside of the input, and a sum skips such
// sources. Nothing is written outside of the output.
//
// Sums are deterministic: a thread adds its tokens or places in ascending order, and in segment_sum a fixed tree adds
// the threads. There are no atomics.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "cuda/dtypes.cuh"
#include "cuda/launch.cuh"
#include "packing.h"

namespace rlft {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTableSize = 32;  // tensors per launch; the table is 1.5 KB of the 4 KB that kernel parameters may take

// ---- kernels ---------------------------------------------------------------------------------------------------

// Returns the sequence of token t, or -1 if no sequence covers t.
__device__ int64_t covering_sequence(const int32_t* cu_seqlens, int64_t B, int64_t t) {
  if (B == 0 || t >= cu_seqlens[B]) return -1;
  return sequence_of(cu_seqlens, B, t);
}

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

// Returns the sum of `count` over the threads before this thread. `total` gets the sum over all threads.
__device__ int exclusive_scan(int count, int* total) {
  __shared__ int warp_total[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = count;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) warp_total[warp] = inclusive;
  __syncthreads();
  int before = inclusive - count;
  *total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_total[w];
    *total += warp_total[w];
  }
  return before;
}

constexpr int kMaskBytes = 16;  // per thread and tile

// Returns mask[0] to mask[count - 1] as bits, at most kMaskBytes. The bytes are read at once, except at the end of a
// row and in unaligned rows.
__device__ uint32_t mask_bits(const uint8_t* mask, int64_t count) {
  uint32_t bits = 0;
  if (count >= kMaskBytes && reinterpret_cast<uintptr_t>(mask) % kMaskBytes == 0) {
    const uint4 vector = *reinterpret_cast<const uint4*>(mask);
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int k = 0; k < kMaskBytes; ++k) bits |= ((words[k / 4] >> (8 * (k % 4)) & 0xff) != 0) << k;
  } else {
    for (int k = 0; k < min(count, int64_t{kMaskBytes}); ++k) bits |= (mask[k] != 0) << k;
  }
  return bits;
}

// One block takes one row of the mask, tile by tile. The columns of a tile are collected in shared memory, so that
// consecutive threads write them in order.
__global__ void __launch_bounds__(kThreads)
    mask_columns_kernel(const uint8_t* __restrict__ mask, const int32_t* __restrict__ cu_seqlens,
                        int32_t* __restrict__ columns, int64_t B, int64_t L, int64_t T) {
  constexpr int kTile = kThreads * kMaskBytes;
  __shared__ int32_t column[kTile];
  for (int64_t b = blockIdx.x; b < B; b += gridDim.x) {
    int64_t t = cu_seqlens[b];
    for (int64_t tile = 0; tile < L; tile += kTile) {
      const int64_t begin = tile + threadIdx.x * kMaskBytes;
      uint32_t bits = begin < L ? mask_bits(mask + b * L + begin, L - begin) : 0;
      int total;
      int place = exclusive_scan(__popc(bits), &total);
      for (; bits != 0; bits &= bits - 1) column[place++] = static_cast<int32_t>(begin) + __ffs(bits) - 1;
      __syncthreads();
      for (int64_t i = threadIdx.x; i < total; i += kThreads) {
        if (t + i >= 0 && t + i < T) columns[t + i] = column[i];
      }
      t += total;  // the scan of the next tile has a barrier before the next write to `column`
    }
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t end = max(static_cast<int64_t>(cu_seqlens[B]), int64_t{0});
  for (int64_t t = end + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < T; t += stride) columns[t] = -1;
}

__global__ void __launch_bounds__(kThreads)
    position_ids_kernel(const int32_t* __restrict__ cu_seqlens, int64_t* __restrict__ out, int64_t B, int64_t T) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < T; t += stride) {
    const int64_t b = covering_sequence(cu_seqlens, B, t);
    out[t] = b < 0 ? 0 : t - cu_seqlens[b];
  }
}

__global__ void __launch_bounds__(kThreads)
    next_token_targets_kernel(const int64_t* __restrict__ input_ids, const int32_t* __restrict__ cu_seqlens,
                              int64_t* __restrict__ out, int64_t B, int64_t T, int64_t ignore_index) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < T; t += stride) {
    const int64_t b = covering_sequence(cu_seqlens, B, t);
    const bool followed = b >= 0 && t + 1 < cu_seqlens[b + 1] && t + 1 < T;
    out[t] = followed ? input_ids[t + 1] : ignore_index;
  }
}

// One block takes blockDim.x columns of one sequence. Thread (x, y) adds tokens y, y + blockDim.y, ... of column x. A
// tree then adds the blockDim.y partial sums of a column. blockDim.x * blockDim.y == kThreads, and both are powers of
// two.
template <class Value, class Sum>
__global__ void __launch_bounds__(kThreads)
    segment_sum_kernel(const Value* __restrict__ values, const int32_t* __restrict__ cu_seqlens, Sum* __restrict__ out,
                       int64_t B, int64_t T, int64_t D) {
  __shared__ Sum partial[kThreads];
  const int64_t column_blocks = (D + blockDim.x - 1) / blockDim.x;
  const int slot = threadIdx.y * blockDim.x + threadIdx.x;
  for (int64_t task = blockIdx.x; task < B * column_blocks; task += gridDim.x) {
    const int64_t b = task / column_blocks, d = task % column_blocks * blockDim.x + threadIdx.x;
    const int64_t begin = max(static_cast<int64_t>(cu_seqlens[b]), int64_t{0});
    const int64_t end = min(static_cast<int64_t>(cu_seqlens[b + 1]), T);
    Sum sum = 0;
    if (d < D) {
      for (int64_t t = begin + threadIdx.y; t < end; t += blockDim.y) sum += static_cast<Sum>(values[t * D + d]);
    }
    partial[slot] = sum;
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half) partial[slot] += partial[slot + half * blockDim.x];
    }
    if (threadIdx.y == 0 && d < D) out[b * D + d] = partial[slot];
    __syncthreads();  // the next task overwrites partial
  }
}

template <class Value, int kElements>
struct alignas(kElements * sizeof(Value)) Vector {
  Value element[kElements];
};

constexpr int kSumResidentBlocks = 4;  // without this bound, ptxas aims at eight blocks and spills registers

// 2^log2_lanes threads share an output row. Each adds the uses of its vectors in ascending order.
template <class Value, class Sum, int kElements>
__global__ void __launch_bounds__(kThreads, kSumResidentBlocks)
    sum_rows_kernel(const Vector<Value, kElements>* __restrict__ values, const int64_t* __restrict__ order,
                    const int32_t* __restrict__ cu_uses, Vector<Value, kElements>* __restrict__ out, int64_t T,
                    int64_t M, int64_t vectors, int log2_lanes) {
  const int64_t rows_per_block = kThreads >> log2_lanes, lanes = int64_t{1} << log2_lanes;
  const int64_t lane = threadIdx.x & (lanes - 1);
  const int64_t first = blockIdx.x * rows_per_block + (threadIdx.x >> log2_lanes);
  for (int64_t t = first; t < T; t += gridDim.x * rows_per_block) {
    const int64_t begin = max(static_cast<int64_t>(cu_uses[t]), int64_t{0});
    const int64_t end = min(static_cast<int64_t>(cu_uses[t + 1]), M);
    for (int64_t v = lane; v < vectors; v += lanes) {
      Sum sum[kElements] = {};
#pragma unroll 4
      for (int64_t u = begin; u < end; ++u) {
        const int64_t m = order[u];
        if (m < 0 || m >= M) continue;
        const Vector<Value, kElements> value = values[m * vectors + v];
#pragma unroll
        for (int k = 0; k < kElements; ++k) sum[k] += static_cast<Sum>(value.element[k]);
      }
      Vector<Value, kElements> total;
#pragma unroll
      for (int k = 0; k < kElements; ++k) total.element[k] = static_cast<Value>(sum[k]);
      out[t * vectors + v] = total;
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------

// log2 of the number of threads that share a row of `width` words or columns: as many as the row needs, at most a warp.
int log2_lanes(int64_t width) { return std::min<int>(5, std::bit_width(static_cast<uint64_t>(width - 1))); }

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

template <class Value, class Sum>
void launch_segment_sum(const void* values, const int32_t* cu_seqlens, void* out, int64_t B, int64_t T, int64_t D,
                        const Launcher& launch) {
  if (B == 0 || D == 0) return;
  const unsigned x = 1u << log2_lanes(D);
  const dim3 block(x, kThreads / x);
  launch(segment_sum_kernel<Value, Sum>, blocks_for(B * ((D + x - 1) / x), 1), block, static_cast<const Value*>(values),
         cu_seqlens, static_cast<Sum*>(out), B, T, D);
}

// Rows are read in vectors of 16 bytes where their size and both addresses allow it.
template <class Value, class Sum>
void launch_sum_rows(const void* values, const int64_t* order, const int32_t* cu_uses, void* out, int64_t T, int64_t M,
                     int64_t D, const Launcher& launch) {
  const auto start = [&]<int kElements>(std::integral_constant<int, kElements>) {
    using Elements = Vector<Value, kElements>;
    const int64_t vectors = D / kElements;
    const int lanes = std::min<int>(8, std::bit_width(static_cast<uint64_t>(vectors - 1)));
    launch(sum_rows_kernel<Value, Sum, kElements>, blocks_for(T, kThreads >> lanes), kThreads,
           static_cast<const Elements*>(values), order, cu_uses, static_cast<Elements*>(out), T, M, vectors, lanes);
  };
  const auto bits = reinterpret_cast<uintptr_t>(values) | reinterpret_cast<uintptr_t>(out) | D * sizeof(Value);
  if (bits % 16 == 0) {
    start(std::integral_constant<int, 16 / sizeof(Value)>());
  } else {
    start(std::integral_constant<int, 1>());
  }
}

// ---- binding ---------------------------------------------------------------------------------------------------

const int32_t* offsets(const Tensor& cu_seqlens) { return static_cast<const int32_t*>(cu_seqlens.const_data_ptr()); }

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

Tensor mask_columns(const Tensor& mask, const Tensor& cu_seqlens, int64_t num_tokens) {
  const Launcher launch(mask);
  const Tensor input = torch::stable::contiguous(mask);
  const int64_t B = input.size(0), L = input.size(1);
  STD_TORCH_CHECK(B == cu_seqlens.size(0) - 1, "the mask and cu_seqlens must describe the same sequences");
  Tensor columns = torch::stable::new_empty(input, {num_tokens}, ScalarType::Int);
  if (num_tokens == 0) return columns;
  launch(mask_columns_kernel, blocks_for(B, 1), kThreads, static_cast<const uint8_t*>(input.const_data_ptr()),
         offsets(cu_seqlens), static_cast<int32_t*>(columns.mutable_data_ptr()), B, L, num_tokens);
  return columns;
}

Tensor position_ids(const Tensor& cu_seqlens, int64_t num_tokens) {
  const Launcher launch(cu_seqlens);
  Tensor out = torch::stable::new_empty(cu_seqlens, {num_tokens}, ScalarType::Long);
  if (num_tokens == 0) return out;
  launch(position_ids_kernel, blocks_for(num_tokens, kThreads), kThreads, offsets(cu_seqlens),
         static_cast<int64_t*>(out.mutable_data_ptr()), cu_seqlens.size(0) - 1, num_tokens);
  return out;
}

Tensor next_token_targets(const Tensor& input_ids, const Tensor& cu_seqlens, int64_t ignore_index) {
  const Launcher launch(input_ids);
  const Tensor input = torch::stable::contiguous(input_ids);
  const int64_t T = input.size(0);
  Tensor out = torch::stable::new_empty(input, {T});
  if (T == 0) return out;
  launch(next_token_targets_kernel, blocks_for(T, kThreads), kThreads,
         static_cast<const int64_t*>(input.const_data_ptr()), offsets(cu_seqlens),
         static_cast<int64_t*>(out.mutable_data_ptr()), cu_seqlens.size(0) - 1, T, ignore_index);
  return out;
}

Tensor segment_sum(const Tensor& values, const Tensor& cu_seqlens) {
  const Launcher launch(values);
  const Tensor input = torch::stable::contiguous(values);
  const ScalarType dtype = input.scalar_type();
  const int64_t B = cu_seqlens.size(0) - 1, T = input.size(0);
  const int64_t D = row_bytes(input, 1) / static_cast<int64_t>(input.element_size());
  Tensor out = torch::stable::new_empty(input, with_trailing({B}, input, 1),
                                        dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  const void* in = input.const_data_ptr();
  void* sums = out.mutable_data_ptr();
  switch (dtype) {
    case ScalarType::Double: launch_segment_sum<double, double>(in, offsets(cu_seqlens), sums, B, T, D, launch); break;
    case ScalarType::Float: launch_segment_sum<float, float>(in, offsets(cu_seqlens), sums, B, T, D, launch); break;
    case ScalarType::Half: launch_segment_sum<__half, float>(in, offsets(cu_seqlens), sums, B, T, D, launch); break;
    case ScalarType::BFloat16:
      launch_segment_sum<__nv_bfloat16, float>(in, offsets(cu_seqlens), sums, B, T, D, launch);
      break;
    default: STD_TORCH_CHECK(false, "segment_sum: unsupported dtype ", toString(dtype));
  }
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

Tensor sum_rows(const Tensor& values, const Tensor& index, const Tensor& order, const Tensor& cu_uses) {
  const Launcher launch(values);
  const Tensor input = torch::stable::contiguous(values);
  const int64_t M = index.size(0), T = cu_uses.size(0) - 1;
  STD_TORCH_CHECK(input.size(0) == M && order.size(0) == M, "the row index must describe the rows of the values");
  const int64_t D = row_bytes(input, 1) / static_cast<int64_t>(input.element_size());
  Tensor out = torch::stable::new_empty(input, with_trailing({T}, input, 1));
  if (T == 0 || D == 0) return out;
  dispatch(input.scalar_type(), [&]<class Value>(Value*) {
    using Sum = std::conditional_t<std::is_same_v<Value, double>, double, float>;
    launch_sum_rows<Value, Sum>(input.const_data_ptr(), static_cast<const int64_t*>(order.const_data_ptr()),
                                offsets(cu_uses), out.mutable_data_ptr(), T, M, D, launch);
  });
  return out;
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) {
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
