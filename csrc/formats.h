// How state and weights are stored in fewer bits: scalar functions on host and device, the twins of
// sassha_fast/formats.py, which has the equations.
//
// A group is kGroup elements that lie side by side in memory, counted from the beginning of the tensor; the last one
// may be shorter. `noise` is sixteen random bits (noise_bits in kMomentumNoise or kCurvatureNoise); kNearest in its
// place rounds to nearest. Encoding what was decoded gives the same code and scale back, whatever the noise.
#pragma once

#include "types.h"

namespace sassha {

constexpr int64_t kGroup = 32;
constexpr uint32_t kNearest = 0x8000u;

// ---- Row::format ---------------------------------------------------------------------------------------------

enum class State : int64_t { kFull = 0, k16 = 1, k8 = 2 };       // of m and D
enum class Correction : int64_t { kNone = 0, k8 = 1, k16 = 2 };  // of a bfloat16 or float16 parameter
constexpr int64_t kFormatSigned = 16;                            // 8-bit codes of D have a sign

SASSHA_HD State state_of(int64_t format) { return static_cast<State>(format & 3); }
SASSHA_HD Correction correction_of(int64_t format) { return static_cast<Correction>((format >> 2) & 3); }

// Whether parameters of a dtype are stored so.
SASSHA_HD bool takes_format(int64_t dtype, int64_t format) {
  const int64_t state = format & 3, correction = (format >> 2) & 3;
  const bool known = format >= 0 && format < 2 * kFormatSigned && state < 3 && correction < 3;
  const bool is_signed = (format & kFormatSigned) != 0;
  return known && (state == 2 || !is_signed) && (correction == 0 || dtype >= kBFloat16) &&
         (format == 0 || dtype != kFloat64);
}

// Whether rows of a format have an address in a column that depends on it.
SASSHA_HD bool has_column(int64_t format, int64_t column) {
  if (column == kCorrection) return correction_of(format) != Correction::kNone;
  return state_of(format) == State::k8 || (column != kExpAvgScale && column != kHessianScale);
}

// The largest code of D, of positive values.
SASSHA_HD int32_t levels_of(int64_t format) { return format & kFormatSigned ? 127 : 255; }

// ---- m in 8 bits: s c / (254 - |c|) --------------------------------------------------------------------------

// The bits of a magnitude order as numbers do, and what is not finite comes last: a group's largest is the largest of
// these.
SASSHA_HD uint32_t magnitude_bits(float v) { return bits_as<uint32_t>(v) & 0x7FFFFFFFu; }

// The scale of a group. With a value that is not finite it is NaN, and so are all values of the group.
SASSHA_HD float momentum_scale(uint32_t largest) {
  return bits_as<float>(largest < 0x7F800000u ? largest : 0x7FC00000u);
}

// 254 - 254 / (1 + |m| / s), rounded to 1/4096 and then by noise.
SASSHA_HD int32_t momentum_code(float m, float scale, uint32_t noise) {
  const float a = scale > 0.0f ? absolute(m) / scale : 0.0f;
  const float t = (1040384.0f - 1040384.0f / (1.0f + a)) + 0.5f;
  const int32_t code = (static_cast<int32_t>(t) + static_cast<int32_t>(noise >> 4)) >> 12;
  return m < 0.0f ? -code : code;
}

SASSHA_HD float momentum_value(int32_t code, float scale) {
  const float c = static_cast<float>(code);
  return scale * (c / (254.0f - absolute(c)));
}

// ---- D in 8 bits: levels of three bits of mantissa, counted down from the largest of the group ----------------

constexpr int32_t kUnknownCode = 0, kZeroCode = 1, kLeastCode = 2;
constexpr int32_t kLargestLevel = 0x7F7;

// The level of a value, 0 for one that is 0 or unknown.
SASSHA_HD int32_t curvature_level(float d, uint32_t noise) {
  const uint32_t bits = magnitude_bits(d);
  const int32_t level = static_cast<int32_t>((bits + (noise << 4)) >> 20);
  const int32_t positive = level < 1 ? 1 : level > kLargestLevel ? kLargestLevel : level;
  return bits == 0 ? 0 : positive;
}

// `top` is the largest level of the group.
SASSHA_HD uint32_t curvature_code(float d, int32_t level, int32_t top, int32_t levels) {
  const int32_t field = level - top + levels;
  const int32_t positive = field < kLeastCode ? kLeastCode : field;
  const int32_t code = levels == 127 && d < 0.0f ? positive + 128 : positive;
  const int32_t nothing = is_unknown(d) ? kUnknownCode : kZeroCode;
  return static_cast<uint32_t>(magnitude_bits(d) == 0 ? nothing : code);
}

SASSHA_HD float curvature_value(uint32_t code, int32_t top, int32_t levels) {
  const int32_t field = static_cast<int32_t>(code) & levels;
  const int32_t level = top - levels + field;
  const int32_t known = level < 1 ? 1 : level > kLargestLevel ? kLargestLevel : level;
  const uint32_t sign = static_cast<int32_t>(code) > levels ? 0x80000000u : 0u;
  const uint32_t nothing = field == kUnknownCode ? 0x80000000u : 0u;
  return bits_as<float>(field < kLeastCode ? nothing : (static_cast<uint32_t>(known) << 20) | sign);
}

// The scale of a group is its largest value, which bfloat16 holds exactly.
SASSHA_HD BFloat16 curvature_scale(int32_t top) { return BFloat16{static_cast<uint16_t>(top << 4)}; }
SASSHA_HD int32_t top_of(BFloat16 scale) { return scale.bits >> 4; }

// ---- m and D in 16 bits: bfloat16 ----------------------------------------------------------------------------

SASSHA_HD BFloat16 momentum16(float m, uint32_t noise) { return to_bfloat16(stochastic_bfloat16(m, noise)); }

// Known curvature does not become 0, nor -0, which says that none is known.
SASSHA_HD BFloat16 curvature16(float d, uint32_t noise) {
  const BFloat16 rounded = momentum16(d, noise);
  const bool lost = magnitude_bits(d) != 0 && (rounded.bits & 0x7FFFu) == 0;
  return BFloat16{static_cast<uint16_t>(rounded.bits | (lost ? 1u : 0u))};
}

// ---- x in 24 or 32 bits: a parameter and a correction of kBits bits beside it ---------------------------------

template <typename T>
struct Corrected {
  T param;
  int32_t correction;
};

template <int kBits>
SASSHA_HD Corrected<BFloat16> corrected(float x, BFloat16) {
  uint32_t word = bits_as<uint32_t>(x);
  if constexpr (kBits == 8) word = (word + 0x80u) & 0xFFFFFF00u;
  const uint32_t upper = (word + 0x8000u) & 0xFFFF0000u;
  const int32_t rest = static_cast<int32_t>(word - upper) >> (16 - kBits);  // nothing is shifted out
  const bool finite = is_finite(x) && is_finite(bits_as<float>(upper));
  const BFloat16 nearest{static_cast<uint16_t>(upper >> 16)};
  return {finite ? nearest : to_bfloat16(x), finite ? rest : 0};
}

template <int kBits>
SASSHA_HD Corrected<Float16> corrected(float x, Float16) {
  constexpr float kHalf = static_cast<float>(1 << (kBits - 1));
  const uint32_t word = magnitude_bits(x);
  const float magnitude = bits_as<float>(word);
  const float normal = bits_as<float>((word + 0x1000u) & 0xFFFFE000u);
  const float subnormal = floorf(magnitude * 16777216.0f + 0.5f) * 5.9604644775390625e-08f;
  const float p = magnitude >= 6.103515625e-05f ? normal : subnormal;
  const bool finite = p <= 65504.0f;
  const uint32_t exponent = bits_as<uint32_t>(p) >> 23;
  const float places = bits_as<float>((264u - (exponent < 113u ? 113u : exponent)) << 23);  // one over the last place
  const float steps = floorf((magnitude - p) * places * (2.0f * kHalf) + 0.5f);
  const float rest = steps < -kHalf ? -kHalf : steps > kHalf - 1.0f ? kHalf - 1.0f : steps;
  const Float16 nearest = to_float16(finite ? times_sign(p, bits_as<uint32_t>(x) >> 31) : x);
  return {nearest, static_cast<int32_t>(finite ? rest : 0.0f)};
}

// x of a parameter and its correction. Whoever sets a parameter to 0 leaves its correction as it was: there is nothing
// below 0 to go to.
template <int kBits>
SASSHA_HD float weight_of(BFloat16 param, int32_t correction) {
  const int32_t magnitude = (static_cast<int32_t>(param.bits & 0x7FFFu) << 16) + correction * (1 << (16 - kBits));
  const uint32_t word = static_cast<uint32_t>(magnitude < 0 ? 0 : magnitude);
  const float wide = widen(param);
  return is_finite(wide) ? bits_as<float>(word | (static_cast<uint32_t>(param.bits & 0x8000u) << 16)) : wide;
}

template <int kBits>
SASSHA_HD float weight_of(Float16 param, int32_t correction) {
  const float wide = widen(param);
  const uint32_t exponent = magnitude_bits(wide) >> 23;
  const float place = bits_as<float>(((exponent < 113u ? 113u : exponent) - 10u) << 23);
  const float part = static_cast<float>(correction) * (1.0f / static_cast<float>(1 << kBits));
  const float magnitude = absolute(wide) + part * place;
  const float x = times_sign(magnitude < 0.0f ? 0.0f : magnitude, bits_as<uint32_t>(wide) >> 31);
  return is_finite(wide) ? x : wide;
}

}  // namespace sassha
