// Blocks of state and weights in fewer bits: decoded to float32, and encoded again (formats.h).
//
// A block in float32 is always whole: what is missing at the end of a tensor is 0, which no group minds. So every loop
// has the length kBlock or kGroup, and the format is looked at once for each block, not by further copies of the code.
#pragma once

#include "../formats.h"
#include "block.h"

namespace sassha {
namespace {

#define SASSHA_BLOCK static inline __attribute__((noinline))

constexpr int64_t kGroupsOfBlock = kBlock / kGroup;
static_assert(kBlock % kGroup == 0, "no group crosses a block");

// Where n elements of a row begin.
struct Place {
  const Row& row;
  int64_t element;
  int64_t n;  // kBlock, or less at the end of the tensor

  template <typename T>
  SASSHA_MEMBER T* in(int64_t address) const {
    return at<T>(address, element);
  }
  int64_t groups() const { return (n + kGroup - 1) / kGroup; }
};

// ---- whole blocks ---------------------------------------------------------------------------------------------

// The elements from `from` on, followed by zeros in `room` if they are fewer than a block.
template <typename T>
SASSHA_HD const T* whole(const T* from, T* room, int64_t n) {
  if (n == kBlock) return from;
  memset(room, 0, kBlock * sizeof(T));
  memcpy(room, from, static_cast<size_t>(n) * sizeof(T));
  return room;
}

// A block to be written at `to`: the memory itself, or `room`, of which n elements are copied.
template <typename T>
struct Written {
  T* to;
  int64_t n;
  T room[kBlock];

  SASSHA_MEMBER T* begin() { return n == kBlock ? to : room; }
  SASSHA_MEMBER void end() const {
    if (n != kBlock) memcpy(to, room, static_cast<size_t>(n) * sizeof(T));
  }
};

// Calls f(Tag<T>{}) with the element type of a parameter that is not float64, which is never stored in fewer bits.
template <typename F>
SASSHA_HD void with_stored_dtype(int64_t dtype, const F& f) {
  if (dtype == kBFloat16) {
    f(Tag<BFloat16>{});
  } else if (dtype == kFloat16) {
    f(Tag<Float16>{});
  } else {
    f(Tag<float>{});
  }
}

// ---- gradients, products and parameters as they are ------------------------------------------------------------

SASSHA_BLOCK void load_values(const Place& place, int64_t address, float* values) {
  with_stored_dtype(place.row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T room[kBlock];
    const T* from = whole(place.in<T>(address), room, place.n);
    if constexpr (std::is_same_v<T, float>) {
      memcpy(values, from, kBlock * sizeof(float));
    } else {
      load(from, values, kBlock);
    }
  });
}

// Rounds to nearest. With `stream` it writes past the cache.
SASSHA_BLOCK void store_values(const Place& place, int64_t address, const float* values, bool stream) {
  with_stored_dtype(place.row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = place.in<T>(address);
    T room[kBlock];
    store(room, values, kBlock);
    if (stream) {
      stream_out(to, room, place.n);
    } else {
      memcpy(to, room, static_cast<size_t>(place.n) * sizeof(T));
    }
  });
}

// Rounds values at random to the grid of the parameter, if it is a reduced one.
SASSHA_BLOCK void round_to_parameter(const Place& place, float* values, Noise& noise) {
  constexpr std::integral_constant<int64_t, kBlock> kAll;
  if (place.row.dtype == kBFloat16) round_stochastically<BFloat16>(values, kAll, noise.of(place.element));
  if (place.row.dtype == kFloat16) round_stochastically<Float16>(values, kAll, noise.of(place.element));
}

// ---- x ---------------------------------------------------------------------------------------------------------

// Calls f(parameter, correction, bits) with a value of their types and std::integral_constant.
template <typename F>
SASSHA_HD void with_correction(const Row& row, const F& f) {
  constexpr std::integral_constant<int, 8> kEight;
  constexpr std::integral_constant<int, 16> kSixteen;
  const bool eight = correction_of(row.format) == Correction::k8;
  if (row.dtype == kBFloat16) {
    eight ? f(BFloat16{}, int8_t{}, kEight) : f(BFloat16{}, int16_t{}, kSixteen);
  } else {
    eight ? f(Float16{}, int8_t{}, kEight) : f(Float16{}, int16_t{}, kSixteen);
  }
}

// x of the parameters at `address`, with their corrections if the row has any.
SASSHA_BLOCK void load_weight(const Place& place, int64_t address, float* x) {
  if (correction_of(place.row.format) == Correction::kNone) return load_values(place, address, x);
  with_correction(place.row, [&](auto param, auto correction, auto bits) {
    using T = decltype(param);
    using R = decltype(correction);
    T room[kBlock];
    R rest[kBlock];
    const T* p = whole(place.in<T>(address), room, place.n);
    const R* r = whole(place.in<R>(place.row.correction), rest, place.n);
    for (int64_t i = 0; i < kBlock; ++i) x[i] = weight_of<decltype(bits)::value>(p[i], static_cast<int32_t>(r[i]));
  });
}

// The nearest parameters, and with them the corrections if the row has any.
SASSHA_BLOCK void store_weight(const Place& place, int64_t address, const float* x, bool stream) {
  if (correction_of(place.row.format) == Correction::kNone) return store_values(place, address, x, stream);
  with_correction(place.row, [&](auto param, auto correction, auto bits) {
    using T = decltype(param);
    using R = decltype(correction);
    T params[kBlock];
    R rests[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      const Corrected<T> split = corrected<decltype(bits)::value>(x[i], T{});
      params[i].bits = split.param.bits;
      rests[i] = static_cast<R>(split.correction);
    }
    const size_t n = static_cast<size_t>(place.n);
    if (stream) {
      stream_out(place.in<T>(address), params, place.n);
    } else {
      memcpy(place.in<T>(address), params, n * sizeof(T));
    }
    memcpy(place.in<R>(place.row.correction), rests, n * sizeof(R));
  });
}

// ---- groups ----------------------------------------------------------------------------------------------------

// The scales of a block's groups; those of groups beyond the end are 0.
template <typename T>
SASSHA_HD void load_scales(const Place& place, int64_t address, T* scales) {
  memset(scales, 0, kGroupsOfBlock * sizeof(T));
  memcpy(scales, at<T>(address, place.element / kGroup), static_cast<size_t>(place.groups()) * sizeof(T));
}

template <typename T>
SASSHA_HD void store_scales(const Place& place, int64_t address, const T* scales) {
  memcpy(at<T>(address, place.element / kGroup), scales, static_cast<size_t>(place.groups()) * sizeof(T));
}

// Calls f(group, i) for every element of a block. Its loops have one length and one width of element each: codes are
// packed to bytes and widened from them in loops of their own, or the compiler takes half of the lanes.
template <typename F>
SASSHA_HD void for_each_in_groups(const F& f) {
  for (int64_t group = 0; group < kGroupsOfBlock; ++group) {
    const int64_t begin = group * kGroup;
    for (int64_t i = 0; i < kGroup; ++i) f(group, begin + i);
  }
}

// The largest value(i) of a group, at least 0.
template <typename T, typename F>
SASSHA_HD T largest_of(int64_t group, const F& value) {
  T largest = 0;
  for (int64_t i = 0; i < kGroup; ++i) {
    const T v = value(group * kGroup + i);
    largest = v > largest ? v : largest;
  }
  return largest;
}

// The codes of a block of m or D, as numbers.
template <typename T>
SASSHA_HD void load_codes(const Place& place, int64_t address, int32_t* codes) {
  T room[kBlock];
  const T* from = whole(place.in<T>(address), room, place.n);
  for (int64_t i = 0; i < kBlock; ++i) codes[i] = from[i];
}

template <typename T>
SASSHA_HD void store_codes(const Place& place, int64_t address, const int32_t* codes) {
  Written<T> written{place.in<T>(address), place.n, {}};
  T* __restrict to = written.begin();
  for (int64_t i = 0; i < kBlock; ++i) to[i] = static_cast<T>(codes[i]);
  written.end();
}

// ---- m ---------------------------------------------------------------------------------------------------------

SASSHA_BLOCK void load_momentum(const Place& place, float* m) {
  const Row& row = place.row;
  if (state_of(row.format) == State::kFull) {
    float room[kBlock];
    memcpy(m, whole(place.in<float>(row.exp_avg), room, place.n), kBlock * sizeof(float));
  } else if (state_of(row.format) == State::k16) {
    BFloat16 room[kBlock];
    load(whole(place.in<BFloat16>(row.exp_avg), room, place.n), m, kBlock);
  } else {
    int32_t codes[kBlock];
    float scales[kGroupsOfBlock];
    load_codes<int8_t>(place, row.exp_avg, codes);
    load_scales(place, row.exp_avg_scale, scales);
    for_each_in_groups([&](int64_t group, int64_t i) { m[i] = momentum_value(codes[i], scales[group]); });
  }
}

SASSHA_BLOCK void store_momentum(const Place& place, const float* m, const uint16_t* noise) {
  const Row& row = place.row;
  if (state_of(row.format) == State::kFull) {
    memcpy(place.in<float>(row.exp_avg), m, static_cast<size_t>(place.n) * sizeof(float));
  } else if (state_of(row.format) == State::k16) {
    Written<BFloat16> written{place.in<BFloat16>(row.exp_avg), place.n, {}};
    BFloat16* __restrict values = written.begin();
    for (int64_t i = 0; i < kBlock; ++i) values[i] = momentum16(m[i], noise[i]);
    written.end();
  } else {
    float scales[kGroupsOfBlock];
    int32_t codes[kBlock];
    for (int64_t group = 0; group < kGroupsOfBlock; ++group) {
      scales[group] = momentum_scale(largest_of<uint32_t>(group, [&](int64_t i) { return magnitude_bits(m[i]); }));
    }
    for_each_in_groups([&](int64_t group, int64_t i) { codes[i] = momentum_code(m[i], scales[group], noise[i]); });
    store_codes<int8_t>(place, row.exp_avg, codes);
    store_scales(place, row.exp_avg_scale, scales);
  }
}

// ---- D ---------------------------------------------------------------------------------------------------------

SASSHA_BLOCK void load_curvature(const Place& place, float* d) {
  const Row& row = place.row;
  if (state_of(row.format) == State::kFull) {
    float room[kBlock];
    memcpy(d, whole(place.in<float>(row.hessian), room, place.n), kBlock * sizeof(float));
  } else if (state_of(row.format) == State::k16) {
    BFloat16 room[kBlock];
    load(whole(place.in<BFloat16>(row.hessian), room, place.n), d, kBlock);
  } else {
    int32_t codes[kBlock];
    BFloat16 scales[kGroupsOfBlock];
    const int32_t levels = levels_of(row.format);
    load_codes<uint8_t>(place, row.hessian, codes);
    load_scales(place, row.hessian_scale, scales);
    for_each_in_groups([&](int64_t group, int64_t i) {
      d[i] = curvature_value(static_cast<uint32_t>(codes[i]), top_of(scales[group]), levels);
    });
  }
}

SASSHA_BLOCK void store_curvature(const Place& place, const float* d, const uint16_t* noise) {
  const Row& row = place.row;
  if (state_of(row.format) == State::kFull) {
    memcpy(place.in<float>(row.hessian), d, static_cast<size_t>(place.n) * sizeof(float));
  } else if (state_of(row.format) == State::k16) {
    Written<BFloat16> written{place.in<BFloat16>(row.hessian), place.n, {}};
    BFloat16* __restrict values = written.begin();
    for (int64_t i = 0; i < kBlock; ++i) values[i] = curvature16(d[i], noise[i]);
    written.end();
  } else {
    int32_t level[kBlock], codes[kBlock], top[kGroupsOfBlock];
    BFloat16 scales[kGroupsOfBlock];
    const int32_t levels = levels_of(row.format);
    for (int64_t group = 0; group < kGroupsOfBlock; ++group) {
      top[group] = largest_of<int32_t>(group, [&](int64_t i) { return level[i] = curvature_level(d[i], noise[i]); });
      scales[group] = curvature_scale(top[group]);
    }
    for_each_in_groups([&](int64_t group, int64_t i) {
      codes[i] = static_cast<int32_t>(curvature_code(d[i], level[i], top[group], levels));
    });
    store_codes<uint8_t>(place, row.hessian, codes);
    store_scales(place, row.hessian_scale, scales);
  }
}

}  // namespace
}  // namespace sassha
