// AdamW over a list of parameters on CUDA; the formula is in csrc/adamw.h.
//
// A step takes two launches. The first has one thread per parameter, which counts the step and computes the parameter's
// factors in double. The second updates the elements in chunks (chunks.cuh). Both launches read found_inf on the device
// and write nothing if it is not 0. Gradients are read and never written. There is no host sync.
//
// float32 moves 28 bytes per element: p, g, m and v are read, p, m and v are written. With a master, reading master, m
// and v takes 12 bytes and writing them 12 bytes; reading g and writing p take their own sizes. bfloat16 moments move 8
// bytes fewer. The result is deterministic, because every element belongs to one thread.
#include <type_traits>

#include "adamw.h"
#include "cuda/chunks.cuh"

namespace rlft {
namespace {

constexpr int kCountThreads = 128;   // pow in double needs many registers
constexpr int kUpdateThreads = 256;  // leaves each 128 registers; with 512 threads and 64 registers, four lists spill

// The lists of the table. The list of masters is missing if the parameters are float32 or float64.
enum List { kParam, kGrad, kExpAvg, kExpAvgSq, kStep, kMaster };

// The scalars that the step reads on the device. A scalar that is not given is null.
struct Inputs {
  const float* lr;
  const float* coefficient;
  const float* found_inf;

  __device__ bool skips() const { return found_inf != nullptr && *found_inf != 0; }
};

// ---- kernels ---------------------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(kCountThreads)
    count_steps(Table table, AdamWSettings settings, Inputs inputs, AdamWFactors<C>* __restrict__ factors) {
  if (inputs.skips()) return;
  if (inputs.lr != nullptr) settings.lr = *inputs.lr;
  const double coefficient = inputs.coefficient != nullptr ? *inputs.coefficient : 1;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCountThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCountThreads + threadIdx.x; i < table.count; i += stride) {
    auto* step = table.tensor<float>(kStep, i);
    *step += 1;
    factors[i] = adamw_factors<C>(settings, coefficient, *step, i);
  }
}

// N elements that are read and written in words of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T element[N];
};

// `begin` is the index of the chunk's first element in its tensor.
template <int N, class P, class G, class M, class C>
__device__ void update(P* param, const G* grad, M* exp_avg, M* exp_avg_sq, C* master, int64_t begin, int64_t pack,
                       const AdamWFactors<C>& factors) {
  const Pack<G, N> g = reinterpret_cast<const Pack<G, N>*>(grad)[pack];
  Pack<C, N> w = reinterpret_cast<Pack<C, N>*>(master)[pack];
  Pack<M, N> m = reinterpret_cast<Pack<M, N>*>(exp_avg)[pack];
  Pack<M, N> v = reinterpret_cast<Pack<M, N>*>(exp_avg_sq)[pack];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const auto index = static_cast<uint32_t>(begin + pack * N + k);
    adamw_element(w.element[k], static_cast<C>(g.element[k]), m.element[k], v.element[k], index, factors);
  }
  reinterpret_cast<Pack<C, N>*>(master)[pack] = w;
  reinterpret_cast<Pack<M, N>*>(exp_avg)[pack] = m;
  reinterpret_cast<Pack<M, N>*>(exp_avg_sq)[pack] = v;
  if constexpr (!std::is_same_v<P, C>) {
    Pack<P, N> narrow;
#pragma unroll
    for (int k = 0; k < N; ++k) narrow.element[k] = static_cast<P>(w.element[k]);
    reinterpret_cast<Pack<P, N>*>(param)[pack] = narrow;
  }
}

template <class P, class G, class M>
__global__ void __launch_bounds__(kUpdateThreads, 2)
    update_chunks(Table table, Inputs inputs, const AdamWFactors<Compute<P>>* __restrict__ factors) {
  using C = Compute<P>;
  constexpr int kSize = 16 / sizeof(C);
  if (inputs.skips()) return;
  for (int64_t index = blockIdx.x; index < table.chunks; index += gridDim.x) {
    const Chunk chunk = table.find(index);
    auto* param = table.at<P>(kParam, chunk);
    auto* grad = table.at<const G>(kGrad, chunk);
    auto* exp_avg = table.at<M>(kExpAvg, chunk);
    auto* exp_avg_sq = table.at<M>(kExpAvgSq, chunk);
    auto* master = table.at<C>(std::is_same_v<P, C> ? kParam : kMaster, chunk);
    const AdamWFactors<C> f = factors[chunk.tensor];
    // Packs need addresses at multiples of 16 bytes. Shards may lack them, and are then updated element by element. The
    // last few elements of a chunk fill no pack either.
    const auto addresses = reinterpret_cast<uintptr_t>(param) | reinterpret_cast<uintptr_t>(grad) |
                           reinterpret_cast<uintptr_t>(exp_avg) | reinterpret_cast<uintptr_t>(exp_avg_sq) |
                           reinterpret_cast<uintptr_t>(master);
    const int64_t packs = addresses % 16 == 0 ? chunk.numel / kSize : 0;
    for (int64_t i = threadIdx.x; i < packs; i += kUpdateThreads) {
      update<kSize>(param, grad, exp_avg, exp_avg_sq, master, chunk.begin, i, f);
    }
    for (int64_t i = packs * kSize + threadIdx.x; i < chunk.numel; i += kUpdateThreads) {
      update<1>(param, grad, exp_avg, exp_avg_sq, master, chunk.begin, i, f);
    }
  }
}

// ---- binding ---------------------------------------------------------------------------------------------------

template <class P, class G, class M>
void step(const Table& table, const Tensor& like, const AdamWSettings& settings, const Inputs& inputs,
          const Launcher& launch) {
  using C = Compute<P>;
  const auto bytes = table.count * static_cast<int64_t>(sizeof(AdamWFactors<C>));
  const Tensor scratch = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  auto* factors = static_cast<AdamWFactors<C>*>(scratch.mutable_data_ptr());
  launch(count_steps<C>, blocks_for(table.count, kCountThreads), kCountThreads, table, settings, inputs, factors);
  if (table.chunks == 0) return;
  launch(update_chunks<P, G, M>, blocks_for(table.chunks, 1), kUpdateThreads, table, inputs, factors);
}

const float* float_or_null(const std::optional<Tensor>& scalar) {
  return scalar.has_value() ? static_cast<const float*>(scalar->const_data_ptr()) : nullptr;
}

void multi_tensor_adamw_(const std::vector<Tensor>& params, const std::vector<Tensor>& grads,
                         const std::vector<Tensor>& exp_avgs, const std::vector<Tensor>& exp_avg_sqs,
                         const std::vector<Tensor>& masters, const std::vector<Tensor>& steps, double lr,
                         const std::optional<Tensor>& lr_tensor, double beta1, double beta2, double weight_decay,
                         double eps, const std::optional<Tensor>& coefficient, const std::optional<Tensor>& found_inf) {
  if (params.empty()) return;
  check_adamw({params, grads, exp_avgs, exp_avg_sqs, masters, steps}, lr_tensor, coefficient, found_inf);
  const Launcher launch(params[0]);
  std::vector<const std::vector<Tensor>*> lists{&params, &grads, &exp_avgs, &exp_avg_sqs, &steps};
  if (!masters.empty()) lists.push_back(&masters);
  const OwnedTable owned = make_table(lists);
  const AdamWSettings settings{lr, beta1, beta2, weight_decay, eps};
  const Inputs inputs{float_or_null(lr_tensor), float_or_null(coefficient), float_or_null(found_inf)};
  dispatch(params[0].scalar_type(), [&]<class P>(P*) {
    dispatch(grads[0].scalar_type(), [&]<class G>(G*) {
      if constexpr (std::is_same_v<Compute<P>, Compute<G>>) {
        dispatch_moments<Compute<P>>(exp_avgs[0].scalar_type(), [&]<class M>(M*) {
          step<P, G, M>(owned.table, params[0], settings, inputs, launch);
        });
      }
    });
  });
}

}  // namespace
}  // namespace rlft

STABLE_TORCH_LIBRARY_IMPL(rlft_fast, CUDA, m) { m.impl("multi_tensor_adamw_", TORCH_BOX(&rlft::multi_tensor_adamw_)); }
