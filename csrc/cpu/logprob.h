// What the CPU side of linear_logprob consists of: a tile of raw logits, what a pass over it reads and writes, and the
// passes (logprob_rows.cpp), which logprob.cpp binds and puts between GEMMs.
#pragma once

#include <cstdint>

#include "row_stats.h"

namespace rlft {

constexpr int64_t kNumStats = 4;  // numbers in a RowStats
// Columns that are summed up for themselves before they join a row's sums: 2 KiB, still in L1 from one loop over them to
// the next. Tiles are whole blocks, so that all ways through the vocabulary add in one order.
constexpr int64_t kBlock = 496;

struct Transform {
  const float* bias;  // (C,) or null
  float softcap;      // 0: none
  float scale;
};

struct Tile {
  const float* logits;  // (R, C), row stride `stride`
  float* out;           // as logits, and may be the same memory
  int64_t rows, columns, stride;
  const int64_t* target;  // (R,), as vocabulary ids
  int64_t vocab_start;    // vocabulary id of column 0
  const float* inv_temperature;
  int64_t inv_temperature_stride;  // 0: one value for all rows
  Transform transform;
};

// Over rows [begin, end) of a tile: online statistics, gradients of the raw logits, and what the frozen head needs.
void stats_rows(const Tile& tile, const StatsOut& out, int64_t begin, int64_t end);
void grad_rows(const Tile& tile, const Upstream& upstream, int64_t begin, int64_t end);
void frozen_rows(const Tile& tile, const FrozenOut& out, int64_t begin, int64_t end);

// Statistics of whole rows from kNumStats numbers of each block, in the order in which stats_rows meets them: the same
// bits.
void merge_blocks(const float* partial, int64_t blocks, int64_t rows, const StatsOut& out);

}  // namespace rlft
