// Loading and storing blocks of kSignsPerCall elements in the compute type. Included by the kernels of every
// instruction set, so nothing here has external linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../math.h"
#include "../types.h"

namespace sassha {
namespace {

#define SASSHA_MEMBER inline __attribute__((always_inline))

constexpr int64_t kBlock = kSignsPerCall;

// ---- blocks --------------------------------------------------------------------------------------------------

// The n elements at `from` in the compute type: the memory itself if it has that type, else converted into `room`.
template <typename T>
SASSHA_HD const Compute<T>* load(const T* from, Compute<T>* room, int64_t n) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    return from;
  } else {
    if (n < 0 || n > kBlock) __builtin_unreachable();
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, Float16>) {
      for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
      }
    }
#endif
    for (; i < n; ++i) room[i] = widen(from[i]);
    return room;
  }
}

template <typename T>
SASSHA_HD void store(T* to, const Compute<T>* from, int64_t n) {
  if (n < 0 || n > kBlock) __builtin_unreachable();
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
  }
#endif
  for (; i < n; ++i) to[i] = narrow<T>(from[i]);
}

// Copies n elements past the cache where the address allows it: the line is written whole, so reading it first
// would be wasted traffic.
template <typename T>
SASSHA_HD void stream_out(T* to, const T* from, int64_t n) {
#if defined(__AVX__)
  constexpr int64_t kLane = 32 / sizeof(T);
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0 && n % kLane == 0) {
    for (int64_t i = 0; i < n; i += kLane) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    }
    return;
  }
#endif
  memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
}

// Orders streamed writes before whatever follows the pass.
SASSHA_HD void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- walking over a piece -------------------------------------------------------------------------------------

template <typename T>
SASSHA_HD T* at(int64_t address, int64_t begin) {
  return reinterpret_cast<T*>(address) + begin;
}

// Calls f(offset, n) for each block of the piece; n is the constant kBlock except in the last one.
template <typename F>
SASSHA_HD void for_each_block(int64_t size, const F& f) {
  const int64_t tail = size % kBlock;
  for (int64_t i = 0; i < size - tail; i += kBlock) f(i, std::integral_constant<int64_t, kBlock>{});
  if (tail > 0) f(size - tail, tail);
}

// ---- noise ---------------------------------------------------------------------------------------------------

// Several calls of Philox side by side: the low half of every 64-bit lane holds a word of one call, the high half is
// of no account.
#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));

// The products of the low halves.
SASSHA_HD Words times(Words a, uint32_t b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(  // the mask alone keeps GCC from warning of its own header
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(a), _mm512_set1_epi64(static_cast<int64_t>(b))));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(static_cast<int64_t>(b))));
#elif defined(__x86_64__)
  return reinterpret_cast<Words>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), _mm_set1_epi64x(static_cast<int64_t>(b))));
#else
  return (a & 0xFFFFFFFFu) * b;
#endif
}

constexpr int64_t kDrawn = 2 * kBlock;  // elements whose bits are drawn at once

// Sixteen random bits for every element from `element` on: noise_bits of all their calls at once.
static inline __attribute__((noinline)) void draw_noise(const Stream& s, int64_t element, Domain domain,
                                                        uint16_t* noise) {
  constexpr int64_t kCalls = kDrawn / kNoisePerCall, kPerVector = kVectorBytes / 8;
  constexpr int64_t kSideBySide = 4;  // multiplications of one fill the time that those of the others take
  uint64_t words[2 * kCalls];
  for (int64_t call = 0; call < kCalls; call += kSideBySide * kPerVector) {
    Words c0[kSideBySide], c1[kSideBySide], c2[kSideBySide], c3[kSideBySide];
    for (int64_t v = 0; v < kSideBySide; ++v) {
      uint64_t number[kPerVector];
      for (int64_t i = 0; i < kPerVector; ++i) {
        number[i] = static_cast<uint64_t>(element) / kNoisePerCall + static_cast<uint64_t>(call + v * kPerVector + i);
      }
      memcpy(&c0[v], number, sizeof(number));
      c1[v] = c0[v] >> 32;
      c2[v] = Words{} + s.index;
      c3[v] = Words{} + s.draw;
    }
    uint32_t key0 = static_cast<uint32_t>(s.seed), key1 = static_cast<uint32_t>(s.seed >> 32) ^ domain;
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kSideBySide; ++v) {
        const Words even = times(c0[v], 0xD2511F53u), odd = times(c2[v], 0xCD9E8D57u);
        c0[v] = (odd >> 32) ^ c1[v] ^ key0;
        c2[v] = (even >> 32) ^ c3[v] ^ key1;
        c1[v] = odd;
        c3[v] = even;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    for (int64_t v = 0; v < kSideBySide; ++v) {
      const Words low = (c0[v] & 0xFFFFFFFFu) | (c1[v] << 32), high = (c2[v] & 0xFFFFFFFFu) | (c3[v] << 32);
      for (int64_t i = 0; i < kPerVector; ++i) {
        words[2 * (call + v * kPerVector + i)] = low[i];
        words[2 * (call + v * kPerVector + i) + 1] = high[i];
      }
    }
  }
  memcpy(noise, words, sizeof(words));  // the low half of a word is that of the even element
}

// The bits of one stream, block after block.
class Noise {
 public:
  Noise(const Stream& stream, Domain domain) : stream_(stream), domain_(domain) {}

  // Those of the block that begins at `element`, until the next call.
  SASSHA_MEMBER const uint16_t* of(int64_t element) {
    const int64_t first = element - element % kDrawn;
    if (first != first_) draw_noise(stream_, first_ = first, domain_, bits_);
    return bits_ + (element - first);
  }

 private:
  Stream stream_;
  Domain domain_;
  int64_t first_ = -1;
  uint16_t bits_[kDrawn];
};

// ---- signs and sums ------------------------------------------------------------------------------------------

// out = v * z for the n elements of one block of signs.
template <typename C, typename N>
SASSHA_HD void apply_signs(const C* v, C* out, N n, const Bits128& bits) {
  if constexpr (std::is_same_v<N, std::integral_constant<int64_t, kBlock>>) {
    for (int64_t w = 0; w < kBlock / 32; ++w) {
      const uint32_t word = bits.word[w];
      for (int64_t i = 0; i < 32; ++i) out[32 * w + i] = times_sign(v[32 * w + i], (word >> i) & 1u);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = times_sign(v[i], (bits.word[i / 32] >> (i % 32)) & 1u);
  }
}

// Rounds the values to the grid of a reduced type at random, so that their expectation is kept.
template <typename T, typename N>
SASSHA_HD void round_stochastically(float* values, N n, const uint16_t* noise) {
  for (int64_t i = 0; i < n; ++i) {
    values[i] = std::is_same_v<T, BFloat16> ? stochastic_bfloat16(values[i], noise[i])
                                            : stochastic_float16(values[i], noise[i]);
  }
}

// A sum of squares in double over 32 fixed lanes: element i goes to lane i % 32 on every instruction set, so the
// result is the same on all of them.
class SquareSum {
 public:
  template <typename C>
  SASSHA_MEMBER void add(const C* v, int64_t n) {
    const int64_t tail = n % (4 * kGroups);
    Double4 sums[kGroups];  // a local copy stays in registers
    for (int64_t group = 0; group < kGroups; ++group) sums[group] = lanes_[group];
    for (int64_t i = 0; i < n - tail; i += 4 * kGroups) {
      // Two lines a kilobyte ahead: converting fills the processor's window before it sees the next loads.
      const uintptr_t ahead = reinterpret_cast<uintptr_t>(v + i) + kAhead;
      __builtin_prefetch(reinterpret_cast<const void*>(ahead));
      __builtin_prefetch(reinterpret_cast<const void*>(ahead + 64));
#pragma GCC unroll 8
      for (int64_t group = 0; group < kGroups; ++group) {
        sums[group] = add_four_squares(sums[group], v + i + 4 * group);
      }
    }
    for (int64_t group = 0; group < kGroups; ++group) lanes_[group] = sums[group];
    for (int64_t lane = 0; lane < tail; ++lane) {
      const double x = v[n - tail + lane];
      lanes_[lane / 4][lane % 4] += x * x;
    }
  }

  SASSHA_MEMBER double total() const {
    double sum = 0;
    for (const Double4& group : lanes_) {
      for (int64_t lane = 0; lane < 4; ++lane) sum += group[lane];
    }
    return sum;
  }

 private:
  typedef double Double4 __attribute__((vector_size(32)));
  static constexpr int64_t kGroups = 8;
  static constexpr uintptr_t kAhead = 1024;

  static SASSHA_MEMBER Double4 add_four_squares(Double4 sum, const double* v) {
    Double4 x;
    memcpy(&x, v, sizeof(x));
    return sum + x * x;
  }

  static SASSHA_MEMBER Double4 add_four_squares(Double4 sum, const float* v) {
#if defined(__FMA__)  // the square of a float is exact in double, so fusing it with the addition changes no bit
    const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(v));
    return _mm256_fmadd_pd(x, x, sum);
#else
    const Double4 x = {v[0], v[1], v[2], v[3]};
    return sum + x * x;
#endif
  }

  Double4 lanes_[kGroups] = {};
};

// The sum of a block in the compute type, over 64 bytes of fixed lanes.
template <typename C, typename N>
SASSHA_HD C block_sum(const C* v, N n) {
  typedef C Lanes __attribute__((vector_size(32)));
  constexpr int64_t kLanes = 32 / sizeof(C);
  Lanes a = {}, b = {};
  const int64_t tail = n % (2 * kLanes);
  for (int64_t i = 0; i < n - tail; i += 2 * kLanes) {
    Lanes x, y;
    memcpy(&x, v + i, sizeof(Lanes));
    memcpy(&y, v + i + kLanes, sizeof(Lanes));
    a += x;
    b += y;
  }
  a += b;
  C sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += a[lane];
  for (int64_t i = n - tail; i < n; ++i) sum += v[i];
  return sum;
}

}  // namespace
}  // namespace sassha
