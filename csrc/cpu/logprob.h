// The CPU side of linear_logprob: a tile of raw logits, and the passes over a tile. The passes are in logprob_rows.cpp.
// logprob.cpp binds the passes and runs GEMMs between them.
#pragma once

#include <cstdint>

#include "row_stats.h"

namespace rlft {

constexpr int64_t kNumStats = 3;  // numbers of a row that the loss needs: max, excess, sum_exp_shift
// The number of columns in a block. A block is summed first, and its sums are then merged into the sums of the row. A
// block takes 2 KiB, so it stays in L1 between two loops over it. A tile is a whole number of blocks, so the order of
// the additions does not depend on the sizes of the tiles.
constexpr int64_t kBlock = 496;

struct Transform {
  const float* bias;  // (C,) or null
  float softcap;      // 0: none
  float scale;
};

struct Tile {
  const float* logits;  // (R, C), row stride `stride`
  float* out;           // laid out as logits; may be the same memory
  int64_t rows, columns, stride;
  const int64_t* target;  // (R,), as vocabulary ids
  int64_t vocab_start;    // vocabulary id of column 0
  const float* inv_temperature;
  int64_t inv_temperature_stride;  // 0: one value for all rows
  Transform transform;
};

// Each pass runs over rows [begin, end) of a tile. The passes compute online statistics, gradients of the raw logits,
// and the weights and sums of the frozen head.
void stats_rows(const Tile& tile, const StatsOut& out, int64_t begin, int64_t end);
void grad_rows(const Tile& tile, const Upstream& upstream, int64_t begin, int64_t end);
void frozen_rows(const Tile& tile, const FrozenOut& out, int64_t begin, int64_t end);

// Merges the statistics of all blocks into the statistics of whole rows. `partial` is (blocks, kNumStats, rows). The
// blocks are merged in the order of stats_rows, so the result has the same bits.
void merge_blocks(const float* partial, int64_t blocks, int64_t rows, const StatsOut& out);

}  // namespace rlft
