// The update: restore, decay, both moving averages, bias correction, root, division, descent, in one pass.
#pragma once

#include "launch.h"

namespace sassha::cuda {

// What one thread saw of a refresh.
struct Count {
  double trace;
  int negative;
  int finite;
};

// kGeneral stands for any mixture of powers; the kernels of the usual two have no branch and few registers.
template <Power kPower, typename C>
__device__ __forceinline__ C any_denominator(C d, C bias2, const StepScalars<C>& s) {
  if constexpr (kPower == Power::kGeneral) {
    if (s.power == C(0.5)) return denominator<Power::kHalf>(d, bias2, s);
    if (s.power == C(1)) return denominator<Power::kOne>(d, bias2, s);
  }
  return denominator<kPower>(d, bias2, s);
}

// What all threads of a block need. It lies in shared memory: registers are what limits the number of threads, and
// these would take thirty.
template <typename C>
struct Common {
  Row row;
  int64_t begin;
  Extent extent;
  StepScalars<C> scalars;
  uint32_t noise_draw;
  uint32_t words[kSignWords];  // signs of a refresh

  // Reads this memory: a piece of the table would stay in registers.
  __device__ Piece piece() const { return {row, begin, extent.size}; }
};

// Where x lives apart the update writes it back to the backup. Ends in a barrier.
template <typename T, bool kApart, typename C>
__device__ __forceinline__ void share(Common<C>& common, const Piece& piece, const StepArgs& args) {
  if (threadIdx.x == 0) {
    const Row& row = piece.row;
    const int64_t updated = kApart ? row.backup : row.param;
    const bool wide = aligned(updated, row.backup, row.grad, row.exp_avg, row.hessian, row.product);
    common.row = row;
    common.row.param = updated;
    common.begin = piece.begin;
    common.extent = extent_of<kVector<T>>(piece.size, wide);
    common.scalars = rounded<C>(args.scalars[row.cohort]);
    if (sizeof(T) == 2 && args.noise_draw != nullptr) common.noise_draw = static_cast<uint32_t>(*args.noise_draw);
  }
  __syncthreads();
}

// Adds squares of m, or of |x| m for x as it is stored, to the sum of this thread.
template <typename T, int kWidth>
__device__ __forceinline__ void add_squares(double* squares, const Compute<T> (&m)[kWidth],
                                            const Compute<T> (&x)[kWidth], bool adaptive) {
  double sum = squares[thread_index()];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sum = add_square(sum, adaptive ? absolute(widen(narrow<T>(x[j]))) * m[j] : m[j]);
  }
  squares[thread_index()] = sum;
}

// Leaves m and D as they are, and x, which returns to the parameter unless it lives apart.
template <typename T, bool kApart>
__device__ __forceinline__ void skip_piece(const Common<Compute<T>>& common, const StepArgs& args, double* squares) {
  if constexpr (kApart) {
    for_each<kVector<T>>(common.extent, [&](auto width, int offset) {
      Compute<T> x[decltype(width)::value], m[decltype(width)::value];
      load(at<const T>(common.row.backup, common.begin + offset), x);
      load(at<const Compute<T>>(common.row.exp_avg, common.begin + offset), m);
      add_squares<T>(squares, m, x, args.adaptive);
    });
  } else {
    copy<T>(common.piece(), common.row.param, common.row.backup);
  }
}

template <typename T, Power kPower, bool kRefresh, bool kApart>
__device__ __forceinline__ void step_piece(const Common<Compute<T>>& common, const StepArgs& args, Count* counts,
                                           double* squares) {
  using C = Compute<T>;
  const StepScalars<C>& s = common.scalars;
  const Row& row = common.row;
  for_each<kVector<T>>(common.extent, [&](auto width, int offset) {
    constexpr int n = decltype(width)::value;
    C x[n], g[n], m[n], d[n], denom[n];
    forget_shared();
    load(at<const T>(row.grad, common.begin + offset), g);
    load(at<const C>(row.hessian, common.begin + offset), d);
    uint32_t unknown = 0;  // a bit for each element without curvature
    if constexpr (kRefresh) {
      C h[n];
      load(at<const T>(row.product, common.begin + offset), h);
      const uint32_t signs = signs_at(common.words, offset);
      Count seen = counts[thread_index()];
#pragma unroll
      for (int j = 0; j < n; ++j) {
        forget_shared();
        const C hz = (row.flags & kProbeGradient ? h[j] - g[j] : h[j]) * s.product_scale;
        h[j] = times_sign(hz, (signs >> j) & 1u);
        const bool known = is_finite(h[j]);
        seen.trace += known ? static_cast<double>(h[j]) : 0.0;
        seen.negative += known && h[j] < 0 ? 1 : 0;
        seen.finite += known ? 1 : 0;
        h[j] = sampled(h[j], args.sample);
      }
      counts[thread_index()] = seen;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        forget_shared();
        // A sample that is not finite leaves D and its correction as they were.
        const bool known = is_finite(h[j]);
        d[j] = known ? curvature(d[j], h[j], s) : d[j];
        denom[j] = any_denominator<kPower>(d[j], known ? s.bias2 : s.bias2_kept, s);
        unknown |= static_cast<uint32_t>(is_unknown(d[j])) << j;
      }
      forget_shared();
      store(at<C>(row.hessian, common.begin + offset), d);
      forget_shared();  // the other operands are read only now, when the registers of these are free again
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        forget_shared();
        denom[j] = any_denominator<kPower>(d[j], s.bias2, s);
        unknown |= static_cast<uint32_t>(is_unknown(d[j])) << j;
      }
    }
    load(at<const T>(row.backup, common.begin + offset), x);
    load(at<const C>(row.exp_avg, common.begin + offset), m);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      forget_shared();
      m[j] = momentum(m[j], g[j], s);
      x[j] = descend(x[j], m[j], times_sign(C(0), (unknown >> j) & 1u), denom[j], s);
    }
    if constexpr (sizeof(T) == 2) {
      if (args.noise_draw != nullptr) {
        const Stream noise{args.seed, static_cast<uint32_t>(row.index), common.noise_draw};
        round_stochastically<T>(x, noise, common.begin + offset, kUpdateNoise);
      }
    }
    forget_shared();
    store(at<T>(row.param, common.begin + offset), x);
    store(at<C>(row.exp_avg, common.begin + offset), m);
    if constexpr (kApart) add_squares<T>(squares, m, x, args.adaptive);
  });
}

__device__ __forceinline__ void write_squares(const double* squares, int64_t group, PartialSum* partials) {
  double sum[1] = {squares[threadIdx.x]};
  block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sum[0], group};
}

template <typename T, Power kPower, bool kApart>
__global__ void __launch_bounds__(kThreads, kStepBlocks<T>)
    step_kernel(Table table, StepArgs args, PartialSum* partial_squares) {
  __shared__ Common<Compute<T>> common;
  __shared__ double squares[kThreads];  // its own for every thread, and in shared memory for the sake of registers
  share<T, kApart>(common, piece_of(table), args);
  if constexpr (kApart) squares[threadIdx.x] = 0;
  if (common.scalars.skip != 0) {
    skip_piece<T, kApart>(common, args, squares);
  } else {
    step_piece<T, kPower, false, kApart>(common, args, nullptr, squares);
  }
  if constexpr (kApart) write_squares(squares, common.row.group, partial_squares);
}

// Rows without a product take the ordinary update.
template <typename T, Power kPower, bool kApart>
__global__ void __launch_bounds__(kThreads, kStepBlocks<T>)
    refresh_step_kernel(Table table, StepArgs args, Tally* partials, PartialSum* partial_squares) {
  __shared__ Common<Compute<T>> common;
  __shared__ Count counts[kThreads];  // like the squares
  __shared__ double squares[kThreads];
  share<T, kApart>(common, piece_of(table), args);
  const Product product = product_of(common.row);
  counts[threadIdx.x] = {0, 0, 0};
  if constexpr (kApart) squares[threadIdx.x] = 0;
  if (common.scalars.skip != 0) {
    skip_piece<T, kApart>(common, args, squares);
  } else if (product == Product::kNone) {
    step_piece<T, kPower, false, kApart>(common, args, nullptr, squares);
  } else {
    if (product == Product::kSigned) {  // has its signs already: every further one is +1
      for (int i = static_cast<int>(threadIdx.x); i < kSignWords; i += kThreads) common.words[i] = 0;
      __syncthreads();
    } else {
      draw_signs(common.words, {args.seed, static_cast<uint32_t>(common.row.index), args.draw}, common.piece());
    }
    step_piece<T, kPower, true, kApart>(common, args, counts, squares);
  }
  const Count count = counts[threadIdx.x];
  double sums[3] = {count.trace, static_cast<double>(count.negative), static_cast<double>(count.finite)};
  block_sum(sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sums[0], sums[1], sums[2]};
  if constexpr (kApart) write_squares(squares, common.row.group, partial_squares);
}

// One block for each row.
static __global__ void __launch_bounds__(kThreads)
    finish_tallies_kernel(const Span* spans, const Tally* partials, Tally* tallies) {
  const Span span = spans[blockIdx.x];
  double sums[3] = {0, 0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < span.count; i += kThreads) {
    const Tally partial = partials[span.first + i];
    sums[0] += partial.trace;
    sums[1] += partial.negative;
    sums[2] += partial.finite;
  }
  block_sum(sums);
  if (threadIdx.x == 0) tallies[blockIdx.x] = {sums[0], sums[1], sums[2]};
}

}  // namespace sassha::cuda
