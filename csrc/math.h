// THE maths of SASSHA: scalar functions on host and device, one per line of the algorithm.
//
// Every elementary operation is rounded on its own (no contraction), which is what makes all backends equal bit for
// bit; sassha_fast/reference.py spells the same operations in the same order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "params.h"
#include "philox.h"

namespace sassha {

template <typename To, typename From>
SASSHA_HD To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To out;
  memcpy(&out, &value, sizeof(To));
  return out;
}

// Whether v is -0, with which an average D starts.
SASSHA_HD bool is_unknown(float v) { return bits_as<uint32_t>(v) == 0x80000000u; }
SASSHA_HD bool is_unknown(double v) { return bits_as<uint64_t>(v) == 0x8000000000000000u; }
SASSHA_HD bool is_finite(float v) { return fabsf(v) <= 3.40282346638528859812e+38f; }
SASSHA_HD bool is_finite(double v) { return fabs(v) <= 1.79769313486231570815e+308; }
SASSHA_HD float absolute(float v) { return fabsf(v); }
SASSHA_HD double absolute(double v) { return fabs(v); }
SASSHA_HD float root(float v) { return sqrtf(v); }
SASSHA_HD double root(double v) { return sqrt(v); }
SASSHA_HD float power_of(float v, float e) { return powf(v, e); }
SASSHA_HD double power_of(double v, double e) { return pow(v, e); }

SASSHA_HD int64_t address_in(const Row& row, int64_t column) { return reinterpret_cast<const int64_t*>(&row)[column]; }

// ---- probe: z in {-1, +1} ------------------------------------------------------------------------------------

// v * z, where z is -1 if the lowest bit of `bit` is set: a sign flip, exact for every v.
SASSHA_HD float times_sign(float v, uint32_t bit) { return bits_as<float>(bits_as<uint32_t>(v) ^ (bit << 31)); }
SASSHA_HD double times_sign(double v, uint32_t bit) {
  return bits_as<double>(bits_as<uint64_t>(v) ^ (static_cast<uint64_t>(bit) << 63));
}

// ---- ascent --------------------------------------------------------------------------------------------------

// eps = scale * g, with scale = rho / ||g||.
template <typename C>
SASSHA_HD C ascent(C scale, C g) {
  return scale * g;
}

// ASAM: eps = scale * g * x^2, with scale = rho / || |x| g ||.
template <typename C>
SASSHA_HD C adaptive_ascent(C scale, C g, C x) {
  return (scale * g) * (x * x);
}

// The next bfloat16 below or above v in magnitude, chosen with the probability that keeps the expectation.
SASSHA_HD float stochastic_bfloat16(float v, uint32_t noise) {
  const float rounded = bits_as<float>((bits_as<uint32_t>(v) + noise) & 0xFFFF0000u);
  return is_finite(v) && is_finite(rounded) ? rounded : v;
}

// The same on float16's grid: 13 discarded bits where it is normal, steps of 2^-24 where it is subnormal.
SASSHA_HD float stochastic_float16(float v, uint32_t noise) {
  const uint32_t bits = bits_as<uint32_t>(v);
  const float normal = bits_as<float>((bits + (noise & 0x1FFFu)) & 0xFFFFE000u);
  const float magnitude = absolute(v);
  const float steps = floorf(magnitude * 16777216.0f + static_cast<float>(noise) * 0.0000152587890625f);
  const float subnormal = bits_as<float>(bits_as<uint32_t>(steps * 5.9604644775390625e-08f) | (bits & 0x80000000u));
  const float rounded = magnitude >= 6.103515625e-05f ? normal : subnormal;
  return absolute(rounded) <= 65504.0f ? rounded : v;
}

// ---- gap -----------------------------------------------------------------------------------------------------

// GSAM: g2 - alpha * (the component of g orthogonal to g2).
template <typename C>
SASSHA_HD C descent(C g2, C g, C alpha, C share) {
  return g2 - alpha * (g - share * g2);
}

// ---- step ----------------------------------------------------------------------------------------------------

// Rounds word by word, so that it knows no field by name.
template <typename C>
SASSHA_HD StepScalars<C> rounded(const StepScalars<double>& s) {
  struct From {
    double word[kStepScalarWords];
  };
  struct To {
    C word[kStepScalarWords];
  };
  const From from = bits_as<From>(s);
  To to;
  for (int64_t i = 0; i < kStepScalarWords; ++i) to.word[i] = static_cast<C>(from.word[i]);
  return bits_as<StepScalars<C>>(to);
}

// m = beta1 m + (1 - beta1) g, with g clipped and free of any loss scale
template <typename C>
SASSHA_HD C momentum(C m, C g, const StepScalars<C>& s) {
  return s.beta1 * m + s.one_minus_beta1 * (s.grad_scale * g);
}

// |H|, H or H^2. Adding 0 makes +0 of -0, which would say that no curvature is known.
template <typename C>
SASSHA_HD C sampled(C h, Sample sample) {
  if (sample == kMagnitude) return absolute(h);
  return sample == kSquare ? h * h : h + C(0);
}

// Whether the batch had nothing to tell about an element, as about a token that is not in it: no gradient, no product.
template <typename C>
SASSHA_HD bool is_unseen(C product, C g, bool zero_is_seen) {
  return product == C(0) && g == C(0) && !zero_is_seen;
}

// D = beta2 D + (1 - beta2) sample. D starts at -0, which says that no curvature is known yet. The first sample weighs
// as much as if it had been there from the first refresh on.
template <typename C>
SASSHA_HD C curvature(C d, C sample, const StepScalars<C>& s) {
  const C averaged = s.beta2 * d + s.one_minus_beta2 * sample;
  return is_unknown(d) ? s.first * sample : averaged;
}

// Whether a refresh with this tally did not see every element of a row that has a product.
SASSHA_HD bool left_some_out(const Row& row, const Tally& tally) {
  return row.product != 0 && tally.seen < static_cast<double>(row.numel);
}

// Whether there are elements to give a mean to, and others to take it of.
SASSHA_HD bool has_mean(const Unseen& sums) { return sums.elements > 0 && sums.known > 0; }

// The curvature of elements that no refresh has seen: the mean of the others. Rounding to float32 hides the order in
// which they were added, which no two backends share.
SASSHA_HD float mean_curvature(const Unseen& sums) { return static_cast<float>(sums.curvature / sums.known); }

template <typename C>
SASSHA_HD C filled(C d, C product, C g, C mean) {
  return is_unknown(d) && is_unseen(product, g, false) ? mean : d;
}

// What Row::product holds on a refresh.
enum class Product {
  kNone,      // nothing: D stays
  kUnsigned,  // Hz; z is drawn again in registers
  kSigned,    // a sum of z * Hz over probes
  kProbed,    // the gradient at x + eps + h z
};

SASSHA_HD Product product_of(const Row& row) {
  if (row.product == 0) return Product::kNone;
  if (row.flags & kProbeGradient) return Product::kProbed;
  return row.flags & kSignedProduct ? Product::kSigned : Product::kUnsigned;
}

enum class Power { kHalf, kOne, kGeneral };

// max(D / (1 - beta2^t), floor); NaN stays NaN.
template <typename C>
SASSHA_HD C unbiased(C d, C bias2, const StepScalars<C>& s) {
  const C unfloored = d / bias2;
  return unfloored < s.floor ? s.floor : unfloored;
}

// unbiased^power + eps
template <Power kPower, typename C>
SASSHA_HD C raised(C unbiased, const StepScalars<C>& s) {
  if constexpr (kPower == Power::kHalf) {
    return root(unbiased) + s.eps;
  } else if constexpr (kPower == Power::kOne) {
    return unbiased + s.eps;
  } else {
    return power_of(unbiased, s.power) + s.eps;
  }
}

template <Power kPower, typename C>
SASSHA_HD C denominator(C d, C bias2, const StepScalars<C>& s) {
  return raised<kPower>(unbiased(d, bias2, s), s);
}

// v within [-bound, bound]; NaN stays NaN.
template <typename C>
SASSHA_HD C clipped(C v, C bound) {
  const C below = v > bound ? bound : v;
  return below < -bound ? -bound : below;
}

// x (1 - lr * wd) - step_size * m / denominator, and x itself where no curvature is known.
template <typename C>
SASSHA_HD C descend(C x, C m, C d, C denom, const StepScalars<C>& s) {
  const C moved = x * s.decay - s.step_size * clipped(m / denom, s.clip);
  return is_unknown(d) ? x : moved;
}

}  // namespace sassha
