// Rademacher signs: written out as a tensor, or added to the parameters as x + h z.
#pragma once

#include "launch.h"

namespace sassha::cuda {

template <typename T>
__global__ void __launch_bounds__(kThreads) rademacher_kernel(Table table, uint64_t seed, uint32_t draw) {
  using C = Compute<T>;
  __shared__ uint32_t words[kSignWords];
  const Piece piece = piece_of(table);
  T* out = at<T>(piece.row.param, piece.begin);
  draw_signs(words, {seed, static_cast<uint32_t>(piece.row.index), draw}, piece);
  for_each<kVector<T>, 1>(
      extent_of<kVector<T>>(piece.size, aligned(piece.row.param)),
      [&](auto, int offset) { return signs_at(words, offset); },
      [&](auto width, int offset, uint32_t signs) {
        Elements<C, decltype(width)::value> z;
#pragma unroll
        for (int j = 0; j < decltype(width)::value; ++j) z[j] = times_sign(C(1), (signs >> j) & 1u);
        store(out + offset, z);
      });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_for(kPair))
    probe_kernel(Table table, const double* h, uint64_t seed, uint32_t draw) {
  using C = Compute<T>;
  __shared__ uint32_t words[kSignWords];
  const Piece piece = piece_of(table);
  T* param = at<T>(piece.row.param, piece.begin);
  const C length = static_cast<C>(*h);
  draw_signs(words, {seed, static_cast<uint32_t>(piece.row.index), draw}, piece);
  for_each<kVector<T>, kPair>(
      extent_of<kVector<T>>(piece.size, aligned(piece.row.param)),
      [&](auto width, int offset) { return load<decltype(width)::value>(param + offset); },
      [&](auto width, int offset, const auto& x) {
        const uint32_t signs = signs_at(words, offset);
        Elements<C, decltype(width)::value> moved;
#pragma unroll
        for (int j = 0; j < decltype(width)::value; ++j) {
          moved[j] = widen(x[j]) + times_sign(length, (signs >> j) & 1u);
        }
        store(param + offset, moved);
      });
}

}  // namespace sassha::cuda
