// CUDA's kernels on a CPU: stands in for csrc/cuda/launch.cuh, so that the kernels' own source, compiled by the host's
// compiler, runs where there is no GPU (device.py has the tensors). Slow, and true to what can go wrong in a kernel:
//
// - Every thread of a block is a fiber with its own stack. A warp runs until all its threads wait at a barrier of the
//   block; then the next one runs. So a barrier that is missing shows as a wrong result in one order of warps, lanes and
//   blocks or another (RLFT_EMULATOR_ORDER: 0 ascending, 1 descending, other numbers seed a random one).
// - A barrier or full-mask shuffle that some threads never reach ends the process with a message.
// - Shared memory is a static variable and global memory the host's heap, so AddressSanitizer sees accesses outside of
//   both, and UndefinedBehaviorSanitizer misaligned vectors, which a GPU refuses.
//
// What it cannot show: speed, the order in which memory becomes visible between fibers that run between two barriers
// (they never interleave there), and the rounding of the device's own exp, tanh and pow.
#pragma once

#include <cuda_runtime.h>  // vector types, and empty __global__, __device__, __shared__ for a host's compiler
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "stable.h"

#undef __shared__
#define __shared__ static  // one block runs at a time
#undef __launch_bounds__
#define __launch_bounds__(...)

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace rlft {

using std::fabs, std::fma, std::max, std::min, std::pow;  // device code calls them without std

namespace emulator {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 256 * 1024;  // bytes; AddressSanitizer's frames are large

// Where a stack stopped. swapcontext would do, but it asks the kernel for the signal mask every time: ten times slower.
// The compiler's own setjmp and longjmp, unlike the library's, may change stacks unseen by AddressSanitizer.
class Context {
 public:
  [[gnu::noinline, gnu::no_sanitize("address")]] static void change(Context& from, Context& to) {
    if (__builtin_setjmp(from.jump_) != 0) return;
    if (to.started_) jump(to);
    to.started_ = true;
    setcontext(&to.whole_);
  }

  // The next change to it calls `entry` on the given stack.
  void start_at(void (*entry)(), char* stack, size_t size) {
    getcontext(&whole_);
    whole_.uc_stack = {.ss_sp = stack, .ss_flags = 0, .ss_size = size};
    whole_.uc_link = nullptr;
    makecontext(&whole_, entry, 0);
    started_ = false;
  }

 private:
  [[gnu::noinline, gnu::no_sanitize("address")]] static void jump(Context& to) { __builtin_longjmp(to.jump_, 1); }

  ucontext_t whole_;
  void* jump_[5];
  bool started_ = true;
};

// Where `expected` threads wait for each other, and hand over a word each.
struct Meeting {
  unsigned expected = 0, arrived = 0, generation = 0;
  uint64_t word[2][kWarp];  // of this generation and of the last, which slow threads still read
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  uint3 thread;
  unsigned lane, warp;
  const Meeting* waits_for = nullptr;
  unsigned waits_in = 0;  // generation
  bool done = false;

  bool ready() const { return !done && (waits_for == nullptr || waits_for->generation != waits_in); }
};

// The block that runs.
struct Block {
  std::mutex mutex;  // one launch at a time
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Meeting> warps;
  Meeting all;
  Fiber* running = nullptr;
  Context scheduler;
  const std::function<void()>* body = nullptr;
  unsigned finished = 0;  // threads
  int order = 0;
  std::mt19937 random;
};
inline Block block;

// Of the kernels launched so far: where they begin, counted from `rlft_emulator_launches`, whose place a symbol table
// has beside theirs.
inline std::vector<int64_t> launches;

}  // namespace emulator
}  // namespace rlft

// Hands the launches since the last call to `take`.
extern "C" [[gnu::used, gnu::visibility("default")]] inline void rlft_emulator_launches(void (*take)(int64_t)) {
  const std::lock_guard<std::mutex> lock(rlft::emulator::block.mutex);
  for (const int64_t kernel : rlft::emulator::launches) take(kernel);
  rlft::emulator::launches.clear();
}

namespace rlft {
namespace emulator {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_emulator: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

inline void meet(Meeting& meeting) {
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  Fiber& self = *block.running;
  self.waits_for = &meeting;
  self.waits_in = meeting.generation;
  Context::change(self.context, block.scheduler);
}

// What a fiber does for ever: one thread of a block, and then of the next.
inline void run_threads() {
  for (;;) {
    (*block.body)();
    block.running->done = true;
    Context::change(block.running->context, block.scheduler);
  }
}

// 0 to count - 1, in the order of this launch.
inline std::vector<unsigned> arranged(size_t count) {
  std::vector<unsigned> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0u);
  if (block.order == 1) std::reverse(numbers.begin(), numbers.end());
  if (block.order > 1) std::shuffle(numbers.begin(), numbers.end(), block.random);
  return numbers;
}

inline void start_threads() {
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block.all = {.expected = count};
  block.finished = 0;
  block.warps.assign((count + kWarp - 1) / kWarp, {});
  while (block.fibers.size() < count) {
    block.fibers.push_back(std::make_unique<Fiber>());
    block.fibers.back()->context.start_at(run_threads, block.fibers.back()->stack.get(), kStack);
  }
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = *block.fibers[i];
    fiber.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    fiber.lane = i % kWarp, fiber.warp = i / kWarp;
    fiber.waits_for = nullptr, fiber.done = false;
    ++block.warps[fiber.warp].expected;
  }
}

// Each thread of the warp as far as it comes without the others; whether any moved.
inline bool run_warp_once(unsigned warp) {
  bool moved = false;
  const unsigned first = warp * kWarp;
  for (const unsigned lane : arranged(block.warps[warp].expected)) {
    Fiber& fiber = *block.fibers[first + lane];
    if (!fiber.ready()) continue;
    moved = true;
    fiber.waits_for = nullptr;
    block.running = &fiber;
    threadIdx = fiber.thread;
    Context::change(block.scheduler, fiber.context);
    block.finished += fiber.done;
  }
  return moved;
}

// A warp runs until it waits for other warps: one that is far ahead shows what nobody keeps it from overwriting.
inline void run_block() {
  start_threads();
  while (block.finished < block.all.expected) {
    bool moved = false;
    for (const unsigned warp : arranged(block.warps.size())) {
      while (run_warp_once(warp)) moved = true;
    }
    if (!moved) fail("threads wait for others that have left, or that wait elsewhere");
  }
}

inline void run(const void* kernel, dim3 blocks, dim3 threads, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(block.mutex);
  launches.push_back(static_cast<const char*>(kernel) - reinterpret_cast<const char*>(&rlft_emulator_launches));
  gridDim = blocks, blockDim = threads;
  const char* order = std::getenv("RLFT_EMULATOR_ORDER");
  block.order = order == nullptr ? 0 : std::atoi(order);
  block.random.seed(block.order);
  block.body = &body;
  for (const unsigned b : arranged(blocks.x)) {
    blockIdx = {b, 0, 0};
    run_block();
  }
}

// Every lane of the warp gives a value and takes that of the lane that `source` names.
template <class T, class Source>
T shuffle(T value, const Source& source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const Fiber& self = *block.running;
  Meeting& warp = block.warps[self.warp];
  auto& words = warp.word[warp.generation % 2];
  std::memcpy(&words[self.lane], &value, sizeof(T));
  meet(warp);
  T other;
  std::memcpy(&other, &words[source(self.lane)], sizeof(T));
  return other;
}

}  // namespace emulator

// ---- what the device offers ----------------------------------------------------------------------------------------

inline void __syncthreads() { emulator::meet(emulator::block.all); }

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned lane_mask) {
  return emulator::shuffle(value, [&](unsigned lane) { return lane ^ lane_mask; });
}

template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  return emulator::shuffle(value, [&](unsigned lane) { return lane + delta < emulator::kWarp ? lane + delta : lane; });
}

template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  return emulator::shuffle(value, [&](unsigned lane) { return lane >= delta ? lane - delta : lane; });
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __ffs(uint32_t bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }

// ---- what csrc/cuda/launch.cuh offers -------------------------------------------------------------------------------

class Launcher {
 public:
  explicit Launcher(const Tensor&) {}

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, const Arguments&... arguments) const {
    emulator::run(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)), threads,
                  [&] { kernel(arguments...); });
  }
};

// As few as leave every block several turns of its loop: threads are dear here.
inline int64_t device_blocks(int) { return 3; }

inline int64_t blocks_for(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, 3);
}

// RLFT_EMULATOR_RECORDING: as if a CUDA graph were being recorded.
inline bool is_recording(const Tensor&) { return std::getenv("RLFT_EMULATOR_RECORDING") != nullptr; }

inline Tensor pinned_int64(int64_t size) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::empty({size}, ScalarType::Long, std::nullopt, cpu);
}

}  // namespace rlft
