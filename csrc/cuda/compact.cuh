// The passes over rows whose state or weights are stored in fewer bits: the same maths as in perturb.cuh, step.cuh and
// unseen.cuh, on runs that are decoded first and encoded last. The power is looked at for each run, so that no format
// is compiled once for every power.
#pragma once

#include "perturb.cuh"
#include "step.cuh"
#include "stored.cuh"
#include "unseen.cuh"

namespace sassha::cuda {

// ---- ascent --------------------------------------------------------------------------------------------------

template <typename S, int kWidth>
struct CompactAscentOperands {
  WeightRun<S, kWidth> x;
  Elements<typename S::Param, kWidth> g;
};

// The correction stays where it is: x + eps has none, and its backup needs the one of x.
template <typename S>
__global__ void __launch_bounds__(kThreads, blocks_for(S::kWeight + S::kParam))
    compact_perturb_kernel(Table table, AscentArgs args) {
  using T = typename S::Param;
  const Piece piece = piece_of(table);
  const Row& row = piece.row;
  T* param = at<T>(row.param, piece.begin);
  T* backup = at<T>(row.backup, piece.begin);
  const T* grad = at<const T>(row.grad, piece.begin);
  const Weights<S> weights(piece, row.param);
  const float scale = args.scales[row.group];
  if (scale == 0) {  // selected, not multiplied: 0 * inf would be NaN
    copy<T>(piece, row.backup, row.param);
    return;
  }
  const Stream stream{args.seed, static_cast<uint32_t>(row.index), static_cast<uint32_t>(*args.draw)};
  for_each<kRun, 1>(
      extent_of<kRun>(piece.size, aligned(row.param, row.backup, row.grad, row.correction)),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return CompactAscentOperands<S, n>{weights.template load<n>(offset), load<n>(grad + offset)};
      },
      [&](auto width, int offset, const auto& in) {
        constexpr int n = decltype(width)::value;
        AscentOperands<float, float, n> wide;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          wide.x[j] = in.x[j];
          wide.direction[j] = widen(in.g[j]);
        }
        store(backup + offset, in.x.params);
        store(param + offset, ascended<T>(wide, scale, args.adaptive, stream, piece.begin + offset));
      });
}

template <typename S, int kWidth>
struct CompactMomentumOperands {
  WeightRun<S, kWidth> x;
  MomentumRun<S, kWidth> m;
};

template <typename S>
__global__ void __launch_bounds__(kThreads, blocks_for(S::kWeight + S::kMomentum))
    compact_momentum_ascent_kernel(Table table, AscentArgs args) {
  using T = typename S::Param;
  const Piece piece = piece_of(table);
  const Row& row = piece.row;
  T* param = at<T>(row.param, piece.begin);
  const Weights<S> weights(piece, row.backup);
  const Momentums<S> momentums(piece);
  const float scale = args.scales[row.group];
  if (scale == 0) {
    copy<T>(piece, row.param, row.backup);
    return;
  }
  const Stream stream{args.seed, static_cast<uint32_t>(row.index), static_cast<uint32_t>(*args.draw)};
  const bool wide = aligned(row.param, row.backup, row.exp_avg, S::kCorrected ? row.correction : 0);
  for_each<kRun, 1>(
      extent_of<kRun>(piece.size, wide),
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        return CompactMomentumOperands<S, n>{weights.template load<n>(offset), momentums.template load<n>(offset)};
      },
      [&](auto width, int offset, const auto& in) {
        constexpr int n = decltype(width)::value;
        AscentOperands<float, float, n> wide;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          wide.x[j] = in.x[j];
          wide.direction[j] = in.m[j];
        }
        store(param + offset, ascended<T>(wide, scale, args.adaptive, stream, piece.begin + offset));
      });
}

// ---- update --------------------------------------------------------------------------------------------------

template <typename S, int kWidth>
struct CompactStepOperands {
  WeightRun<S, kWidth> x;
  Elements<typename S::Param, kWidth> g, product;
  MomentumRun<S, kWidth> m;
  CurvatureRun<S, kWidth> d;
};

// Every element to its power.
template <int kWidth>
__device__ __forceinline__ void raise(Elements<float, kWidth>& v, const StepScalars<float>& s) {
  if (s.power == 0.5f) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v[j] = raised<Power::kHalf>(v[j], s);
  } else if (s.power == 1.0f) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v[j] = raised<Power::kOne>(v[j], s);
  } else {
    // A general power is hundreds of instructions: one copy of them, to which the elements come in turn.
#pragma unroll 1
    for (int turn = 0; turn < kWidth; ++turn) {
      const float first = raised<Power::kGeneral>(v[0], s);
#pragma unroll
      for (int j = 0; j + 1 < kWidth; ++j) v[j] = v[j + 1];
      v[kWidth - 1] = first;
    }
  }
}

// Squares of m, or of |x| m for x as it is stored.
template <typename S, typename M, int kWidth>
__device__ __forceinline__ double add_momentums(double sum, const M& m, const Elements<typename S::Param, kWidth>& x,
                                                bool adaptive) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum = add_momentum(sum, m[j], x[j], adaptive);
  return sum;
}

// Leaves all as it is but x, which returns to the parameter unless it is kept in state.
template <typename S>
__device__ __forceinline__ StepCount skip_compact(const Piece& piece, const StepArgs& args) {
  using T = typename S::Param;
  StepCount count;
  const T* backup = at<const T>(piece.row.backup, piece.begin);
  const Momentums<S> momentums(piece);
  if (!args.in_state) copy<T>(piece, piece.row.param, piece.row.backup);
  const int squares = args.in_state ? piece.size : 0;  // an early return above takes nvcc 13.0 minutes to compile
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < squares; i += kThreads) {
    const MomentumRun<S, 1> m = momentums.template load<1>(i);
    count.squares = add_momentum(count.squares, m[0], backup[i], args.adaptive);
  }
  return count;
}

// `words` are the signs of a refresh.
template <typename S, bool kRefresh>
__device__ __forceinline__ StepCount step_compact(const Piece& piece, const StepScalars<float>& s, const StepArgs& args,
                                                  const uint32_t* words) {
  using T = typename S::Param;
  const Row& row = piece.row;
  const int64_t target = args.in_state ? row.backup : row.param;
  const T* grad = at<const T>(row.grad, piece.begin);
  const T* product = at<const T>(row.product, piece.begin);
  const Weights<S> kept(piece, row.backup), updated(piece, target);
  const Momentums<S> momentums(piece);
  const Curvatures<S> curvatures(piece);
  const bool wide = aligned(target, row.backup, row.grad, row.exp_avg, row.hessian, kRefresh ? row.product : 0,
                            S::kCorrected ? row.correction : 0);
  const bool probed = row.flags & kProbeGradient, at_random = sizeof(T) == 2 && args.noise_draw != nullptr;
  const int32_t levels = levels_of(row.format);
  const Stream noise{args.seed, static_cast<uint32_t>(row.index),
                     at_random ? static_cast<uint32_t>(*args.noise_draw) : 0};
  const Rounding rounding = rounding_of(row, args.seed, args.state_draw);
  StepCount count;
  for_each_run(
      piece.size, wide,
      [&](auto width, int offset) {
        constexpr int n = decltype(width)::value;
        CompactStepOperands<S, n> in;
        in.x = kept.template load<n>(offset);
        in.g = load<n>(grad + offset);
        in.m = momentums.template load<n>(offset);
        in.d = curvatures.template load<n>(offset);
        if constexpr (kRefresh) in.product = load<n>(product + offset);
        return in;
      },
      [&](auto width, int offset, bool there, const auto& in) {
        constexpr int n = decltype(width)::value;
        [[maybe_unused]] const uint32_t signs = kRefresh ? signs_at(words, offset) : 0;
        const int64_t element = piece.begin + offset;
        Elements<float, n> x, m, d, denominators;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float g = widen(in.g[j]);
          float bias2 = s.bias2;
          d[j] = in.d.value(j, levels);
          if constexpr (kRefresh) {
            if (there) {
              const float raw = widen(in.product[j]);
              const Refreshed<float> next = refresh(d[j], g, probed ? raw - g : raw, (signs >> j) & 1u, s, args, count);
              d[j] = next.d;
              bias2 = next.bias2;
            }
          }
          m[j] = momentum(in.m[j], g, s);
          denominators[j] = unbiased(d[j], bias2, s);
        }
        raise(denominators, s);
#pragma unroll
        for (int j = 0; j < n; ++j) x[j] = descend(in.x[j], m[j], d[j], denominators[j], s);
        if constexpr (sizeof(T) == 2) {
          if (at_random) round_stochastically<T>(x, noise, element, kUpdateNoise);
        }
        const WeightRun<S, n> written = encoded<S>(x);
        if (there) updated.store(offset, written);
        if (there && args.in_state) {
          count.squares = add_momentums<S>(count.squares, m, written.params, args.adaptive);
        }
        momentums.store(offset, there, m, rounding, element);
        if constexpr (kRefresh) curvatures.store(offset, there, d, levels, rounding, element);
      });
  return count;
}

template <typename S>
constexpr int kStepVectors = S::kWeight + S::kParam + S::kMomentum + S::kCurvature;

template <typename S>
__global__ void __launch_bounds__(kThreads, blocks_for(kStepVectors<S>))
    compact_step_kernel(Table table, StepArgs args, PartialSum* partial_squares) {
  const Piece piece = piece_of(table);
  const auto s = rounded<float>(args.scalars[piece.row.cohort]);
  const StepCount count = s.skip != 0 ? skip_compact<S>(piece, args) : step_compact<S, false>(piece, s, args, nullptr);
  if (args.in_state) write_squares(count, piece.row.group, partial_squares);
}

// Rows without a product take the ordinary update.
template <typename S>
__global__ void __launch_bounds__(kThreads, blocks_for(kStepVectors<S> + S::kParam))
    compact_refresh_step_kernel(Table table, StepArgs args, Tally* partials, PartialSum* partial_squares) {
  __shared__ uint32_t words[kSignWords];
  const Piece piece = piece_of(table);
  const auto s = rounded<float>(args.scalars[piece.row.cohort]);
  StepCount count;
  if (s.skip != 0) {
    count = skip_compact<S>(piece, args);
  } else if (product_of(piece.row) == Product::kNone) {
    count = step_compact<S, false>(piece, s, args, nullptr);
  } else {
    draw_product_signs(words, piece, args);
    count = step_compact<S, true>(piece, s, args, words);
  }
  write_tally(count, partials);
  if (args.in_state) write_squares(count, piece.row.group, partial_squares);
}

// ---- what a refresh did not see ------------------------------------------------------------------------------

template <typename S, int kWidth>
struct CompactUnseenOperands {
  Elements<typename S::Param, kWidth> g, product;
  CurvatureRun<S, kWidth> d;
};

// Gradients, products and curvature of a piece.
template <typename S>
struct CompactRefreshed {
  using T = typename S::Param;

  __device__ __forceinline__ explicit CompactRefreshed(const Piece& piece)
      : grad(at<const T>(piece.row.grad, piece.begin)),
        product(at<const T>(piece.row.product, piece.begin)),
        curvatures(piece),
        levels(levels_of(piece.row.format)),
        wide(aligned(piece.row.grad, piece.row.product, piece.row.hessian)) {}

  template <int kWidth>
  __device__ __forceinline__ CompactUnseenOperands<S, kWidth> load(int offset) const {
    return {cuda::load<kWidth>(grad + offset), cuda::load<kWidth>(product + offset),
            curvatures.template load<kWidth>(offset)};
  }

  const T* grad;
  const T* product;
  Curvatures<S> curvatures;
  int32_t levels;
  bool wide;
};

template <typename S>
__global__ void __launch_bounds__(kThreads, blocks_for(2 * S::kParam + S::kCurvature))
    compact_unseen_sums_kernel(Table table, const Tally* tallies, Unseen* partials) {
  const Piece piece = piece_of(table);
  if (!left_some_out(piece.row, tallies[table.chunks[blockIdx.x].row])) {
    if (threadIdx.x == 0) partials[blockIdx.x] = {0, 0, 0};
    return;
  }
  const CompactRefreshed<S> refreshed(piece);
  UnseenCount count;
  for_each<kRun, 1>(
      extent_of<kRun>(piece.size, refreshed.wide),
      [&](auto width, int offset) { return refreshed.template load<decltype(width)::value>(offset); },
      [&](auto width, int, const auto& in) {
#pragma unroll
        for (int j = 0; j < decltype(width)::value; ++j) {
          count.add<float>(widen(in.product[j]), widen(in.g[j]), in.d.value(j, refreshed.levels));
        }
      });
  write_unseen(count, partials);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, blocks_for(2 * S::kParam + S::kCurvature))
    compact_fill_unseen_kernel(Table table, FillArgs args) {
  const Piece piece = piece_of(table);
  const Unseen sum = args.sums[table.chunks[blockIdx.x].row];
  if (!has_mean(sum)) return;
  const float mean = mean_curvature(sum);
  const CompactRefreshed<S> refreshed(piece);
  const Rounding rounding = rounding_of(piece.row, args.seed, args.state_draw);
  for_each_run(
      piece.size, refreshed.wide,
      [&](auto width, int offset) { return refreshed.template load<decltype(width)::value>(offset); },
      [&](auto width, int offset, bool there, const auto& in) {
        constexpr int n = decltype(width)::value;
        Elements<float, n> d;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          d[j] = filled<float>(in.d.value(j, refreshed.levels), widen(in.product[j]), widen(in.g[j]), mean);
        }
        refreshed.curvatures.store(offset, there, d, refreshed.levels, rounding, piece.begin + offset);
      });
}

}  // namespace sassha::cuda
