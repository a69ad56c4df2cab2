// The update: restore, decay, both moving averages, bias correction, root, division, descent, in one pass.
#include "block.h"
#include "launch.h"

namespace sassha::SASSHA_ISA {
namespace {

// Hz of one element, up to its scale.
template <Product kProduct, typename C>
SASSHA_HD C product_at(const C* product, const C* g, int64_t i) {
  return kProduct == Product::kProbed ? product[i] - g[i] : product[i];
}

// One block of z * Hz, averaged over probes, and what it adds to the tally. Returns whether all of it is finite and was
// seen.
template <Product kProduct, typename C, typename N>
SASSHA_HD bool curvature_sample(const C* product, const C* g, C* h, N n, const Stream& stream, int64_t element,
                                const StepScalars<C>& s, bool zero_is_seen, Tally& tally) {
  if constexpr (kProduct == Product::kSigned) {
    for (int64_t i = 0; i < n; ++i) h[i] = product[i] * s.product_scale;
  } else {
    C hz[kBlock];
    for (int64_t i = 0; i < n; ++i) hz[i] = product_at<kProduct>(product, g, i) * s.product_scale;
    apply_signs(hz, h, n, sign_bits(stream, element / kBlock));
  }
  int32_t seen = 0, negative = 0;
  const C sum = block_sum(h, n);
  for (int64_t i = 0; i < n; ++i) {
    seen += is_finite(h[i]) && !is_unseen(product_at<kProduct>(product, g, i), g[i], zero_is_seen) ? 1 : 0;
  }
  for (int64_t i = 0; i < n; ++i) negative += is_finite(h[i]) && h[i] < 0 ? 1 : 0;
  if (is_finite(sum)) {  // then every term is
    tally.trace += sum;
  } else {
    for (int64_t i = 0; i < n; ++i) tally.trace += is_finite(h[i]) ? h[i] : C(0);
  }
  tally.negative += negative;
  tally.seen += seen;
  return seen == n;
}

// What a block of products adds to D, in their place. Returns whether all of it is finite and was seen.
template <typename C, typename N>
SASSHA_HD bool sample_block(C* h, N n, Sample sample, bool seen) {
  if (sample == kMagnitude) {
    for (int64_t i = 0; i < n; ++i) h[i] = sampled(h[i], kMagnitude);
  } else if (sample == kSigned) {
    for (int64_t i = 0; i < n; ++i) h[i] = sampled(h[i], kSigned);
  } else {
    for (int64_t i = 0; i < n; ++i) h[i] = sampled(h[i], kSquare);
    return seen && is_finite(block_sum(h, n));  // squares may overflow
  }
  return seen;
}

// Adds up squares of m, or of |x| m for the x that was written.
template <typename T, typename N>
SASSHA_HD void add_squares(SquareSum& sum, const Compute<T>* m, const T* x, N n, bool adaptive) {
  if (!adaptive) {
    sum.add(m, n);
    return;
  }
  Compute<T> room[kBlock], scaled[kBlock];
  const Compute<T>* weight = load(x, room, n);
  for (int64_t i = 0; i < n; ++i) scaled[i] = absolute(weight[i]) * m[i];
  sum.add(scaled, n);
}

template <typename T, Power kPower, Product kProduct>
Stepped step_of(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  using C = Compute<T>;
  const StepScalars<C> s = rounded<C>(args.scalars[row.cohort]);
  T* param = at<T>(args.in_state ? row.backup : row.param, begin);
  const T* backup = at<T>(row.backup, begin);
  const T* grad = at<T>(row.grad, begin);
  const T* product = at<T>(row.product, begin);
  C* exp_avg = at<C>(row.exp_avg, begin);
  C* hessian = at<C>(row.hessian, begin);
  const Stream signs{args.seed, static_cast<uint32_t>(row.index), args.draw};
  Tally tally = {};
  SquareSum squares;
  if (s.skip != 0) {
    if (param != backup) memcpy(param, backup, static_cast<size_t>(size) * sizeof(T));
    if (args.in_state) {
      for_each_block(size, [&](int64_t offset, auto n) {
        add_squares(squares, exp_avg + offset, backup + offset, n, args.adaptive);
      });
    }
    return {tally, squares.total()};
  }
  for_each_block(size, [&](int64_t offset, auto n) {
    C x_room[kBlock], g_room[kBlock], p_room[kBlock], denom[kBlock], next[kBlock];
    const C* x = load(backup + offset, x_room, n);
    const C* g = load(grad + offset, g_room, n);
    C* __restrict m = exp_avg + offset;
    C* __restrict d = hessian + offset;
    if constexpr (kProduct == Product::kNone) {
      for (int64_t i = 0; i < n; ++i) denom[i] = denominator<kPower>(d[i], s.bias2, s);
    } else {
      C h[kBlock];
      const C* raw = load(product + offset, p_room, n);
      const bool seen = curvature_sample<kProduct>(raw, g, h, n, signs, begin + offset, s, args.zero_is_seen, tally);
      if (sample_block(h, n, args.sample, seen)) {
        for (int64_t i = 0; i < n; ++i) {
          d[i] = curvature(d[i], h[i], s);
          denom[i] = denominator<kPower>(d[i], s.bias2, s);
        }
      } else {
        for (int64_t i = 0; i < n; ++i) {  // a product that is not finite leaves D and its correction as they were
          const bool unseen = is_unseen(product_at<kProduct>(raw, g, i), g[i], args.zero_is_seen);
          const C refreshed = unseen ? d[i] * s.kept : curvature(d[i], h[i], s);
          d[i] = is_finite(h[i]) ? refreshed : d[i];
          denom[i] = denominator<kPower>(d[i], is_finite(h[i]) ? s.bias2 : s.bias2_kept, s);
        }
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      m[i] = momentum(m[i], g[i], s);
      next[i] = descend(x[i], m[i], d[i], denom[i], s);
    }
    if constexpr (std::is_same_v<T, C>) {
      if (stream) {  // never where x is kept in state
        stream_out(param + offset, next, n);
        return;
      }
    } else if (args.noise_draw != nullptr) {
      const Stream noise{args.seed, static_cast<uint32_t>(row.index), static_cast<uint32_t>(*args.noise_draw)};
      round_stochastically<T>(next, n, noise, begin + offset, kUpdateNoise);
    }
    store(param + offset, next, n);
    if (args.in_state) add_squares(squares, m, param + offset, n, args.adaptive);
  });
  if (stream) stream_fence();
  return {tally, squares.total()};
}

template <typename T, Power kPower>
Stepped step_with_power(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  switch (args.refresh ? product_of(row) : Product::kNone) {
    case Product::kNone:
      return step_of<T, kPower, Product::kNone>(row, begin, size, args, stream);
    case Product::kUnsigned:
      return step_of<T, kPower, Product::kUnsigned>(row, begin, size, args, stream);
    case Product::kSigned:
      return step_of<T, kPower, Product::kSigned>(row, begin, size, args, stream);
    default:
      return step_of<T, kPower, Product::kProbed>(row, begin, size, args, stream);
  }
}

}  // namespace

Stepped step(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  const double power = args.scalars[row.cohort].power;
  return with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (power == 0.5) return step_with_power<T, Power::kHalf>(row, begin, size, args, stream);
    if (power == 1.0) return step_with_power<T, Power::kOne>(row, begin, size, args, stream);
    return step_with_power<T, Power::kGeneral>(row, begin, size, args, stream);
  });
}

}  // namespace sassha::SASSHA_ISA
