// Ascent and the way back: x + eps into the parameter, x into the backup, and the copy that undoes it. Where x is
// kept in state, x + eps is derived from it and from the momentum.
#pragma once

#include "launch.h"

namespace sassha::cuda {

// x, and g or m, along which the ascent goes.
template <typename X, typename D, int kWidth>
struct AscentOperands {
  Elements<X, kWidth> x;
  Elements<D, kWidth> direction;
};

// x + eps, for parameters of type T.
template <typename T, typename X, typename D, int kWidth>
__device__ __forceinline__ Elements<Compute<T>, kWidth> ascended(const AscentOperands<X, D, kWidth>& in,
                                                                 Compute<T> scale, bool adaptive, const Stream& stream,
                                                                 int64_t element) {
  Elements<Compute<T>, kWidth> out;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const Compute<T> x = widen(in.x[j]), d = widen(in.direction[j]);
    out[j] = x + (adaptive ? adaptive_ascent(scale, d, x) : ascent(scale, d));
  }
  // Rounding to nearest would lose most of a small eps.
  if constexpr (sizeof(T) == 2) round_stochastically<T>(out, stream, element, kAscentNoise);
  return out;
}

// `backup` may be `grad` itself: a thread reads its elements before it writes them.
template <typename T, bool kAdaptive>
__global__ void __launch_bounds__(kThreads, blocks_for(2)) perturb_kernel(Table table, AscentArgs args) {
  const Piece piece = piece_of(table);
  T* param = at<T>(piece.row.param, piece.begin);
  T* backup = at<T>(piece.row.backup, piece.begin);
  const T* grad = at<const T>(piece.row.grad, piece.begin);
  const Compute<T> scale = args.scales[piece.row.group];
  if (scale == 0) {  // selected, not multiplied: 0 * inf would be NaN
    copy<T>(piece, piece.row.backup, piece.row.param);
    return;
  }
  const Stream stream{args.seed, static_cast<uint32_t>(piece.row.index), static_cast<uint32_t>(*args.draw)};
  const bool wide = aligned(piece.row.param, piece.row.backup, piece.row.grad);
  for_each<kVector<T>, 1>(
      extent_of<kVector<T>>(piece.size, wide),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return AscentOperands<T, T, n>{load<n>(param + offset), load<n>(grad + offset)};
      },
      [&](auto, int offset, const auto& in) {
        store(backup + offset, in.x);
        store(param + offset, ascended<T>(in, scale, kAdaptive, stream, piece.begin + offset));
      });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_for(kPair)) restore_kernel(Table table) {
  const Piece piece = piece_of(table);
  copy<T, kPair>(piece, piece.row.param, piece.row.backup);
}

template <typename T, bool kAdaptive>
__global__ void __launch_bounds__(kThreads, blocks_for(kPair * (1 + kStateVectors<T>)))
    momentum_ascent_kernel(Table table, AscentArgs args) {
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
  for_each<kVector<T>, kPair>(
      extent_of<kVector<T>>(piece.size, wide),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return AscentOperands<T, C, n>{load<n>(weight + offset), load<n>(exp_avg + offset)};
      },
      [&](auto, int offset, const auto& in) {
        store(param + offset, ascended<T>(in, scale, kAdaptive, stream, piece.begin + offset));
      });
}

}  // namespace sassha::cuda
