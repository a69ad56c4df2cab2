// What a refresh did not see: how much there is of it, and the curvature that it gets. Blocks of rows of which it saw
// everything, which are most, end at once.
#pragma once

#include "launch.h"

namespace sassha::cuda {

template <typename T, int kWidth>
struct UnseenOperands {
  Elements<T, kWidth> g, product;
  Elements<Compute<T>, kWidth> d;
};

// Calls work(width, offset, operands) for all elements of a piece.
template <typename T, typename Work>
__device__ __forceinline__ void for_each_refreshed(const Piece& piece, const Work& work) {
  using C = Compute<T>;
  const Row& row = piece.row;
  const T* grad = at<const T>(row.grad, piece.begin);
  const T* product = at<const T>(row.product, piece.begin);
  const C* hessian = at<const C>(row.hessian, piece.begin);
  for_each<kVector<T>, 1>(
      extent_of<kVector<T>>(piece.size, aligned(row.grad, row.product, row.hessian)),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return UnseenOperands<T, n>{load<n>(grad + offset), load<n>(product + offset), load<n>(hessian + offset)};
      },
      work);
}

// What one thread counts.
struct UnseenCount {
  int elements = 0, known = 0;
  double curvature = 0;

  template <typename C>
  __device__ __forceinline__ void add(C product, C g, C d) {
    elements += is_unseen(product, g, false) ? 1 : 0;
    known += is_unknown(d) ? 0 : 1;
    curvature += static_cast<double>(d);  // -0 where it is not known
  }
};

__device__ __forceinline__ void write_unseen(const UnseenCount& count, Unseen* partials) {
  double sums[kUnseenWords] = {static_cast<double>(count.elements), static_cast<double>(count.known), count.curvature};
  block_sum(sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sums[0], sums[1], sums[2]};
}

template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_for(2 + kStateVectors<T>))
    unseen_sums_kernel(Table table, const Tally* tallies, Unseen* partials) {
  const Piece piece = piece_of(table);
  if (!left_some_out(piece.row, tallies[table.chunks[blockIdx.x].row])) {
    if (threadIdx.x == 0) partials[blockIdx.x] = {0, 0, 0};
    return;
  }
  UnseenCount count;
  for_each_refreshed<T>(piece, [&](auto width, int, const auto& in) {
#pragma unroll
    for (int j = 0; j < decltype(width)::value; ++j) {
      count.add<Compute<T>>(widen(in.product[j]), widen(in.g[j]), in.d[j]);
    }
  });
  write_unseen(count, partials);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_for(2 + kStateVectors<T>))
    fill_unseen_kernel(Table table, const Unseen* sums) {
  using C = Compute<T>;
  const Piece piece = piece_of(table);
  const Unseen sum = sums[table.chunks[blockIdx.x].row];
  if (!has_mean(sum)) return;
  const C mean = mean_curvature(sum);
  C* hessian = at<C>(piece.row.hessian, piece.begin);
  for_each_refreshed<T>(piece, [&](auto width, int offset, const auto& in) {
    Elements<C, decltype(width)::value> d;
#pragma unroll
    for (int j = 0; j < decltype(width)::value; ++j) {
      d[j] = filled<C>(in.d[j], widen(in.product[j]), widen(in.g[j]), mean);
    }
    store(hessian + offset, d);
  });
}

}  // namespace sassha::cuda
