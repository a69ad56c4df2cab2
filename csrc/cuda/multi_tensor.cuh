// Chunking: which part of which tensor a block of threads works on, how the threads share it, and how they add up.
#pragma once

#include "vector_io.cuh"

namespace sassha::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// A pass is bound by memory if enough bytes are on their way to a multiprocessor at any time: this many on every GPU
// from sm_80 on. A thread asks for all operands of a turn before it uses any, and the bound on its registers leaves
// room for as many blocks as that takes. `make prove-gpu` reads both from machine code.
constexpr int kBytesInFlight = 40 << 10;

// Blocks that a multiprocessor must have room for if a thread of a pass asks for so many vectors of 16 bytes at once.
constexpr int blocks_for(int vectors) {
  const int bytes = kThreads * vectors * kVectorBytes;
  const int blocks = (kBytesInFlight + bytes - 1) / bytes;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return blocks < 4 ? blocks : 4;  // sm_75 has room for 1024 threads
#else
  return blocks;
#endif
}

// Vectors of m or D beside one of parameters: those of two-byte types have state of four bytes.
template <typename T>
constexpr int kStateVectors = static_cast<int>(sizeof(Compute<T>) / sizeof(T));

// A list of rows in device memory.
struct Table {
  const Row* rows;
  const Chunk* chunks;  // of the dtype that a kernel is launched for
};

// The elements of one block of threads.
struct Piece {
  const Row& row;
  int64_t begin;
  int size;
};

__device__ __forceinline__ Piece piece_of(const Table& table) {
  const Chunk chunk = table.chunks[blockIdx.x];
  const Row& row = table.rows[chunk.row];
  const int64_t begin = kChunk * chunk.number;
  const int64_t left = row.numel - begin;
  return {row, begin, static_cast<int>(left < kChunk ? left : kChunk)};
}

template <typename T>
__device__ __forceinline__ T* at(int64_t address, int64_t begin) {
  return static_cast<T*>(global_pointer(address)) + begin;
}

// How many elements a block has, and how many of them go in vectors.
struct Extent {
  int size;
  int whole;
};

template <int kWidth>
__device__ __forceinline__ Extent extent_of(int size, bool wide) {
  return {size, wide ? size - size % kWidth : 0};
}

// Takes the elements of this thread: vectors as far as they go if all addresses allow it, and single elements. For each
// it calls load(Width<n>, offset), which returns the operands, and work(Width<n>, offset, operands). The operands of
// kAhead vectors are loaded before work begins.
template <int kWidth, int kAhead, typename Load, typename Work>
__device__ __forceinline__ void for_each(const Extent& extent, const Load& load, const Work& work) {
  constexpr int kStride = kThreads * kWidth;
  int i = static_cast<int>(threadIdx.x) * kWidth;
  if constexpr (kAhead > 1) {
#pragma unroll 1
    for (; i + (kAhead - 1) * kStride < extent.whole; i += kAhead * kStride) {
      decltype(load(Width<kWidth>{}, i)) operands[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) operands[k] = load(Width<kWidth>{}, i + k * kStride);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) work(Width<kWidth>{}, i + k * kStride, operands[k]);
    }
  }
#pragma unroll 1
  for (; i < extent.whole; i += kStride) work(Width<kWidth>{}, i, load(Width<kWidth>{}, i));
#pragma unroll 1
  for (i = extent.whole + static_cast<int>(threadIdx.x); i < extent.size; i += kThreads) {
    work(Width<1>{}, i, load(Width<1>{}, i));
  }
}

// Vectors that a thread of a pass with few operands loads of each at once.
constexpr int kPair = 2;

// Copies bits, whatever they mean.
template <typename T, int kAhead = 1>
__device__ __forceinline__ void copy(const Piece& piece, int64_t to, int64_t from) {
  T* target = at<T>(to, piece.begin);
  const T* source = at<const T>(from, piece.begin);
  for_each<kVector<T>, kAhead>(
      extent_of<kVector<T>>(piece.size, aligned(to, from)),
      [&](auto width, int offset) { return load<decltype(width)::value>(source + offset); },
      [&](auto, int offset, const auto& values) { store(target + offset, values); });
}

// ---- random bits ---------------------------------------------------------------------------------------------

constexpr int kSignWords = static_cast<int>(kChunk / 32);

// Draws the signs of a chunk, one Philox call for 128 of them, into memory that the block shares. Ends in a barrier.
__device__ __forceinline__ void draw_signs(uint32_t* words, const Stream& stream, const Piece& piece) {
  constexpr int kPerCall = static_cast<int>(kSignsPerCall);
  for (int call = static_cast<int>(threadIdx.x); call * kPerCall < piece.size; call += kThreads) {
    const Bits128 bits = sign_bits(stream, piece.begin / kSignsPerCall + call);
    for (int w = 0; w < 4; ++w) words[4 * call + w] = bits.word[w];
  }
  __syncthreads();
}

// The sign bits of the elements at an offset, the first one lowest.
__device__ __forceinline__ uint32_t signs_at(const uint32_t* words, int offset) {
  return words[offset / 32] >> (offset % 32);
}

// Sixteen bits for each of a thread's elements: the halves of words, the low one first.
template <int kWidth>
struct Noise {
  __device__ __forceinline__ uint32_t operator[](int j) const { return (words[j / 2] >> (16 * (j % 2))) & 0xFFFFu; }

  uint32_t words[(kWidth + 1) / 2];
};

template <int kWidth>
__device__ __forceinline__ Noise<kWidth> noise_of(const Stream& stream, int64_t element, Domain domain) {
  constexpr int kPerCall = static_cast<int>(kNoisePerCall);
  static_assert(kWidth == 1 || kWidth % kPerCall == 0, "a vector takes the noise of whole calls");
  Noise<kWidth> out;
  if constexpr (kWidth == 1) {
    const Bits128 noise = noise_bits(stream, element / kNoisePerCall, domain);
    const int place = static_cast<int>(element % kNoisePerCall);
    uint32_t word = noise.word[0];  // selected, as an index that is not constant would move the words to memory
#pragma unroll
    for (int w = 1; w < 4; ++w) word = place / 2 == w ? noise.word[w] : word;
    out.words[0] = word >> (16 * (place % 2));
  } else {
#pragma unroll
    for (int call = 0; call < kWidth / kPerCall; ++call) {
      const Bits128 noise = noise_bits(stream, element / kNoisePerCall + call, domain);
#pragma unroll
      for (int w = 0; w < 4; ++w) out.words[4 * call + w] = noise.word[w];
    }
  }
  return out;
}

// Rounds values to the grid of a reduced type, so that their expectation is kept.
template <typename T, int kWidth>
__device__ __forceinline__ void round_stochastically(Elements<float, kWidth>& values, const Noise<kWidth>& noise) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    values[j] = std::is_same_v<T, BFloat16> ? stochastic_bfloat16(values[j], noise[j])
                                            : stochastic_float16(values[j], noise[j]);
  }
}

// The same at random.
template <typename T, int kWidth>
__device__ __forceinline__ void round_stochastically(Elements<float, kWidth>& values, const Stream& stream,
                                                     int64_t element, Domain domain) {
  round_stochastically<T>(values, noise_of<kWidth>(stream, element, domain));
}

// ---- sums ----------------------------------------------------------------------------------------------------

// The product of two floats is exact in double, so fusing it with the addition changes no bit.
__device__ __forceinline__ double add_product(double sum, double a, double b) { return fma(a, b, sum); }
__device__ __forceinline__ double add_square(double sum, double v) { return add_product(sum, v, v); }

// Adds up each value over the block, in an order that depends on nothing. Thread 0 has the result.
template <int kValues>
__device__ __forceinline__ void block_sum(double (&values)[kValues]) {
  __shared__ double warps[kValues][kThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    for (int delta = kWarp / 2; delta > 0; delta /= 2) values[v] += shuffle_down(values[v], delta);
    if (lane == 0) warps[v][warp] = values[v];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    for (int w = 1; w < kThreads / kWarp; ++w) values[v] += warps[v][w];
  }
}

}  // namespace sassha::cuda
