// Chunking: which part of which tensor a block of threads works on, how the threads share it, and how they add up.
#pragma once

#include "vector_io.cuh"

namespace sassha::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// Blocks that a multiprocessor must have room for, which bounds the registers of a thread: three quarters of its
// threads (all of them on sm_75, which has half as many), and half as many for an update whose vectors have eight
// elements or whose numbers take two registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kBlocks = 4;
#else
constexpr int kBlocks = 6;
#endif
template <typename T>
constexpr int kStepBlocks = sizeof(T) == 4 ? kBlocks : kBlocks / 2;

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

// Calls f(Width<n>, offset) for the elements of this thread: vectors as far as they go if all addresses allow it, and
// single elements. Loops are not unrolled: with 2048 threads on a multiprocessor one vector each of every operand is
// several times what keeps the memory busy, and registers are what limits the number of threads.
template <int kWidth, typename F>
__device__ __forceinline__ void for_each(const Extent& extent, const F& f) {
#pragma unroll 1
  for (int i = thread_index() * kWidth; i < extent.whole; i += kThreads * kWidth) f(Width<kWidth>{}, i);
#pragma unroll 1
  for (int i = extent.whole + thread_index(); i < extent.size; i += kThreads) f(Width<1>{}, i);
}

// Copies bits, whatever they mean.
template <typename T>
__device__ __forceinline__ void copy(const Piece& piece, int64_t to, int64_t from) {
  for_each<kVector<T>>(extent_of<kVector<T>>(piece.size, aligned(to, from)), [&](auto width, int offset) {
    T raw[decltype(width)::value];
    load_raw(at<const T>(from, piece.begin + offset), raw);
    store_raw(at<T>(to, piece.begin + offset), raw);
  });
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

// Rounds values to the grid of a reduced type at random, so that their expectation is kept.
template <typename T, int kWidth>
__device__ __forceinline__ void round_stochastically(float (&values)[kWidth], const Stream& stream, int64_t element,
                                                     Domain domain) {
  static_assert(kWidth == 1 || kWidth == kNoisePerCall, "a vector takes the noise of one call");
  const Bits128 noise = noise_bits(stream, element / kNoisePerCall, domain);
  const int first = static_cast<int>(element % kNoisePerCall);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int place = kWidth == 1 ? first : j;
    uint32_t word = noise.word[0];  // selected, as an index that is not constant would move the words to memory
#pragma unroll
    for (int w = 1; w < 4; ++w) word = place / 2 == w ? noise.word[w] : word;
    const uint32_t bits = (word >> (16 * (place % 2))) & 0xFFFFu;
    values[j] =
        std::is_same_v<T, BFloat16> ? stochastic_bfloat16(values[j], bits) : stochastic_float16(values[j], bits);
  }
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
