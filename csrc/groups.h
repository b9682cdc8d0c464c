// A list of tensors may be divided into groups of neighbours. This header checks the sizes of the groups.
#pragma once

#include <vector>

#include "stable.h"

namespace rlft {

inline void check_groups(const std::vector<Tensor>& tensors, const std::vector<int64_t>& group_sizes) {
  int64_t total = 0;
  for (const int64_t size : group_sizes) {
    STD_TORCH_CHECK(size >= 0, "group sizes must not be negative, got ", size);
    total += size;
  }
  STD_TORCH_CHECK(total == static_cast<int64_t>(tensors.size()), "group sizes add up to ", total, ", expected ",
                  tensors.size());
}

}  // namespace rlft
