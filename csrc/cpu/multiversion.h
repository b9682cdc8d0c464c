// One binary for every x86-64: a function marked RLFT_MULTIVERSION is compiled three times and picked when the library
// loads. It must be no template; what it calls must be RLFT_INLINE to be compiled with it.
#pragma once

#include "portable.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RLFT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RLFT_MULTIVERSION
#endif
