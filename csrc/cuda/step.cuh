// The update: restore, decay, both moving averages, bias correction, root, division, descent, in one pass.
#pragma once

#include "launch.h"

namespace sassha::cuda {

template <typename T, int kWidth>
struct StepOperands {
  Elements<T, kWidth> x, g, product;
  Elements<Compute<T>, kWidth> m, d;
};

// Vectors of every operand that an ordinary update asks for at once. The power of a double takes so many registers that
// there is room for two blocks alone, which then ask for twice as much.
template <typename T, Power kPower>
constexpr int kStepAhead = sizeof(T) == 8 && kPower == Power::kGeneral ? kPair : 1;

// What one thread adds up.
struct StepCount {
  double trace = 0;  // of a refresh, as in Tally
  int negative = 0;
  int seen = 0;
  double squares = 0;  // of m, where x is kept in state
};

// kGeneral stands for any mixture of powers; the kernels of the usual two have no branch.
template <Power kPower, typename C>
__device__ __forceinline__ C any_denominator(C d, C bias2, const StepScalars<C>& s) {
  if constexpr (kPower == Power::kGeneral) {
    if (s.power == C(0.5)) return denominator<Power::kHalf>(d, bias2, s);
    if (s.power == C(1)) return denominator<Power::kOne>(d, bias2, s);
  }
  return denominator<kPower>(d, bias2, s);
}

// D after a refresh, and by what it is to be corrected.
template <typename C>
struct Refreshed {
  C d, bias2;
};

// `hz` is a product up to its scale, `sign` the bit of its z.
template <typename C>
__device__ __forceinline__ Refreshed<C> refresh(C d, C g, C hz, uint32_t sign, const StepScalars<C>& s,
                                                const StepArgs& args, StepCount& count) {
  const C h = times_sign(hz * s.product_scale, sign);
  const bool unseen = is_unseen(hz, g, args.zero_is_seen), seen = is_finite(h) && !unseen;
  count.trace += seen ? static_cast<double>(h) : 0.0;
  count.negative += seen && h < 0 ? 1 : 0;
  count.seen += seen ? 1 : 0;
  // A sample that is not finite leaves D and its correction as they were.
  const C sample = sampled(h, args.sample);
  const bool known = is_finite(sample);
  return {!known ? d : unseen ? d * s.kept : curvature(d, sample, s), known ? s.bias2 : s.bias2_kept};
}

// The square of m, or of |x| m for x as it is stored.
template <typename T>
__device__ __forceinline__ double add_momentum(double sum, Compute<T> m, T x, bool adaptive) {
  return add_square(sum, adaptive ? absolute(widen(x)) * m : m);
}

// Leaves m and D as they are, and x, which returns to the parameter unless it is kept in state.
template <typename T, bool kInState>
__device__ __forceinline__ StepCount skip_piece(const Piece& piece, const StepArgs& args) {
  StepCount count;
  if constexpr (kInState) {
    const T* backup = at<const T>(piece.row.backup, piece.begin);
    const Compute<T>* exp_avg = at<const Compute<T>>(piece.row.exp_avg, piece.begin);
    for_each<kVector<T>, 1>(
        extent_of<kVector<T>>(piece.size, aligned(piece.row.backup, piece.row.exp_avg)),
        [&](auto width, int offset) {
          constexpr int n = decltype(width)::value;
          StepOperands<T, n> in;
          in.x = load<n>(backup + offset);
          in.m = load<n>(exp_avg + offset);
          return in;
        },
        [&](auto width, int, const auto& in) {
#pragma unroll
          for (int j = 0; j < decltype(width)::value; ++j) {
            count.squares = add_momentum<T>(count.squares, in.m[j], in.x[j], args.adaptive);
          }
        });
  } else {
    copy<T>(piece, piece.row.param, piece.row.backup);
  }
  return count;
}

// `words` are the signs of a refresh.
template <typename T, Power kPower, bool kRefresh, bool kInState, int kAhead>
__device__ __forceinline__ StepCount step_piece(const Piece& piece, const StepScalars<Compute<T>>& s,
                                                const StepArgs& args, const uint32_t* words) {
  using C = Compute<T>;
  const Row& row = piece.row;
  const int64_t target = kInState ? row.backup : row.param;
  T* updated = at<T>(target, piece.begin);
  const T* backup = at<const T>(row.backup, piece.begin);
  const T* grad = at<const T>(row.grad, piece.begin);
  const T* product = at<const T>(row.product, piece.begin);
  C* exp_avg = at<C>(row.exp_avg, piece.begin);
  C* hessian = at<C>(row.hessian, piece.begin);
  const bool wide = aligned(target, row.backup, row.grad, row.exp_avg, row.hessian, kRefresh ? row.product : 0);
  const bool probed = row.flags & kProbeGradient, at_random = sizeof(T) == 2 && args.noise_draw != nullptr;
  const Stream noise{args.seed, static_cast<uint32_t>(row.index),
                     at_random ? static_cast<uint32_t>(*args.noise_draw) : 0};
  StepCount count;
  for_each<kVector<T>, kAhead>(
      extent_of<kVector<T>>(piece.size, wide),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        StepOperands<T, n> in;
        in.x = load<n>(backup + offset);
        in.g = load<n>(grad + offset);
        in.m = load<n>(exp_avg + offset);
        in.d = load<n>(hessian + offset);
        if constexpr (kRefresh) in.product = load<n>(product + offset);
        return in;
      },
      [&](auto width, int offset, const auto& in) {
        constexpr int n = decltype(width)::value;
        [[maybe_unused]] const uint32_t signs = kRefresh ? signs_at(words, offset) : 0;
        Elements<C, n> x, m, d;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const C g = widen(in.g[j]);
          C bias2 = s.bias2;
          d[j] = in.d[j];
          if constexpr (kRefresh) {
            const C raw = widen(in.product[j]);
            const Refreshed<C> refreshed =
                refresh(in.d[j], g, probed ? raw - g : raw, (signs >> j) & 1u, s, args, count);
            d[j] = refreshed.d;
            bias2 = refreshed.bias2;
          }
          m[j] = momentum(in.m[j], g, s);
          x[j] = descend(widen(in.x[j]), m[j], d[j], any_denominator<kPower>(d[j], bias2, s), s);
        }
        if constexpr (sizeof(T) == 2) {
          if (at_random) round_stochastically<T>(x, noise, piece.begin + offset, kUpdateNoise);
        }
        store(updated + offset, x);
        store(exp_avg + offset, m);
        if constexpr (kRefresh) store(hessian + offset, d);
        if constexpr (kInState) {
#pragma unroll
          for (int j = 0; j < n; ++j) {
            count.squares = add_momentum<T>(count.squares, m[j], narrow<T>(x[j]), args.adaptive);
          }
        }
      });
  return count;
}

// The signs of a refresh, in memory that the block shares. Ends in a barrier.
__device__ __forceinline__ void draw_product_signs(uint32_t* words, const Piece& piece, const StepArgs& args) {
  if (product_of(piece.row) == Product::kSigned) {  // has its signs already: every further one is +1
    for (int i = static_cast<int>(threadIdx.x); i < kSignWords; i += kThreads) words[i] = 0;
    __syncthreads();
  } else {
    draw_signs(words, {args.seed, static_cast<uint32_t>(piece.row.index), args.draw}, piece);
  }
}

__device__ __forceinline__ void write_tally(const StepCount& count, Tally* partials) {
  double sums[3] = {count.trace, static_cast<double>(count.negative), static_cast<double>(count.seen)};
  block_sum(sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sums[0], sums[1], sums[2]};
}

__device__ __forceinline__ void write_squares(const StepCount& count, int64_t group, PartialSum* partials) {
  double sum[1] = {count.squares};
  block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sum[0], group};
}

template <typename T, Power kPower, bool kInState>
__global__ void __launch_bounds__(kThreads, blocks_for(kStepAhead<T, kPower> * (2 + 2 * kStateVectors<T>)))
    step_kernel(Table table, StepArgs args, PartialSum* partial_squares) {
  const Piece piece = piece_of(table);
  const auto s = rounded<Compute<T>>(args.scalars[piece.row.cohort]);
  const StepCount count = s.skip != 0
                              ? skip_piece<T, kInState>(piece, args)
                              : step_piece<T, kPower, false, kInState, kStepAhead<T, kPower>>(piece, s, args, nullptr);
  if constexpr (kInState) write_squares(count, piece.row.group, partial_squares);
}

// Rows without a product take the ordinary update.
template <typename T, Power kPower, bool kInState>
__global__ void __launch_bounds__(kThreads, blocks_for(3 + 2 * kStateVectors<T>))
    refresh_step_kernel(Table table, StepArgs args, Tally* partials, PartialSum* partial_squares) {
  __shared__ uint32_t words[kSignWords];
  const Piece piece = piece_of(table);
  const auto s = rounded<Compute<T>>(args.scalars[piece.row.cohort]);
  StepCount count;
  if (s.skip != 0) {
    count = skip_piece<T, kInState>(piece, args);
  } else if (product_of(piece.row) == Product::kNone) {
    count = step_piece<T, kPower, false, kInState, 1>(piece, s, args, nullptr);
  } else {
    draw_product_signs(words, piece, args);
    count = step_piece<T, kPower, true, kInState, 1>(piece, s, args, words);
  }
  write_tally(count, partials);
  if constexpr (kInState) write_squares(count, piece.row.group, partial_squares);
}

}  // namespace sassha::cuda
