// Access to kWidth neighbouring elements in their compute type: 128 bits at a time where the address allows it, one
// element where it does not.
#pragma once

#include "../types.h"
#include "device.cuh"

namespace sassha::cuda {

constexpr int kVectorBytes = sizeof(Vector);

// Elements that a thread takes at once. Divides kSignsPerCall, and kNoisePerCall where noise is drawn.
template <typename T>
constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

template <int kWidth>
struct Width {
  static constexpr int value = kWidth;
};

// Whether every one of these addresses allows vectors. A chunk begins at a multiple of any vector.
template <typename... A>
__device__ __forceinline__ bool aligned(A... addresses) {
  return ((addresses % kVectorBytes == 0) && ...);
}

template <int kWidth, typename T>
__device__ __forceinline__ void load_raw(const T* from, T (&to)[kWidth]) {
  if constexpr (kWidth == 1) {
    to[0] = *from;
  } else {
    constexpr int kPieces = kWidth * static_cast<int>(sizeof(T)) / kVectorBytes;
    check_vector_address(from);
    Vector pieces[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) pieces[k] = read_vector(reinterpret_cast<const Vector*>(from) + k);
    memcpy(to, pieces, sizeof(to));
  }
}

template <int kWidth, typename T>
__device__ __forceinline__ void store_raw(T* to, const T (&from)[kWidth]) {
  if constexpr (kWidth == 1) {
    *to = from[0];
  } else {
    constexpr int kPieces = kWidth * static_cast<int>(sizeof(T)) / kVectorBytes;
    check_vector_address(to);
    Vector pieces[kPieces];
    memcpy(pieces, from, sizeof(from));
#pragma unroll
    for (int k = 0; k < kPieces; ++k) write_vector(reinterpret_cast<Vector*>(to) + k, pieces[k]);
  }
}

template <int kWidth, typename T>
__device__ __forceinline__ void load(const T* from, Compute<T> (&to)[kWidth]) {
  T raw[kWidth];
  load_raw(from, raw);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) to[j] = widen(raw[j]);
}

template <int kWidth, typename T>
__device__ __forceinline__ void store(T* to, const Compute<T> (&from)[kWidth]) {
  T raw[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) raw[j] = narrow<T>(from[j]);
  store_raw(to, raw);
}

}  // namespace sassha::cuda
