// The scalar functions of csrc/formats.h over arrays, for tests/kernels/test_formats.py.
#include "formats.h"

using namespace sassha;

namespace {

template <typename T, int kBits>
void correct(int64_t n, const float* x, uint16_t* p, int16_t* r) {
  for (int64_t i = 0; i < n; ++i) {
    const auto found = corrected<kBits>(x[i], T{});
    p[i] = found.param.bits;
    r[i] = static_cast<int16_t>(found.correction);
  }
}

template <typename T, int kBits>
void weigh(int64_t n, const uint16_t* p, const int16_t* r, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = weight_of<kBits>(T{p[i]}, r[i]);
}

}  // namespace

extern "C" {

void encode_weights(int64_t n, int half, int bits, const float* x, uint16_t* p, int16_t* r) {
  if (half) {
    bits == 8 ? correct<Float16, 8>(n, x, p, r) : correct<Float16, 16>(n, x, p, r);
  } else {
    bits == 8 ? correct<BFloat16, 8>(n, x, p, r) : correct<BFloat16, 16>(n, x, p, r);
  }
}

void decode_weights(int64_t n, int half, int bits, const uint16_t* p, const int16_t* r, float* x) {
  if (half) {
    bits == 8 ? weigh<Float16, 8>(n, p, r, x) : weigh<Float16, 16>(n, p, r, x);
  } else {
    bits == 8 ? weigh<BFloat16, 8>(n, p, r, x) : weigh<BFloat16, 16>(n, p, r, x);
  }
}

// n elements in whole groups.
void encode_momenta(int64_t n, const float* m, const int32_t* noise, int8_t* codes, float* scales) {
  for (int64_t g = 0; g < n / kGroup; ++g) {
    uint32_t largest = 0;
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      largest = magnitude_bits(m[i]) > largest ? magnitude_bits(m[i]) : largest;
    }
    scales[g] = momentum_scale(largest);
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      codes[i] = static_cast<int8_t>(momentum_code(m[i], scales[g], static_cast<uint32_t>(noise[i])));
    }
  }
}

void decode_momenta(int64_t n, const int8_t* codes, const float* scales, float* m) {
  for (int64_t i = 0; i < n; ++i) m[i] = momentum_value(codes[i], scales[i / kGroup]);
}

void encode_curvatures(int64_t n, int levels, const float* d, const int32_t* noise, uint8_t* codes, uint16_t* scales) {
  for (int64_t g = 0; g < n / kGroup; ++g) {
    int32_t top = 0;
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      const int32_t level = curvature_level(d[i], static_cast<uint32_t>(noise[i]));
      top = level > top ? level : top;
    }
    scales[g] = curvature_scale(top).bits;
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      const int32_t level = curvature_level(d[i], static_cast<uint32_t>(noise[i]));
      codes[i] = static_cast<uint8_t>(curvature_code(d[i], level, top, levels));
    }
  }
}

void decode_curvatures(int64_t n, int levels, const uint8_t* codes, const uint16_t* scales, float* d) {
  for (int64_t i = 0; i < n; ++i) d[i] = curvature_value(codes[i], top_of(BFloat16{scales[i / kGroup]}), levels);
}

void encode16(int64_t n, const float* v, const int32_t* noise, uint16_t* m, uint16_t* d) {
  for (int64_t i = 0; i < n; ++i) {
    m[i] = momentum16(v[i], static_cast<uint32_t>(noise[i])).bits;
    d[i] = curvature16(v[i], static_cast<uint32_t>(noise[i])).bits;
  }
}
}
