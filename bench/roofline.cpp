// Loops without arithmetic that read and write what each pass reads and writes: the floor of its time on this machine.
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPiece = 16384;

template <typename F>
void for_each_piece(int64_t n, int threads, const F& f) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t begin = 0; begin < n; begin += kPiece) f(begin, begin + kPiece < n ? begin + kPiece : n);
}

// Writes a line without reading it first, as a pass does whose output is not its input.
void stream(uint32_t* to, const uint32_t* from, int64_t n) {
#if defined(__AVX__)
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
#else
  memcpy(to, from, static_cast<size_t>(n) * 4);
#endif
}

}  // namespace

extern "C" {

uint32_t floor_norm(const uint32_t* g, int64_t n, int threads) {
  uint32_t all = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : all)
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t end = begin + kPiece < n ? begin + kPiece : n;
    uint32_t bits = 0;
    for (int64_t i = begin; i < end; ++i) bits |= g[i];
    all |= bits;
  }
  return all;
}

void floor_perturb(uint32_t* __restrict p, uint32_t* __restrict g, int64_t n, int threads) {
  for_each_piece(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t x = p[i];
      p[i] = g[i];
      g[i] = x;
    }
  });
}

void floor_restore(uint32_t* p, const uint32_t* b, int64_t n, int threads) {
  for_each_piece(n, threads, [=](int64_t begin, int64_t end) { stream(p + begin, b + begin, end - begin); });
}

// The step with restore fused in: reads b, g, m, d (and h), writes p and m (and d).
void floor_step(uint32_t* p, const uint32_t* b, const uint32_t* g, uint32_t* m, uint32_t* d, const uint32_t* h,
                int64_t n, int threads) {
  for_each_piece(n, threads, [=](int64_t begin, int64_t end) {
    uint32_t next[128];
    for (int64_t at = begin; at < end; at += 128) {
      const int64_t size = end - at < 128 ? end - at : 128;
      uint32_t* __restrict mm = m + at;
      uint32_t* __restrict dd = d + at;
      if (h != nullptr) {
        for (int64_t i = 0; i < size; ++i) dd[i] = dd[i] | h[at + i];
      }
      for (int64_t i = 0; i < size; ++i) {
        mm[i] = mm[i] | g[at + i];
        next[i] = b[at + i] | dd[i];
      }
      if (p == b) {
        memcpy(p + at, next, static_cast<size_t>(size) * 4);
      } else {
        stream(p + at, next, size);
      }
    }
  });
}
}
