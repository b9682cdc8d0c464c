// This file binds linear_logprob on the CPU. The passes and their equations are in logprob_rows.cpp. The chunk
// operators here run the passes together with their GEMMs, over chunks of whole rows.
#include "logprob.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "checks.h"
#include "memory.h"
#include "rounded_gemm.h"
#include "stable.h"

namespace rlft {
namespace {

// ---- binding -------------------------------------------------------------------------------------------------------

const float* float_or_null(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<const float*>(t->const_data_ptr()) : nullptr;
}

float* mutable_float(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

float* mutable_float_or_null(const std::optional<Tensor>& t) { return t.has_value() ? mutable_float(*t) : nullptr; }

double* mutable_double_or_null(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<double*>(t->mutable_data_ptr()) : nullptr;
}

Upstream make_upstream(int64_t rows, const Tensor& max, const Tensor& log_sum, const std::optional<Tensor>& entropy,
                       const Tensor& grad_logprob, const std::optional<Tensor>& grad_entropy) {
  check_upstream(rows, max, log_sum, entropy, grad_logprob, grad_entropy);
  return {static_cast<const float*>(max.const_data_ptr()), static_cast<const float*>(log_sum.const_data_ptr()),
          float_or_null(entropy), static_cast<const float*>(grad_logprob.const_data_ptr()),
          float_or_null(grad_entropy)};
}

// Returns the tile of a chunk's logits that holds `columns` vocabulary ids from `start` on. The tiles of a chunk are
// stored one after the other, each without gaps between its rows.
Tile chunk_tile(const Tile& whole, int64_t start, int64_t columns) {
  Tile tile = whole;
  tile.logits += whole.rows * start;
  tile.out += whole.rows * start;
  tile.columns = tile.stride = columns;
  tile.vocab_start = start;
  if (tile.transform.bias != nullptr) tile.transform.bias += start;
  return tile;
}

std::vector<Tile> blocks_of(const Tile& tile) {
  std::vector<Tile> blocks;
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    Tile block = tile;
    block.logits += begin;
    block.columns = std::min(kBlock, tile.columns - begin);
    block.vocab_start += begin;
    if (block.transform.bias != nullptr) block.transform.bias += begin;
    blocks.push_back(block);
  }
  return blocks;
}

Tile make_tile(const Tensor& logits, int64_t rows, int64_t columns, int64_t stride, const Tensor& target,
               int64_t vocab_start, const std::optional<Tensor>& bias, const Tensor& inv_temperature, double softcap,
               double scale) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float, "logits must be float32");
  return {
      .logits = static_cast<const float*>(logits.const_data_ptr()),
      .out = static_cast<float*>(logits.mutable_data_ptr()),
      .rows = rows,
      .columns = columns,
      .stride = stride,
      .target = static_cast<const int64_t*>(target.const_data_ptr()),
      .vocab_start = vocab_start,
      .inv_temperature = static_cast<const float*>(inv_temperature.const_data_ptr()),
      .inv_temperature_stride = inv_temperature.size(0) == 1 ? 0 : 1,
      .transform = {float_or_null(bias), static_cast<float>(softcap), static_cast<float>(scale)},
  };
}

// `out` receives results of the tile's shape. It may be the memory of the logits.
Tile make_tile(const Tensor& logits, const Tensor& target, int64_t vocab_start, const std::optional<Tensor>& bias,
               const Tensor& inv_temperature, double softcap, double scale, const Tensor& out) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be a (rows, columns) tile");
  check_matrix("logits", logits, logits.size(0), logits.size(1));
  check_matrix("results", out, logits.size(0), logits.size(1));
  check_problem(logits.size(0), logits.size(1), target, bias, inv_temperature);
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.stride(0) == logits.stride(0),
                  "results of the tile must be float32 and lie as the logits do");
  Tile tile = make_tile(logits, logits.size(0), logits.size(1), logits.stride(0), target, vocab_start, bias,
                        inv_temperature, softcap, scale);
  tile.out = mutable_float(out);
  return tile;
}

void logprob_stats_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                    Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor excess,
                    std::optional<Tensor> sum_exp_shift, std::optional<Tensor> sum_exp_squared, Tensor target_logit,
                    std::optional<Tensor> sum_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale, logits);
  check_stats(tile.rows, max, excess, sum_exp_shift, sum_exp_squared, target_logit, sum_logits);
  const StatsOut out{mutable_float(max),
                     mutable_float(excess),
                     mutable_float_or_null(sum_exp_shift),
                     mutable_float_or_null(sum_exp_squared),
                     mutable_float(target_logit),
                     mutable_double_or_null(sum_logits)};
  torch::stable::parallel_for(0, tile.rows, 1, [&](int64_t begin, int64_t end) { stats_rows(tile, out, begin, end); });
}

void logprob_frozen_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                     Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor excess,
                     Tensor target_logit, Tensor sum_others, Tensor target_slope, Tensor accumulator,
                     Tensor exp_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale, exp_logits);
  check_stats(tile.rows, max, excess, std::nullopt, std::nullopt, target_logit, std::nullopt);
  check_frozen(tile.rows, sum_others, target_slope, accumulator);
  const FrozenOut out{
      .stats = {mutable_float(max), mutable_float(excess), nullptr, nullptr, mutable_float(target_logit)},
      .sum_others = mutable_float(sum_others),
      .target_slope = mutable_float(target_slope),
      .accumulator = mutable_float(accumulator),
      .dim = accumulator.size(1)};
  torch::stable::parallel_for(0, tile.rows, 1, [&](int64_t begin, int64_t end) { frozen_rows(tile, out, begin, end); });
}

void logprob_grad_(Tensor logits, Tensor target, int64_t vocab_start, std::optional<Tensor> bias,
                   Tensor inv_temperature, double softcap, double scale, Tensor max, Tensor log_sum,
                   std::optional<Tensor> entropy, Tensor grad_logprob, std::optional<Tensor> grad_entropy,
                   Tensor grad_logits) {
  const Tile tile = make_tile(logits, target, vocab_start, bias, inv_temperature, softcap, scale, grad_logits);
  const Upstream upstream = make_upstream(tile.rows, max, log_sum, entropy, grad_logprob, grad_entropy);
  torch::stable::parallel_for(0, tile.rows, 1,
                              [&](int64_t begin, int64_t end) { grad_rows(tile, upstream, begin, end); });
}

// ---- chunks --------------------------------------------------------------------------------------------------------
//
// A chunk holds the logits of its rows over the whole vocabulary, so it has only some hundreds of rows. If all threads
// shared a GEMM with so few rows, each thread would pack the tile of the weight, and packing would take a tenth of the
// time. Here one thread does all work of a tile, its GEMMs included. Inside a parallel region the vendor's GEMM runs on
// one thread.

// out (+)= a @ b. The call goes below autograd, because autograd is switched on in the threads of a parallel region.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate, bool rounds) {
  if (rounds) return multiply_rounded(out, a, b, accumulate);
  TORCH_ERROR_CODE_CHECK(accumulate ? aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1, 1)
                                    : aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

struct Chunk {
  Tensor hidden, weight, logits;           // (R, D) and (V, D) float32 or narrower, (R * V,) float32
  std::optional<Tensor> adapter;           // (V, E) the last columns: the weight is then (V, D - E)
  std::optional<ScalarType> weight_dtype;  // to which the weight is rounded before it is multiplied
  bool rounds;                             // whether the GEMM rounds its operands to bfloat16
  int64_t tile_columns;
  Tile whole;

  int64_t num_tiles() const { return (weight.size(0) + tile_columns - 1) / tile_columns; }
  int64_t start(int64_t index) const { return index * tile_columns; }
  int64_t columns(int64_t index) const { return std::min(tile_columns, weight.size(0) - start(index)); }
  Tile tile(int64_t index) const { return chunk_tile(whole, start(index), columns(index)); }

  Tensor tile_logits(int64_t index) const {  // (R, columns)
    Tensor memory = logits;
    const Tensor flat = torch::stable::narrow(memory, 0, whole.rows * start(index), whole.rows * columns(index));
    return torch::stable::view(flat, {whole.rows, columns(index)});
  }
  Tensor tile_rows(Tensor matrix, int64_t index) const {  // (columns, D) of a (V, D) matrix
    return torch::stable::narrow(matrix, 0, start(index), columns(index));
  }
  Tensor rounded_rows(const Tensor& matrix, int64_t index) const {
    const Tensor rows = tile_rows(matrix, index);
    return weight_dtype ? torch::stable::to(rows, *weight_dtype) : rows;
  }
  // (columns, D) as the GEMM takes it. An adapter is copied beside the weight tile by tile: the copy stays in the
  // thread's cache.
  Tensor tile_weight(int64_t index) const {
    if (!adapter) {
      const Tensor rounded = rounded_rows(weight, index);
      return rounds ? rounded : torch::stable::to(rounded, ScalarType::Float);
    }
    Tensor joined = torch::stable::new_empty(weight, {columns(index), hidden.size(1)}, ScalarType::Float);
    Tensor left = torch::stable::narrow(joined, 1, 0, weight.size(1));
    Tensor right = torch::stable::narrow(joined, 1, weight.size(1), adapter->size(1));
    torch::stable::copy_(left, rounded_rows(weight, index));
    torch::stable::copy_(right, rounded_rows(*adapter, index));
    return joined;
  }
};

Chunk make_chunk(const Tensor& hidden, const Tensor& weight, const Tensor& logits, int64_t tile_columns,
                 const Tensor& target, const std::optional<Tensor>& bias, const Tensor& inv_temperature, double softcap,
                 double scale, const std::optional<ScalarType>& weight_dtype, const std::optional<Tensor>& adapter,
                 bool rounds) {
  STD_TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.scalar_type() == ScalarType::Float,
                  "hidden must be a float32 matrix, and weight a matrix");
  STD_TORCH_CHECK(!adapter || (adapter->dim() == 2 && adapter->size(0) == weight.size(0)),
                  "adapter must be a matrix of as many rows as weight");
  STD_TORCH_CHECK(hidden.size(1) == weight.size(1) + (adapter ? adapter->size(1) : 0),
                  "hidden must have the columns of weight and adapter");
  const int64_t rows = hidden.size(0);
  check_problem(rows, weight.size(0), target, bias, inv_temperature);
  STD_TORCH_CHECK(logits.dim() == 1 && logits.is_contiguous() && logits.numel() >= rows * weight.size(0),
                  "logits must have room for rows x vocabulary");
  STD_TORCH_CHECK(tile_columns > 0 && tile_columns % kBlock == 0, "tiles must be multiples of ", kBlock,
                  " columns, got ", tile_columns);
  return {
      .hidden = hidden,
      .weight = weight,
      .logits = logits,
      .adapter = adapter,
      .weight_dtype = weight_dtype,
      .rounds = rounds,
      .tile_columns = tile_columns,
      .whole = make_tile(logits, rows, 0, 0, target, 0, bias, inv_temperature, softcap, scale),
  };
}

void logprob_chunk_stats_(Tensor hidden, Tensor weight, Tensor logits, int64_t tile_columns, Tensor target,
                          std::optional<Tensor> bias, Tensor inv_temperature, double softcap, double scale, Tensor max,
                          Tensor excess, std::optional<Tensor> sum_exp_shift, Tensor target_logit,
                          std::optional<ScalarType> weight_dtype, std::optional<Tensor> adapter, bool rounds) {
  const Chunk chunk = make_chunk(hidden, weight, logits, tile_columns, target, bias, inv_temperature, softcap, scale,
                                 weight_dtype, adapter, rounds);
  const int64_t rows = chunk.whole.rows, tiles = chunk.num_tiles();
  check_stats(rows, max, excess, sum_exp_shift, std::nullopt, target_logit, std::nullopt);
  const int64_t blocks = (weight.size(0) + kBlock - 1) / kBlock;
  std::vector<float> partial(kNumStats * blocks * rows, 0.0f);  // (blocks, kNumStats, rows)
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      multiply(chunk.tile_logits(i), chunk.hidden, torch::stable::transpose(chunk.tile_weight(i), 0, 1), false, rounds);
      for (const Tile& block : blocks_of(chunk.tile(i))) {
        float* own = partial.data() + kNumStats * (block.vocab_start / kBlock) * rows;
        std::fill_n(own, rows, kMinusInf);
        std::fill_n(own + rows, rows, Sums().excess);
        const StatsOut out{own, own + rows, sum_exp_shift ? own + 2 * rows : nullptr, nullptr,
                           mutable_float(target_logit)};
        stats_rows(block, out, 0, rows);
      }
    }
  });
  merge_blocks(partial.data(), blocks, rows,
               {mutable_float(max), mutable_float(excess), mutable_float_or_null(sum_exp_shift), nullptr, nullptr});
}

// The sums are in double. In float, one rounding per row would give the bias gradient several times the error of a tree
// of additions.
void add_column_sums(const Tile& tile, float* out, bool accumulate) {
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, tile.columns - begin);
    double sum[kBlock] = {};
    if (accumulate) std::copy_n(out + begin, count, sum);
    for (int64_t r = 0; r < tile.rows; ++r)
      for (int64_t j = 0; j < count; ++j) sum[j] += tile.out[r * tile.stride + begin + j];
    for (int64_t j = 0; j < count; ++j) out[begin + j] = static_cast<float>(sum[j]);
  }
}

void logprob_chunk_grad_(Tensor hidden, Tensor weight, Tensor logits, int64_t tile_columns, Tensor target,
                         std::optional<Tensor> bias, Tensor inv_temperature, double softcap, double scale, Tensor max,
                         Tensor log_sum, std::optional<Tensor> entropy, Tensor grad_logprob,
                         std::optional<Tensor> grad_entropy, std::optional<Tensor> grad_hidden,
                         std::optional<Tensor> grad_weight, std::optional<Tensor> grad_bias, bool accumulate,
                         std::optional<ScalarType> weight_dtype, std::optional<Tensor> adapter, bool rounds) {
  const Chunk chunk = make_chunk(hidden, weight, logits, tile_columns, target, bias, inv_temperature, softcap, scale,
                                 weight_dtype, adapter, rounds);
  const Upstream upstream = make_upstream(chunk.whole.rows, max, log_sum, entropy, grad_logprob, grad_entropy);
  if (grad_hidden) check_contiguous("grad_hidden", *grad_hidden, hidden.size(0), hidden.size(1));
  Tensor trained = hidden;  // the columns that multiply the trained ones of the weight, its last: all, or an adapter's
  if (grad_weight) {
    STD_TORCH_CHECK(grad_weight->dim() == 2 && grad_weight->size(1) >= 1 && grad_weight->size(1) <= hidden.size(1),
                    "grad_weight must be a matrix of 1 to ", hidden.size(1), " columns");
    const int64_t columns = grad_weight->size(1);
    check_contiguous("grad_weight", *grad_weight, weight.size(0), columns);
    trained = torch::stable::narrow(trained, 1, hidden.size(1) - columns, columns);
  }
  check_vector("grad_bias", grad_bias, weight.size(0));
  const int64_t tiles = chunk.num_tiles();
  const int64_t parts = std::min<int64_t>(torch::stable::get_num_threads(), tiles);
  Tensor part_hidden = torch::stable::new_zeros(hidden, {grad_hidden ? parts : 0, hidden.size(0), hidden.size(1)});
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      for (int64_t i = part * tiles / parts; i < (part + 1) * tiles / parts; ++i) {
        const Tile tile = chunk.tile(i);
        const Tensor z = chunk.tile_logits(i);
        grad_rows(tile, upstream, 0, tile.rows);
        if (grad_hidden) multiply(torch::stable::select(part_hidden, 0, part), z, chunk.tile_weight(i), true, rounds);
        if (grad_weight) {
          multiply(chunk.tile_rows(*grad_weight, i), torch::stable::transpose(z, 0, 1), trained, accumulate, rounds);
        }
        if (grad_bias) add_column_sums(tile, mutable_float(*grad_bias) + chunk.start(i), accumulate);
      }
    }
  });
  if (!grad_hidden) return;
  float* out = mutable_float(*grad_hidden);
  const float* in = static_cast<const float*>(part_hidden.const_data_ptr());
  const int64_t size = hidden.numel();
  std::copy_n(in, size, out);
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) out[i] += in[part * size + i];
}

void use_huge_pages_(Tensor x) { with_huge_pages(x); }

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CPU, m) {
  m.impl("logprob_stats_", TORCH_BOX(&rlft::logprob_stats_));
  m.impl("logprob_grad_", TORCH_BOX(&rlft::logprob_grad_));
  m.impl("logprob_frozen_", TORCH_BOX(&rlft::logprob_frozen_));
  m.impl("logprob_chunk_stats_", TORCH_BOX(&rlft::logprob_chunk_stats_));
  m.impl("logprob_chunk_grad_", TORCH_BOX(&rlft::logprob_chunk_grad_));
  m.impl("use_huge_pages_", TORCH_BOX(&rlft::use_huge_pages_));
}
