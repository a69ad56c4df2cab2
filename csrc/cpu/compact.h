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
SASSHA_BLOCK void round_to_parameter(const Place& place, float* values, const Stream& stream, Domain domain) {
  constexpr std::integral_constant<int64_t, kBlock> kAll;
  if (place.row.dtype == kBFloat16) round_stochastically<BFloat16>(values, kAll, stream, place.element, domain);
  if (place.row.dtype == kFloat16) round_stochastically<Float16>(values, kAll, stream, place.element, domain);
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
    int8_t room[kBlock];
    const int8_t* codes = whole(place.in<int8_t>(row.exp_avg), room, place.n);
    const float* scales = at<float>(row.exp_avg_scale, place.element / kGroup);
    for (int64_t group = 0; group < place.groups(); ++group) {
      const int64_t from = group * kGroup;
      const float scale = scales[group];
      for (int64_t i = from; i < from + kGroup; ++i) m[i] = momentum_value(codes[i], scale);
    }
    for (int64_t i = place.groups() * kGroup; i < kBlock; ++i) m[i] = 0.0f;
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
    Written<int8_t> written{place.in<int8_t>(row.exp_avg), place.n, {}};
    int8_t* __restrict codes = written.begin();
    float* scales = at<float>(row.exp_avg_scale, place.element / kGroup);
    for (int64_t group = 0; group < place.groups(); ++group) {
      const int64_t from = group * kGroup;
      uint32_t largest = 0;
      for (int64_t i = from; i < from + kGroup; ++i) {
        const uint32_t bits = magnitude_bits(m[i]);
        largest = bits > largest ? bits : largest;
      }
      const float scale = momentum_scale(largest);
      for (int64_t i = from; i < from + kGroup; ++i) {
        codes[i] = static_cast<int8_t>(momentum_code(m[i], scale, noise[i]));
      }
      scales[group] = scale;
    }
    written.end();
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
    uint8_t room[kBlock];
    const uint8_t* codes = whole(place.in<uint8_t>(row.hessian), room, place.n);
    const BFloat16* scales = at<BFloat16>(row.hessian_scale, place.element / kGroup);
    const int32_t levels = levels_of(row.format);
    for (int64_t group = 0; group < place.groups(); ++group) {
      const int64_t from = group * kGroup;
      const int32_t top = top_of(scales[group]);
      for (int64_t i = from; i < from + kGroup; ++i) d[i] = curvature_value(codes[i], top, levels);
    }
    for (int64_t i = place.groups() * kGroup; i < kBlock; ++i) d[i] = 0.0f;
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
    Written<uint8_t> written{place.in<uint8_t>(row.hessian), place.n, {}};
    uint8_t* __restrict codes = written.begin();
    BFloat16* scales = at<BFloat16>(row.hessian_scale, place.element / kGroup);
    const int32_t levels = levels_of(row.format);
    for (int64_t group = 0; group < place.groups(); ++group) {
      const int64_t from = group * kGroup;
      int32_t level[kGroup], top = 0;
      for (int64_t i = 0; i < kGroup; ++i) {
        level[i] = curvature_level(d[from + i], noise[from + i]);
        top = level[i] > top ? level[i] : top;
      }
      for (int64_t i = 0; i < kGroup; ++i) {
        codes[from + i] = static_cast<uint8_t>(curvature_code(d[from + i], level[i], top, levels));
      }
      scales[group] = curvature_scale(top);
    }
    written.end();
  }
}

}  // namespace
}  // namespace sassha
