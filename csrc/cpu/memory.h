// Large outputs on the CPU get huge pages.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>

#include "stable.h"

namespace rlft {

// Asks the system for 2 MiB pages under a tensor and returns the tensor's memory. Call it before the first write. Page
// faults take most of the time of writing new memory, and a 2 MiB page has one fault instead of 512. A system without
// huge pages ignores the request.
inline void* with_huge_pages(const Tensor& x) {
  void* memory = x.mutable_data_ptr();
#ifdef __linux__
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + x.numel() * x.element_size()) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return memory;
}

}  // namespace rlft
