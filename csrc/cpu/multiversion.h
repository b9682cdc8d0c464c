// One binary serves every x86-64 CPU: a function marked RLFT_MULTIVERSION is compiled three times, and one version is
// chosen when the library loads. Such a function cannot be a template. Functions that it calls must be RLFT_INLINE, or
// they are compiled for the oldest CPU only.
#pragma once

#include "portable.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RLFT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RLFT_MULTIVERSION
#endif
