// Sums of squares in double: one number for each chunk, then one for each group, added in an order that is fixed.
#pragma once

#include "launch.h"

namespace sassha::cuda {

template <typename T, int kWidth>
struct NormOperands {
  Elements<T, kWidth> v, x;
};

template <typename T, bool kAdaptive>
__global__ void __launch_bounds__(kThreads, blocks_for(kPair*(kAdaptive ? 2 : 1)))
    square_sum_kernel(Table table, int column, PartialSum* partials) {
  using C = Compute<T>;
  const Piece piece = piece_of(table);
  const int64_t address = address_in(piece.row, column);
  const T* values = at<const T>(address, piece.begin);
  const T* param = at<const T>(piece.row.param, piece.begin);
  const bool wide = kAdaptive ? aligned(address, piece.row.param) : aligned(address);
  double sum[1] = {0};
  for_each<kVector<T>, kPair>(
      extent_of<kVector<T>>(piece.size, wide),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        NormOperands<T, n> in = {};
        in.v = load<n>(values + offset);
        if constexpr (kAdaptive) in.x = load<n>(param + offset);
        return in;
      },
      [&](auto width, int, const auto& in) {
#pragma unroll
        for (int j = 0; j < decltype(width)::value; ++j) {
          const C v = widen(in.v[j]);
          sum[0] = add_square(sum[0], kAdaptive ? absolute(widen(in.x[j])) * v : v);
        }
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
