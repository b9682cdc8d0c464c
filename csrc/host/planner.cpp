// Micro-batch planning decides which rank computes which sequences in which micro-batch.
//
// The ranks of a data-parallel step wait for each other at every micro-batch, because FSDP gathers weights there. The
// time of a step is therefore
//
//     sum over step indices s of  max over ranks r of  cost(micro-batch r, s),    cost = sum of a*L + b*L*L,
//
// The plan makes this time small. Every rank has the same number of micro-batches, and no micro-batch has more tokens
// than a hard cap. The plan is made in four phases; a bin is a future micro-batch.
//
//   1. pack_tightly    Best-fit decreasing sets the number of bins. It uses at most 11/9 of the fewest possible bins,
//                      plus one (Johnson 1973). The number is then rounded up to a multiple of the number of ranks.
//   2. pack_evenly     The sequences are dealt again into the same number of bins: longest first, each to the cheapest
//                      bin with room (Graham's LPT rule under a cap). If a sequence fits into no bin, the tight packing
//                      is kept.
//   3. balance_row     The bins are sorted by cost and cut into rows of world_size bins. A row is one step index.
//                      Within a row, sequences of the costliest bin move to cheaper bins or are exchanged with theirs.
//   4. assign_ranks    The rows are merged by balanced largest differencing (Karmarkar & Karp 1982; Michiels et al.
//                      2003). Every rank gets one bin of each row, such that the total costs of the ranks are close.
//
// The time is O(n log n) for n sequences. The plan is a pure function of the arguments, and ties go to the lower index,
// so each rank can compute the plan by itself.
//
// In this file sequences are numbered by falling length and are called items. The rising items of a bin therefore have
// falling lengths.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <queue>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// A row counts as balanced if its costliest bin is at most this share above the mean. No timing can show so little.
constexpr double kTolerance = 1e-4;
// The most exchanges per bin of a row. After LPT two or three are needed. The limit bounds the time of adversarial
// rows.
constexpr size_t kMaxExchangesPerBin = 8;

struct Items {
  std::vector<int64_t> length{};  // falling
  std::vector<double> cost{};     // rises with length, so falling too
  int64_t max_tokens;

  int32_t size() const { return static_cast<int32_t>(length.size()); }
};

struct Bin {
  int64_t room = 0;
  double cost = 0;
  std::vector<int32_t> items{};  // rising

  void append(const Items& all, int32_t item) {
    items.push_back(item);
    room -= all.length[item];
    cost += all.cost[item];
  }
  void insert(const Items& all, int32_t item) {
    items.insert(std::ranges::lower_bound(items, item), item);
    room -= all.length[item];
    cost += all.cost[item];
  }
  void remove(const Items& all, int32_t item) {
    items.erase(std::ranges::lower_bound(items, item));
    room += all.length[item];
    cost -= all.cost[item];
  }
};

std::vector<Bin> pack_tightly(const Items& all) {
  std::vector<Bin> bins;
  std::set<std::pair<int64_t, int32_t>> open;  // (room, bin)
  for (int32_t item = 0; item < all.size(); ++item) {
    auto fit = open.lower_bound({all.length[item], 0});
    const auto bin = fit == open.end() ? static_cast<int32_t>(bins.size()) : fit->second;
    if (fit == open.end()) {
      bins.push_back({.room = all.max_tokens});
    } else {
      open.erase(fit);
    }
    bins[bin].append(all, item);
    if (bins[bin].room > 0) open.insert({bins[bin].room, bin});
  }
  return bins;
}

std::optional<std::vector<Bin>> pack_evenly(const Items& all, int32_t num_bins) {
  std::vector<Bin> bins(num_bins, {.room = all.max_tokens});
  using Cheapest = std::pair<double, int32_t>;
  std::priority_queue<Cheapest, std::vector<Cheapest>, std::greater<>> open;  // (cost, bin)
  for (int32_t bin = 0; bin < num_bins; ++bin) open.push({0.0, bin});
  // A bin without room for this item waits here until an item is short enough. Lengths only fall, so a bin returns at
  // most once per item that it takes, and the time stays O(n log n).
  std::priority_queue<std::pair<int64_t, int32_t>> waiting;  // (room, bin)
  for (int32_t item = 0; item < all.size(); ++item) {
    for (; !waiting.empty() && waiting.top().first >= all.length[item]; waiting.pop()) {
      open.push({bins[waiting.top().second].cost, waiting.top().second});
    }
    for (; !open.empty() && bins[open.top().second].room < all.length[item]; open.pop()) {
      waiting.push({bins[open.top().second].room, open.top().second});
    }
    if (open.empty()) return std::nullopt;
    const int32_t bin = open.top().second;
    open.pop();
    bins[bin].append(all, item);
    open.push({bins[bin].cost, bin});
  }
  return bins;
}

// Moves one item from `heavy` to `light`, or exchanges it for a shorter item of `light`, such that the costs of the two
// bins come as close as possible. Returns false if no such move lowers the larger cost by more than `least`.
bool exchange(const Items& all, Bin& heavy, Bin& light, double least) {
  constexpr int32_t kNothing = -1;
  const double half_gap = (heavy.cost - light.cost) / 2;
  double best = half_gap - least;  // distance of the transferred cost from half the gap, which is the ideal
  std::pair<int32_t, int32_t> choice{kNothing, kNothing};
  auto consider = [&](int32_t give, int32_t take, double transferred) {
    if (const double distance = std::abs(transferred - half_gap); distance < best) {
      best = distance;
      choice = {give, take};
    }
  };
  for (size_t i = 0; i < heavy.items.size(); ++i) {
    const int32_t give = heavy.items[i];
    if (i > 0 && all.length[heavy.items[i - 1]] == all.length[give]) continue;
    const int64_t shortest = all.length[give] - light.room;  // the least length that `light` must return
    const double ideal = all.cost[give] - half_gap;
    const auto next = std::ranges::partition_point(
        light.items, [&](int32_t take) { return all.cost[take] >= ideal && all.length[take] >= shortest; });
    if (next != light.items.begin()) consider(give, next[-1], all.cost[give] - all.cost[next[-1]]);
    if (next != light.items.end()) {
      if (all.length[*next] >= shortest) consider(give, *next, all.cost[give] - all.cost[*next]);
    } else if (shortest <= 0) {
      consider(give, kNothing, all.cost[give]);
    }
  }
  const auto [give, take] = choice;
  if (give == kNothing) return false;
  heavy.remove(all, give);
  light.insert(all, give);
  if (take != kNothing) {
    light.remove(all, take);
    heavy.insert(all, take);
  }
  return true;
}

void sort_by_cost(std::span<Bin> bins) {
  std::stable_sort(bins.begin(), bins.end(), [](const Bin& x, const Bin& y) { return x.cost > y.cost; });
}

void balance_row(const Items& all, std::span<Bin> row) {
  double total = 0;
  for (const Bin& bin : row) total += bin.cost;
  const double mean = total / row.size();
  for (size_t round = 0; round < kMaxExchangesPerBin * row.size(); ++round) {
    sort_by_cost(row);
    if (row.front().cost <= mean * (1 + kTolerance)) return;
    bool improved = false;
    for (size_t partner = row.size() - 1; partner > 0 && !improved; --partner) {
      improved = exchange(all, row.front(), row[partner], mean * kTolerance / 2);
    }
    if (!improved) return;
  }
}

// Balanced largest differencing. A partition holds one chain of bins per rank, the costliest chain first. The two
// partitions with the largest differences between their chains are merged: the costliest chain of one partition is
// joined to the cheapest chain of the other, and so on. This repeats until one partition is left.
// Returns the bin of each (rank, row), rank-major.
std::vector<int32_t> assign_ranks(const std::vector<Bin>& bins, int32_t world_size) {
  struct Chain {
    double cost;
    int32_t head, tail;
  };
  const auto num_rows = static_cast<int32_t>(bins.size()) / world_size;
  std::vector<int32_t> following(bins.size(), -1);
  std::vector<std::vector<Chain>> partitions(num_rows);
  std::priority_queue<std::pair<double, int32_t>> queue;  // (difference, -row): the lower row wins a tie
  auto enqueue = [&](int32_t row) { queue.push({partitions[row].front().cost - partitions[row].back().cost, -row}); };
  auto dequeue = [&] {
    const int32_t row = -queue.top().second;
    queue.pop();
    return row;
  };
  for (int32_t row = 0; row < num_rows; ++row) {
    for (int32_t bin = row * world_size; bin < (row + 1) * world_size; ++bin) {
      partitions[row].push_back({bins[bin].cost, bin, bin});
    }
    enqueue(row);
  }
  while (queue.size() > 1) {
    const int32_t kept = dequeue(), merged = dequeue();
    for (int32_t k = 0; k < world_size; ++k) {
      Chain& chain = partitions[kept][k];
      const Chain& appended = partitions[merged][world_size - 1 - k];
      following[chain.tail] = appended.head;
      chain = {chain.cost + appended.cost, chain.head, appended.tail};
    }
    std::ranges::stable_sort(partitions[kept], std::greater<>{}, &Chain::cost);
    enqueue(kept);
  }
  std::vector<int32_t> assigned(bins.size());
  const std::vector<Chain>& chains = partitions[dequeue()];
  for (int32_t rank = 0; rank < world_size; ++rank) {
    for (int32_t bin = chains[rank].head; bin >= 0; bin = following[bin]) {
      assigned[rank * num_rows + bin / world_size] = bin;
    }
  }
  return assigned;
}

std::vector<Bin> pack(const Items& all, int32_t world_size) {
  std::vector<Bin> tight = pack_tightly(all);
  const auto num_steps = std::max<int32_t>(1, (static_cast<int32_t>(tight.size()) + world_size - 1) / world_size);
  if (auto even = pack_evenly(all, num_steps * world_size)) return *std::move(even);
  tight.resize(num_steps * world_size, {.room = all.max_tokens});
  return tight;
}

using Plan = std::pair<std::vector<int64_t>, std::vector<int64_t>>;  // indices, offsets

Plan plan(std::span<const int64_t> lengths, int64_t max_tokens, int32_t world_size, double linear, double quadratic) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>{}, [&](int64_t index) { return lengths[index]; });
  Items all{.max_tokens = max_tokens};
  for (const int64_t index : order) {
    const auto length = static_cast<double>(lengths[index]);
    all.length.push_back(lengths[index]);
    all.cost.push_back(linear * length + quadratic * length * length);
  }

  std::vector<Bin> bins = pack(all, world_size);
  sort_by_cost(bins);
  for (size_t first = 0; first < bins.size(); first += world_size) {
    balance_row(all, std::span(bins).subspan(first, world_size));
  }

  Plan result{{}, {0}};
  auto& [indices, offsets] = result;
  for (const int32_t bin : assign_ranks(bins, world_size)) {
    for (const int32_t item : bins[bin].items) indices.push_back(order[item]);
    std::sort(indices.begin() + offsets.back(), indices.end());
    offsets.push_back(static_cast<int64_t>(indices.size()));
  }
  return result;
}

py::array_t<int64_t> to_numpy(const std::vector<int64_t>& values) {
  return py::array_t<int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Host-side planning of micro-batches; rlft_fast.data.plan_micro_batches checks its arguments.";
  m.def(
      "plan",
      [](const py::array_t<int64_t, py::array::c_style>& lengths, int64_t max_tokens, int32_t world_size, double linear,
         double quadratic) {
        const std::span view(lengths.data(), static_cast<size_t>(lengths.size()));
        const auto [indices, offsets] = [&] {
          py::gil_scoped_release release;
          return plan(view, max_tokens, world_size, linear, quadratic);
        }();
        return std::pair(to_numpy(indices), to_numpy(offsets));
      },
      py::arg("lengths"), py::arg("max_tokens"), py::arg("world_size"), py::arg("linear"), py::arg("quadratic"),
      "(indices, offsets) of the micro-batches, rank-major.");
}
