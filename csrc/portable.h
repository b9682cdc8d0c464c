// RLFT_INLINE: a function that CPU and CUDA code share, or that RLFT_MULTIVERSION compiles several times, is always
// inlined.
#pragma once

#ifdef __CUDACC__
#define RLFT_INLINE __host__ __device__ __forceinline__
#else
#define RLFT_INLINE inline __attribute__((always_inline))
#endif
