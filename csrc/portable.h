// RLFT_INLINE forces a function to be inlined. It marks functions that CPU and CUDA code share, and functions that
// RLFT_MULTIVERSION functions call.
#pragma once

#ifdef __CUDACC__
#define RLFT_INLINE __host__ __device__ __forceinline__
#else
#define RLFT_INLINE inline __attribute__((always_inline))
#endif
