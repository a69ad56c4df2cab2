// Element types, their conversion to and from the type they are computed in, and dispatch on them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "math.h"

namespace sassha {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// float64 parameters are computed and kept in float64, all others in float32.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- scalar conversions, round to nearest even ---------------------------------------------------------------

SASSHA_HD float widen(float v) { return v; }
SASSHA_HD double widen(double v) { return v; }
SASSHA_HD float widen(BFloat16 v) { return bits_as<float>(static_cast<uint32_t>(v.bits) << 16); }
SASSHA_HD float widen(Float16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(v.bits & 0x7FFFu) << 13;
  // Rebias by a multiplication, which also normalises subnormals; inf and NaN need their exponent filled.
  const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7F800000u;
  return bits_as<float>(sign | (magnitude >= 0x0F800000u ? special : finite));
}

SASSHA_HD BFloat16 to_bfloat16(float v) {
  const uint32_t bits = bits_as<uint32_t>(v);
  const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return BFloat16{static_cast<uint16_t>(v == v ? nearest : 0x7FC0u)};
}

SASSHA_HD Float16 to_float16(float v) {
  const uint32_t bits = bits_as<uint32_t>(v);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // too large, inf or NaN
    half = magnitude > 0x7F800000u ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: let the addition round at 2^-24
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    const uint32_t rebased = magnitude - 0x38000000u;
    half = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
  }
  return Float16{static_cast<uint16_t>(sign | half)};
}

template <typename T>
SASSHA_HD T narrow(Compute<T> v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(v);
  } else if constexpr (std::is_same_v<T, Float16>) {
    return to_float16(v);
  } else {
    return v;
  }
}

// ---- dispatch ------------------------------------------------------------------------------------------------

template <typename T>
struct Tag {
  using type = T;
};

// Calls f(Tag<T>{}) with the element type of a DType.
template <typename F>
static inline __attribute__((always_inline)) auto with_dtype(int64_t dtype, const F& f) {
  switch (dtype) {
    case kFloat64:
      return f(Tag<double>{});
    case kBFloat16:
      return f(Tag<BFloat16>{});
    case kFloat16:
      return f(Tag<Float16>{});
    default:
      return f(Tag<float>{});
  }
}

// Bytes of an element of a DType.
SASSHA_HD int64_t item_size(int64_t dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

}  // namespace sassha
