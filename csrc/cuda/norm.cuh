// Sums of squares in double: one number for each chunk, then one for each group, added in an order that is fixed.
#pragma once

#include "launch.h"

namespace sassha::cuda {

template <typename T, bool kAdaptive>
__global__ void __launch_bounds__(kThreads) square_sum_kernel(Table table, PartialSum* partials) {
  using C = Compute<T>;
  const Piece piece = piece_of(table);
  const T* grad = at<const T>(piece.row.grad, piece.begin);
  const T* param = at<const T>(piece.row.param, piece.begin);
  double sum[1] = {0};
  const Extent extent =
      extent_of<kVector<T>>(piece.size, kAdaptive ? aligned(piece.row.grad, piece.row.param) : aligned(piece.row.grad));
  for_each<kVector<T>>(extent, [&](auto width, int offset) {
    constexpr int n = decltype(width)::value;
    C g[n], x[n];
    load(grad + offset, g);
    if constexpr (kAdaptive) load(param + offset, x);
#pragma unroll
    for (int j = 0; j < n; ++j) sum[0] = add_square(sum[0], kAdaptive ? absolute(x[j]) * g[j] : g[j]);
  });
  block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sum[0], piece.row.group};
}

// One block for each group.
static __global__ void __launch_bounds__(kThreads)
    finish_sums_kernel(const PartialSum* partials, int64_t n, double* sums) {
  double sum[1] = {0};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const PartialSum partial = partials[i];
    sum[0] += partial.group == static_cast<int64_t>(blockIdx.x) ? partial.sum : 0.0;
  }
  block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum[0];
}

}  // namespace sassha::cuda
