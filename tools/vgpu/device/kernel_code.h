// Included by every translated kernel: checked memory, and instructions that C++ has no operator for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernel_abi.h"

namespace vgpu {

// ---- bits and numbers ---------------------------------------------------------------------------------------------

template <class To, class From>
static inline To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline float f32(uint32_t bits) { return cast<float>(bits); }
static inline double f64(uint64_t bits) { return cast<double>(bits); }
static inline uint32_t bits(float value) { return cast<uint32_t>(value); }
static inline uint64_t bits(double value) { return cast<uint64_t>(value); }
static inline float from_bf16(uint16_t half) { return f32(static_cast<uint32_t>(half) << 16); }
static inline uint16_t to_bf16(float value) {
  if (value != value) return 0x7fff;
  const uint32_t u = bits(value);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);  // to nearest, ties to even
}
static inline float from_f16(uint16_t half) { return static_cast<float>(cast<_Float16>(half)); }
static inline uint16_t to_f16(float value) {
  return value != value ? 0x7fff : cast<uint16_t>(static_cast<_Float16>(value));
}

// ---- memory -------------------------------------------------------------------------------------------------------

// Where the bytes of a global address are. `cache` belongs to the instruction and keeps the last allocation it met.
static inline uint8_t* global(Thread& thread, uint64_t address, uint32_t n, Access access, int line, Range& cache) {
  const Runtime& runtime = *thread.runtime;
  if (__builtin_expect(address & (n - 1), 0)) runtime.misaligned(thread, "global", address, n, access, line);
  const bool known = cache.epoch == runtime.epoch && address >= cache.begin && address + n <= cache.end;
  if (__builtin_expect(!known, 0)) runtime.find(thread, address, n, access, line, &cache);
  (access == Access::kStore ? thread.stored : thread.loaded) += n;
  return reinterpret_cast<uint8_t*>(address + cache.delta);
}

static inline uint8_t* shared(Thread& thread, uint64_t address, uint32_t n, Access access, int line) {
  address &= 0xffffffffu;
  if (__builtin_expect(address & (n - 1), 0)) thread.runtime->misaligned(thread, "shared", address, n, access, line);
  if (__builtin_expect(address + n > thread.shared_size, 0)) {
    thread.runtime->shared_overrun(thread, address, n, access, line);
  }
  return thread.shared + address;
}

template <class V>
static inline V get(const uint8_t* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V>
static inline void put(uint8_t* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// ---- instructions -------------------------------------------------------------------------------------------------

// Saturating, and 0 for NaN.
template <class I, class F>
static inline I to_int(F value) {
  if (value != value) return 0;
  if (value >= static_cast<F>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  if (value <= static_cast<F>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  return static_cast<I>(value);
}
// Subnormal numbers become 0.
template <class F>
static inline F flush(F value) {
  const bool tiny = std::fabs(value) < std::numeric_limits<F>::min() && value != 0;
  return tiny ? std::copysign(static_cast<F>(0), value) : value;
}
// A number wins over NaN, and -0 is less than +0.
template <class F>
static inline F least(F a, F b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class F>
static inline F greatest(F a, F b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = (selector >> (4 * i)) & 15;
    uint32_t byte = (both >> (8 * (choice & 7))) & 255;
    if (choice & 8) byte = (byte & 128) ? 255 : 0;  // its sign alone
    result |= byte << (8 * i);
  }
  return result;
}
// A function of three bits, given as a table of its eight values.
static inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int k = 0; k < 8; ++k) {
    if ((table >> k) & 1) result |= ((k & 4) ? a : ~a) & ((k & 2) ? b : ~b) & ((k & 1) ? c : ~c);
  }
  return result;
}
static inline uint32_t reverse_bits(uint32_t value) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= ((value >> i) & 1) << (31 - i);
  return result;
}
// bfe: `length` bits from `position` on; of a signed type the last one of them is its sign.
template <class U>
static inline U extract_bits(U value, uint32_t position, uint32_t length, bool is_signed) {
  constexpr uint32_t kBits = 8 * sizeof(U);
  position &= 255, length &= 255;
  U field = position >= kBits ? 0 : value >> position;
  const U mask = length >= kBits ? ~static_cast<U>(0) : (static_cast<U>(1) << length) - 1;
  if (!is_signed) return field & mask;
  if (length == 0) return 0;
  const uint32_t last = position + length - 1 > kBits - 1 ? kBits - 1 : position + length - 1;
  const bool negative = (value >> last) & 1;
  if (position >= kBits) return negative ? ~static_cast<U>(0) : 0;
  field = negative ? (field | ~mask) : (field & mask);
  if (negative && position) field |= ~static_cast<U>(0) << (kBits - position);
  return field;
}
// bfi: the lowest `length` bits of `field` at `position` of `value`.
template <class U>
static inline U insert_bits(U field, U value, uint32_t position, uint32_t length) {
  constexpr uint32_t kBits = 8 * sizeof(U);
  position &= 255, length &= 255;
  if (position >= kBits) return value;
  const U ones = length >= kBits ? ~static_cast<U>(0) : (static_cast<U>(1) << length) - 1;
  const U mask = ones << position;
  return ((field << position) & mask) | (value & ~mask);
}

// ---- warps --------------------------------------------------------------------------------------------------------

static inline uint32_t value_of_lane(Thread& thread, uint32_t mask, uint32_t value, uint32_t lane, int line) {
  return static_cast<uint32_t>(thread.runtime->shuffle(thread, ShuffleMode::kIndex, mask, value, lane, 31, line));
}
// redux: all lanes of the mask get the values of all, put together by `join`.
template <class V, class Join>
static inline V reduce_warp(Thread& thread, uint32_t mask, uint32_t value, int line, Join join) {
  V result = 0;
  bool first = true;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    const V other = static_cast<V>(value_of_lane(thread, mask, value, lane, line));
    result = first ? other : join(result, other);
    first = false;
  }
  return result;
}
// ldmatrix: lane 8 k + r has the address of row r of matrix k. Every lane gets two 16-bit elements of each matrix.
static inline void load_matrices(Thread& thread, uint32_t address, int count, bool transposed, int line,
                                 uint32_t* out) {
  const uint32_t lane = thread.lane;
  for (int k = 0; k < count; ++k) {
    if (!transposed) {
      const uint32_t row = value_of_lane(thread, 0xffffffffu, address, k * 8 + lane / 4, line);
      shared(thread, row, 16, Access::kLoad, line);
      out[k] = get<uint32_t>(shared(thread, row + lane % 4 * 4, 4, Access::kLoad, line));
      continue;
    }
    out[k] = 0;
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = value_of_lane(thread, 0xffffffffu, address, k * 8 + lane % 4 * 2 + half, line);
      shared(thread, row, 16, Access::kLoad, line);
      const uint8_t* from = shared(thread, row + lane / 4 * 2, 2, Access::kLoad, line);
      out[k] |= static_cast<uint32_t>(get<uint16_t>(from)) << (16 * half);
    }
  }
  thread.runtime->sync_warp(thread, 0xffffffffu, line);
}

}  // namespace vgpu
