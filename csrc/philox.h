// Philox4x32-10 (Salmon et al., SC'11) on host and device, and the streams drawn from it.
//
// Every random bit is a pure function of (seed, parameter index, draw, logical element index). It does not depend
// on backend, device, thread count, chunking or sharding, and is never stored.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SASSHA_HD __host__ __device__ __forceinline__
#else
// Internal linkage: the CPU kernels compile these headers once per instruction set, and the linker must not merge
// the copies.
#define SASSHA_HD static inline __attribute__((always_inline))
#endif

namespace sassha {

constexpr int64_t kSignsPerCall = 128;  // one bit per element
constexpr int64_t kNoisePerCall = 8;    // sixteen bits per element

// Keeps signs, the rounding of an ascent, of an update, of m and of D on different keys.
enum Domain : uint32_t {
  kSigns = 0,
  kAscentNoise = 0x53525244u,
  kUpdateNoise = 0x55504454u,
  kMomentumNoise = 0x4D4E4F49u,
  kCurvatureNoise = 0x434E4F49u,
};

struct Bits128 {
  uint32_t word[4];
};

SASSHA_HD Bits128 philox4x32_10(uint64_t block, uint32_t stream, uint32_t draw, uint32_t key0, uint32_t key1) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = stream, c3 = draw;
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t odd = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(odd >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(even >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(odd);
    c3 = static_cast<uint32_t>(even);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return Bits128{{c0, c1, c2, c3}};
}

// Identifies the numbers of one parameter in one draw.
struct Stream {
  uint64_t seed;
  uint32_t index;
  uint32_t draw;
};

// Signs of elements 128 * block to 128 * block + 127: bit e % 32 of word (e % 128) / 32, set for -1.
SASSHA_HD Bits128 sign_bits(const Stream& s, int64_t block) {
  return philox4x32_10(static_cast<uint64_t>(block), s.index, s.draw, static_cast<uint32_t>(s.seed),
                       static_cast<uint32_t>(s.seed >> 32));
}

// Sixteen bits each for elements 8 * block to 8 * block + 7: the low half of word (e % 8) / 2, then the high half.
SASSHA_HD Bits128 noise_bits(const Stream& s, int64_t block, Domain domain) {
  return philox4x32_10(static_cast<uint64_t>(block), s.index, s.draw, static_cast<uint32_t>(s.seed),
                       static_cast<uint32_t>(s.seed >> 32) ^ domain);
}

}  // namespace sassha
