// Rademacher signs: written out as a tensor, or added to the parameters as x + h z.
#pragma once

#include "launch.h"

namespace sassha::cuda {

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) rademacher_kernel(Table table, uint64_t seed, uint32_t draw) {
  using C = Compute<T>;
  __shared__ uint32_t words[kSignWords];
  const Piece piece = piece_of(table);
  T* out = at<T>(piece.row.param, piece.begin);
  draw_signs(words, {seed, static_cast<uint32_t>(piece.row.index), draw}, piece);
  const Extent extent = extent_of<kVector<T>>(piece.size, aligned(piece.row.param));
  for_each<kVector<T>>(extent, [&](auto width, int offset) {
    constexpr int n = decltype(width)::value;
    const uint32_t signs = signs_at(words, offset);
    C z[n];
#pragma unroll
    for (int j = 0; j < n; ++j) z[j] = times_sign(C(1), (signs >> j) & 1u);
    store(out + offset, z);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) probe_kernel(Table table, double h, uint64_t seed, uint32_t draw) {
  using C = Compute<T>;
  __shared__ uint32_t words[kSignWords];
  const Piece piece = piece_of(table);
  T* param = at<T>(piece.row.param, piece.begin);
  const C length = static_cast<C>(h);
  draw_signs(words, {seed, static_cast<uint32_t>(piece.row.index), draw}, piece);
  const Extent extent = extent_of<kVector<T>>(piece.size, aligned(piece.row.param));
  for_each<kVector<T>>(extent, [&](auto width, int offset) {
    constexpr int n = decltype(width)::value;
    const uint32_t signs = signs_at(words, offset);
    C x[n];
    load(param + offset, x);
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = x[j] + times_sign(length, (signs >> j) & 1u);
    store(param + offset, x);
  });
}

}  // namespace sassha::cuda
