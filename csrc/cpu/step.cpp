// The update: restore, decay, both moving averages, bias correction, root, division, descent, in one pass. Of rows in
// the type that they are computed in; compact.cpp has those that have to be converted.
#include "launch.h"
#include "sample.h"

namespace sassha::SASSHA_ISA {
namespace {

// Adds up squares of m, or of |x| m for the x that was written.
template <typename C, typename N>
SASSHA_HD void add_squares(SquareSum& sum, const C* m, const C* x, N n, bool adaptive) {
  if (!adaptive) {
    sum.add(m, n);
    return;
  }
  C scaled[kBlock];
  for (int64_t i = 0; i < n; ++i) scaled[i] = absolute(x[i]) * m[i];
  sum.add(scaled, n);
}

Power power_of_row(double power) { return power == 0.5 ? Power::kHalf : power == 1.0 ? Power::kOne : Power::kGeneral; }

// The power is chosen for every block, so that the rest of the update is compiled once for all of them.
template <typename C, typename N, typename Bias>
SASSHA_HD void denominators(Power power, const C* d, C* denom, N n, const StepScalars<C>& s, const Bias& bias2) {
  const auto with_power = [&](auto tag) {
    for (int64_t i = 0; i < n; ++i) denom[i] = denominator<decltype(tag)::value>(d[i], bias2(i), s);
  };
  if (power == Power::kHalf) {
    with_power(std::integral_constant<Power, Power::kHalf>{});
  } else if (power == Power::kOne) {
    with_power(std::integral_constant<Power, Power::kOne>{});
  } else {
    with_power(std::integral_constant<Power, Power::kGeneral>{});
  }
}

template <typename C, Product kProduct>
Stepped step_of(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  const StepScalars<C> s = rounded<C>(args.scalars[row.cohort]);
  const Power power = power_of_row(args.scalars[row.cohort].power);  // before it is rounded
  C* param = at<C>(args.in_state ? row.backup : row.param, begin);
  const C* backup = at<C>(row.backup, begin);
  const C* grad = at<C>(row.grad, begin);
  const C* product = at<C>(row.product, begin);
  C* exp_avg = at<C>(row.exp_avg, begin);
  C* hessian = at<C>(row.hessian, begin);
  const Stream signs{args.seed, static_cast<uint32_t>(row.index), args.draw};
  Tally tally = {};
  SquareSum squares;
  if (s.skip != 0) {
    if (param != backup) memcpy(param, backup, static_cast<size_t>(size) * sizeof(C));
    if (args.in_state) {
      for_each_block(size, [&](int64_t offset, auto n) {
        add_squares(squares, exp_avg + offset, backup + offset, n, args.adaptive);
      });
    }
    return {tally, squares.total()};
  }
  for_each_block(size, [&](int64_t offset, auto n) {
    C denom[kBlock], next[kBlock];
    const C* x = backup + offset;
    const C* g = grad + offset;
    C* __restrict m = exp_avg + offset;
    C* __restrict d = hessian + offset;
    if constexpr (kProduct == Product::kNone) {
      denominators(power, d, denom, n, s, [&](int64_t) { return s.bias2; });
    } else {
      C h[kBlock];
      const C* raw = product + offset;
      const bool seen = curvature_sample<kProduct>(raw, g, h, n, signs, begin + offset, s, args.zero_is_seen, tally);
      if (sample_block(h, n, args.sample, seen)) {
        for (int64_t i = 0; i < n; ++i) d[i] = curvature(d[i], h[i], s);
        denominators(power, d, denom, n, s, [&](int64_t) { return s.bias2; });
      } else {
        for (int64_t i = 0; i < n; ++i) {  // a product that is not finite leaves D and its correction as they were
          const bool unseen = is_unseen(product_at<kProduct>(raw, g, i), g[i], args.zero_is_seen);
          const C refreshed = unseen ? d[i] * s.kept : curvature(d[i], h[i], s);
          d[i] = is_finite(h[i]) ? refreshed : d[i];
        }
        denominators(power, d, denom, n, s, [&](int64_t i) { return is_finite(h[i]) ? s.bias2 : s.bias2_kept; });
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      m[i] = momentum(m[i], g[i], s);
      next[i] = descend(x[i], m[i], d[i], denom[i], s);
    }
    if (stream) {  // never where x is kept in state
      stream_out(param + offset, next, n);
      return;
    }
    store(param + offset, next, n);
    if (args.in_state) add_squares(squares, m, param + offset, n, args.adaptive);
  });
  if (stream) stream_fence();
  return {tally, squares.total()};
}

template <typename C>
Stepped step_with(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  switch (args.refresh ? product_of(row) : Product::kNone) {
    case Product::kNone:
      return step_of<C, Product::kNone>(row, begin, size, args, stream);
    case Product::kUnsigned:
      return step_of<C, Product::kUnsigned>(row, begin, size, args, stream);
    case Product::kSigned:
      return step_of<C, Product::kSigned>(row, begin, size, args, stream);
    default:
      return step_of<C, Product::kProbed>(row, begin, size, args, stream);
  }
}

}  // namespace

Stepped step(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  const auto step_of_type = row.dtype == kFloat64 ? step_with<double> : step_with<float>;
  return step_of_type(row, begin, size, args, stream);
}

}  // namespace sassha::SASSHA_ISA
