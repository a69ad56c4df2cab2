// Access to kWidth neighbouring elements: 128 bits at a time where the address allows it, one element where it does
// not.
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

template <typename V, int kWidth>
struct Elements {
  __device__ __forceinline__ V& operator[](int j) { return values[j]; }
  __device__ __forceinline__ const V& operator[](int j) const { return values[j]; }

  V values[kWidth];
};

template <int kWidth, typename T>
__device__ __forceinline__ Elements<T, kWidth> load(const T* from) {
  Elements<T, kWidth> out;
  if constexpr (kWidth == 1) {
    out[0] = *from;
  } else {
    constexpr int kPieces = kWidth * static_cast<int>(sizeof(T)) / kVectorBytes;
    check_vector_address(from);
    Vector pieces[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) pieces[k] = read_vector(reinterpret_cast<const Vector*>(from) + k);
    memcpy(&out, pieces, sizeof(out));
  }
  return out;
}

// Rounds values to nearest that are not of type T.
template <int kWidth, typename T, typename V>
__device__ __forceinline__ void store(T* to, const Elements<V, kWidth>& from) {
  Elements<T, kWidth> out;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if constexpr (std::is_same_v<T, V>) {
      out[j] = from[j];
    } else {
      out[j] = narrow<T>(from[j]);
    }
  }
  if constexpr (kWidth == 1) {
    *to = out[0];
  } else {
    constexpr int kPieces = kWidth * static_cast<int>(sizeof(T)) / kVectorBytes;
    check_vector_address(to);
    Vector pieces[kPieces];
    memcpy(pieces, &out, sizeof(out));
#pragma unroll
    for (int k = 0; k < kPieces; ++k) write_vector(reinterpret_cast<Vector*>(to) + k, pieces[k]);
  }
}

}  // namespace sassha::cuda
