// Ascent and the way back: x + eps into the parameter, x into the backup, and the copy that undoes it. Where x lives
// apart from the parameter, x + eps is derived from it and from the momentum.
#pragma once

#include "launch.h"

namespace sassha::cuda {

// `backup` may be `grad` itself: a thread reads its elements before it writes them.
template <typename T, bool kAdaptive>
__global__ void __launch_bounds__(kThreads, kBlocks) perturb_kernel(Table table, AscentArgs args) {
  using C = Compute<T>;
  const Piece piece = piece_of(table);
  T* param = at<T>(piece.row.param, piece.begin);
  T* backup = at<T>(piece.row.backup, piece.begin);
  const T* grad = at<const T>(piece.row.grad, piece.begin);
  const C scale = args.scales[piece.row.group];
  if (scale == 0) {  // selected, not multiplied: 0 * inf would be NaN
    copy<T>(piece, piece.row.backup, piece.row.param);
    return;
  }
  const Stream stream{args.seed, static_cast<uint32_t>(piece.row.index), static_cast<uint32_t>(*args.draw)};
  const Extent extent = extent_of<kVector<T>>(piece.size, aligned(piece.row.param, piece.row.backup, piece.row.grad));
  for_each<kVector<T>>(extent, [&](auto width, int offset) {
    constexpr int n = decltype(width)::value;
    T raw[n];
    C g[n], x[n];
    load_raw(param + offset, raw);
    load(grad + offset, g);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      x[j] = widen(raw[j]);
      x[j] = x[j] + (kAdaptive ? adaptive_ascent(scale, g[j], x[j]) : ascent(scale, g[j]));
    }
    // Rounding to nearest would lose most of a small eps.
    if constexpr (sizeof(T) == 2) round_stochastically<T>(x, stream, piece.begin + offset, kAscentNoise);
    store_raw(backup + offset, raw);
    store(param + offset, x);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) restore_kernel(Table table) {
  const Piece piece = piece_of(table);
  copy<T>(piece, piece.row.param, piece.row.backup);
}

template <typename T, bool kAdaptive>
__global__ void __launch_bounds__(kThreads, kBlocks) momentum_ascent_kernel(Table table, AscentArgs args) {
  using C = Compute<T>;
  const Piece piece = piece_of(table);
  T* param = at<T>(piece.row.param, piece.begin);
  const T* weight = at<const T>(piece.row.backup, piece.begin);
  const C* exp_avg = at<const C>(piece.row.exp_avg, piece.begin);
  const C scale = args.scales[piece.row.group];
  if (scale == 0) {
    copy<T>(piece, piece.row.param, piece.row.backup);
    return;
  }
  const Stream stream{args.seed, static_cast<uint32_t>(piece.row.index), static_cast<uint32_t>(*args.draw)};
  const bool wide = aligned(piece.row.param, piece.row.backup, piece.row.exp_avg);
  for_each<kVector<T>>(extent_of<kVector<T>>(piece.size, wide), [&](auto width, int offset) {
    constexpr int n = decltype(width)::value;
    C x[n], m[n];
    load(weight + offset, x);
    load(exp_avg + offset, m);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      x[j] = x[j] + (kAdaptive ? adaptive_ascent(scale, m[j], x[j]) : ascent(scale, m[j]));
    }
    if constexpr (sizeof(T) == 2) round_stochastically<T>(x, stream, piece.begin + offset, kAscentNoise);
    store(param + offset, x);
  });
}

}  // namespace sassha::cuda
