// x, m and D of a thread's elements in every format (../formats.h): read as memory holds them, decoded to float32 when
// they are used, and encoded when they are written.
//
// A thread takes a run, as many elements as a vector has bytes, so that codes of 8 bits go in vectors too. Then two
// neighbouring lanes have a group. Where addresses allow no vectors a thread takes single elements, and a warp has a
// group. Either way all lanes of a warp come to the shuffles in which a group finds what it shares.
#pragma once

#include "../formats.h"
#include "multi_tensor.cuh"

namespace sassha::cuda {

constexpr int kRun = kVectorBytes;
constexpr int kGroupSize = static_cast<int>(kGroup);

// ---- formats -------------------------------------------------------------------------------------------------

template <State kState>
struct StateTypes {
  using M = float;
  using D = float;
};
template <>
struct StateTypes<State::k16> {
  using M = BFloat16;
  using D = BFloat16;
};
template <>
struct StateTypes<State::k8> {
  using M = int8_t;
  using D = uint8_t;
};

// How a launch's rows are stored: the types of memory. Whether codes of D have a sign is asked of the row.
template <typename T, State kState, Correction kCorrection>
struct Stored {
  using Param = T;
  using M = typename StateTypes<kState>::M;
  using D = typename StateTypes<kState>::D;
  using Rest = std::conditional_t<kCorrection == Correction::k8, int8_t, int16_t>;  // where there is a correction
  static constexpr bool kCorrected = kCorrection != Correction::kNone;
  static constexpr int kCorrectionBits = kCorrected ? 8 * static_cast<int>(sizeof(Rest)) : 0;
  static constexpr bool kCodes = kState == State::k8;
  // Bytes of an element, which are the vectors of a run.
  static constexpr int kParam = sizeof(T), kMomentum = sizeof(M), kCurvature = sizeof(D);
  static constexpr int kWeight = kParam + kCorrectionBits / 8;
};

// ---- runs ----------------------------------------------------------------------------------------------------

// Takes the elements of this thread, runs as far as whole warps of them go and single ones. For each it calls
// load(Width<n>, offset) and work(Width<n>, offset, there, operands). Lanes come along beyond the end, where `there` is
// false and the operands are zeros.
template <typename Load, typename Work>
__device__ __forceinline__ void for_each_run(int size, bool wide, const Load& load, const Work& work) {
  const Extent extent = extent_of<kWarp * kRun>(size, wide);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * kRun; i < extent.whole; i += kThreads * kRun) {
    work(Width<kRun>{}, i, true, load(Width<kRun>{}, i));
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 1
  for (int i = extent.whole + static_cast<int>(threadIdx.x); i - lane < extent.size; i += kThreads) {
    const bool there = i < extent.size;
    decltype(load(Width<1>{}, i)) operands = {};
    if (there) operands = load(Width<1>{}, i);
    work(Width<1>{}, i, there, operands);
  }
}

// The largest of a group, of which this thread has kWidth elements.
template <int kWidth>
__device__ __forceinline__ uint32_t largest_of_group(uint32_t largest) {
#pragma unroll
  for (int mask = 1; mask < kGroupSize / kWidth; mask *= 2) {
    const uint32_t other = shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  return largest;
}

// How state is rounded: at random, or to nearest, which is so rare that it draws as well.
struct Rounding {
  Stream stream;
  bool at_random;
};

__device__ __forceinline__ Rounding rounding_of(const Row& row, uint64_t seed, const int64_t* draw) {
  const uint32_t number = draw != nullptr ? static_cast<uint32_t>(*draw) : 0;
  return {{seed, static_cast<uint32_t>(row.index), number}, draw != nullptr};
}

template <int kWidth>
__device__ __forceinline__ Noise<kWidth> noise_of(const Rounding& rounding, int64_t element, Domain domain) {
  Noise<kWidth> noise = noise_of<kWidth>(rounding.stream, element, domain);
#pragma unroll
  for (uint32_t& word : noise.words) word = rounding.at_random ? word : kNearest << 16 | kNearest;
  return noise;
}

// ---- x -------------------------------------------------------------------------------------------------------

template <typename S, int kWidth>
struct WeightRun {
  Elements<typename S::Param, kWidth> params;
  Elements<typename S::Rest, kWidth> rests;

  __device__ __forceinline__ float operator[](int j) const {
    if constexpr (S::kCorrected) {
      return weight_of<S::kCorrectionBits>(params[j], static_cast<int32_t>(rests[j]));
    } else {
      return widen(params[j]);
    }
  }
};

// The parameters of a block at one address, and their corrections.
template <typename S>
class Weights {
 public:
  __device__ __forceinline__ Weights(const Piece& piece, int64_t address)
      : params_(at<typename S::Param>(address, piece.begin)),
        rests_(at<typename S::Rest>(piece.row.correction, piece.begin)) {}

  template <int kWidth>
  __device__ __forceinline__ WeightRun<S, kWidth> load(int offset) const {
    WeightRun<S, kWidth> run;
    run.params = cuda::load<kWidth>(params_ + offset);
    if constexpr (S::kCorrected) run.rests = cuda::load<kWidth>(rests_ + offset);
    return run;
  }

  template <int kWidth>
  __device__ __forceinline__ void store(int offset, const WeightRun<S, kWidth>& run) const {
    cuda::store(params_ + offset, run.params);
    if constexpr (S::kCorrected) cuda::store(rests_ + offset, run.rests);
  }

 private:
  typename S::Param* params_;
  typename S::Rest* rests_;
};

// x as it is to be stored.
template <typename S, int kWidth>
__device__ __forceinline__ WeightRun<S, kWidth> encoded(const Elements<float, kWidth>& x) {
  using T = typename S::Param;
  WeightRun<S, kWidth> run;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if constexpr (S::kCorrected) {
      const Corrected<T> split = corrected<S::kCorrectionBits>(x[j], T{});
      run.params[j] = split.param;
      run.rests[j] = static_cast<typename S::Rest>(split.correction);
    } else {
      run.params[j] = narrow<T>(x[j]);
    }
  }
  return run;
}

// ---- m -------------------------------------------------------------------------------------------------------

template <typename S, int kWidth>
struct MomentumRun {
  Elements<typename S::M, kWidth> values;
  float scale;

  __device__ __forceinline__ float operator[](int j) const {
    if constexpr (S::kCodes) {
      return momentum_value(values[j], scale);
    } else {
      return widen(values[j]);
    }
  }
};

template <typename S>
class Momentums {
 public:
  __device__ __forceinline__ explicit Momentums(const Piece& piece)
      : values_(at<typename S::M>(piece.row.exp_avg, piece.begin)),
        scales_(at<float>(piece.row.exp_avg_scale, piece.begin / kGroup)) {}

  template <int kWidth>
  __device__ __forceinline__ MomentumRun<S, kWidth> load(int offset) const {
    MomentumRun<S, kWidth> run;
    run.values = cuda::load<kWidth>(values_ + offset);
    if constexpr (S::kCodes) run.scale = scales_[offset / kGroupSize];
    return run;
  }

  template <int kWidth>
  __device__ __forceinline__ void store(int offset, bool there, const Elements<float, kWidth>& m,
                                        const Rounding& rounding, int64_t element) const {
    if constexpr (S::kCodes) {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const uint32_t bits = there ? magnitude_bits(m[j]) : 0;
        largest = bits > largest ? bits : largest;
      }
      const float scale = momentum_scale(largest_of_group<kWidth>(largest));
      const auto noise = noise_of<kWidth>(rounding, element, kMomentumNoise);
      Elements<int8_t, kWidth> codes;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) codes[j] = static_cast<int8_t>(momentum_code(m[j], scale, noise[j]));
      if (!there) return;
      cuda::store(values_ + offset, codes);
      if (offset % kGroupSize == 0) scales_[offset / kGroupSize] = scale;
    } else if constexpr (std::is_same_v<typename S::M, BFloat16>) {
      const auto noise = noise_of<kWidth>(rounding, element, kMomentumNoise);
      Elements<BFloat16, kWidth> rounded;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) rounded[j] = momentum16(m[j], noise[j]);
      if (there) cuda::store(values_ + offset, rounded);
    } else {
      if (there) cuda::store(values_ + offset, m);
    }
  }

 private:
  typename S::M* values_;
  float* scales_;
};

// ---- D -------------------------------------------------------------------------------------------------------

template <typename S, int kWidth>
struct CurvatureRun {
  Elements<typename S::D, kWidth> values;
  BFloat16 scale;

  // `levels` are those of the row's format.
  __device__ __forceinline__ float value(int j, int32_t levels) const {
    if constexpr (S::kCodes) {
      return curvature_value(values[j], top_of(scale), levels);
    } else {
      return widen(values[j]);
    }
  }
};

template <typename S>
class Curvatures {
 public:
  __device__ __forceinline__ explicit Curvatures(const Piece& piece)
      : values_(at<typename S::D>(piece.row.hessian, piece.begin)),
        scales_(at<BFloat16>(piece.row.hessian_scale, piece.begin / kGroup)) {}

  template <int kWidth>
  __device__ __forceinline__ CurvatureRun<S, kWidth> load(int offset) const {
    CurvatureRun<S, kWidth> run;
    run.values = cuda::load<kWidth>(values_ + offset);
    if constexpr (S::kCodes) run.scale = scales_[offset / kGroupSize];
    return run;
  }

  template <int kWidth>
  __device__ __forceinline__ void store(int offset, bool there, const Elements<float, kWidth>& d, int32_t levels,
                                        const Rounding& rounding, int64_t element) const {
    if constexpr (S::kCodes) {
      const auto noise = noise_of<kWidth>(rounding, element, kCurvatureNoise);
      Elements<int32_t, kWidth> level;
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        level[j] = there ? curvature_level(d[j], noise[j]) : 0;
        largest = static_cast<uint32_t>(level[j]) > largest ? static_cast<uint32_t>(level[j]) : largest;
      }
      const int32_t top = static_cast<int32_t>(largest_of_group<kWidth>(largest));
      Elements<uint8_t, kWidth> codes;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) codes[j] = static_cast<uint8_t>(curvature_code(d[j], level[j], top, levels));
      if (!there) return;
      cuda::store(values_ + offset, codes);
      if (offset % kGroupSize == 0) scales_[offset / kGroupSize] = curvature_scale(top);
    } else if constexpr (std::is_same_v<typename S::D, BFloat16>) {
      const auto noise = noise_of<kWidth>(rounding, element, kCurvatureNoise);
      Elements<BFloat16, kWidth> rounded;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) rounded[j] = curvature16(d[j], noise[j]);
      if (there) cuda::store(values_ + offset, rounded);
    } else {
      if (there) cuda::store(values_ + offset, d);
    }
  }

 private:
  typename S::D* values_;
  BFloat16* scales_;
};

}  // namespace sassha::cuda
