// GSAM's surrogate gap: sums of products of the two gradients, and the descent that they make.
#pragma once

#include "launch.h"

namespace sassha::cuda {

// Adds up sums over the block. Thread 0 has the result.
__device__ __forceinline__ GapSums block_sum(const GapSums& sums) {
  double values[kGapWords] = {sums.first, sums.dot, sums.second};
  block_sum(values);
  return {values[0], values[1], values[2]};
}

// Gradients of the first pass and of the second.
template <typename T, int kWidth>
struct GapOperands {
  Elements<T, kWidth> g, g2;
};

template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_for(2)) gap_sums_kernel(Table table, GapSums* partials) {
  const Piece piece = piece_of(table);
  const T* grad = at<const T>(piece.row.grad, piece.begin);
  const T* first = at<const T>(piece.row.first, piece.begin);
  GapSums sums = {0, 0, 0};
  for_each<kVector<T>, 1>(
      extent_of<kVector<T>>(piece.size, aligned(piece.row.grad, piece.row.first)),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return GapOperands<T, n>{load<n>(first + offset), load<n>(grad + offset)};
      },
      [&](auto width, int, const auto& in) {
#pragma unroll
        for (int j = 0; j < decltype(width)::value; ++j) {
          const double g = widen(in.g[j]), g2 = widen(in.g2[j]);
          sums.first = add_square(sums.first, g);
          sums.dot = add_product(sums.dot, g, g2);
          sums.second = add_square(sums.second, g2);
        }
      });
  sums = block_sum(sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = sums;
}

// One block for all chunks.
static __global__ void __launch_bounds__(kThreads)
    finish_gap_kernel(const GapSums* partials, int64_t n, GapSums* total) {
  GapSums sums = {0, 0, 0};
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const GapSums partial = partials[i];
    sums.first += partial.first;
    sums.dot += partial.dot;
    sums.second += partial.second;
  }
  sums = block_sum(sums);
  if (threadIdx.x == 0) *total = sums;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_for(2)) decompose_kernel(Table table, const GapScales* scales) {
  using C = Compute<T>;
  const Piece piece = piece_of(table);
  T* grad = at<T>(piece.row.grad, piece.begin);
  const T* first = at<const T>(piece.row.first, piece.begin);
  const C alpha = scales[piece.row.group].alpha, share = scales[piece.row.group].share;
  if (alpha == 0) return;  // selected, not multiplied: 0 * inf would be NaN
  for_each<kVector<T>, 1>(
      extent_of<kVector<T>>(piece.size, aligned(piece.row.grad, piece.row.first)),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return GapOperands<T, n>{load<n>(first + offset), load<n>(grad + offset)};
      },
      [&](auto width, int offset, const auto& in) {
        Elements<C, decltype(width)::value> next;
#pragma unroll
        for (int j = 0; j < decltype(width)::value; ++j) {
          next[j] = descent(widen(in.g2[j]), widen(in.g[j]), alpha, share);
        }
        store(grad + offset, next);
      });
}

}  // namespace sassha::cuda
