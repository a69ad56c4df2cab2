// Loops without arithmetic that read and write what each pass reads and writes, over the same tensors and in the same
// pieces: the floor of its time on this machine.
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPiece = 16384;

struct Piece {
  int64_t tensor, begin, size;
};

std::vector<Piece> cut(const int64_t* sizes, int64_t n) {
  std::vector<Piece> pieces;
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t begin = 0; begin < sizes[t]; begin += kPiece) {
      pieces.push_back({t, begin, begin + kPiece < sizes[t] ? kPiece : sizes[t] - begin});
    }
  }
  return pieces;
}

template <typename F>
void for_each_piece(const int64_t* sizes, int64_t n, int threads, const F& f) {
  const std::vector<Piece> pieces = cut(sizes, n);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (size_t i = 0; i < pieces.size(); ++i) f(pieces[i]);
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

using List = uint32_t* const*;

uint32_t floor_norm(List g, const int64_t* sizes, int64_t n, int threads) {
  uint32_t seen = 0;
  for_each_piece(sizes, n, threads, [&](const Piece& piece) {
    const uint32_t* from = g[piece.tensor] + piece.begin;
    uint32_t bits = 0;
    for (int64_t i = 0; i < piece.size; ++i) bits |= from[i];
    __atomic_fetch_or(&seen, bits, __ATOMIC_RELAXED);
  });
  return seen;
}

void floor_perturb(List p, List g, const int64_t* sizes, int64_t n, int threads) {
  for_each_piece(sizes, n, threads, [&](const Piece& piece) {
    uint32_t* __restrict left = p[piece.tensor] + piece.begin;
    uint32_t* __restrict right = g[piece.tensor] + piece.begin;
    for (int64_t i = 0; i < piece.size; ++i) {
      const uint32_t x = left[i];
      left[i] = right[i];
      right[i] = x;
    }
  });
}

void floor_restore(List p, List b, const int64_t* sizes, int64_t n, int threads) {
  for_each_piece(sizes, n, threads, [&](const Piece& piece) {
    stream(p[piece.tensor] + piece.begin, b[piece.tensor] + piece.begin, piece.size);
  });
}

// Reads and writes in place.
void floor_probe(List p, const int64_t* sizes, int64_t n, int threads) {
  for_each_piece(sizes, n, threads, [&](const Piece& piece) {
    uint32_t* to = p[piece.tensor] + piece.begin;
    for (int64_t i = 0; i < piece.size; ++i) to[i] ^= 1;
  });
}

// Writes alone.
void floor_rademacher(List z, const int64_t* sizes, int64_t n, int threads) {
  const uint32_t nothing[128] = {};
  for_each_piece(sizes, n, threads, [&](const Piece& piece) {
    for (int64_t at = 0; at < piece.size; at += 128) {
      const int64_t left = piece.size - at;
      stream(z[piece.tensor] + piece.begin + at, nothing, left < 128 ? left : 128);
    }
  });
}

// The step with restore fused in: reads b, g, m, d (and h), writes p and m (and d).
void floor_step(List p, List b, List g, List m, List d, List h, const int64_t* sizes, int64_t n, int threads) {
  for_each_piece(sizes, n, threads, [&](const Piece& piece) {
    uint32_t next[128];
    for (int64_t at = piece.begin; at < piece.begin + piece.size; at += 128) {
      const int64_t left = piece.begin + piece.size - at, size = left < 128 ? left : 128;
      const uint32_t* x = b[piece.tensor] + at;
      const uint32_t* grad = g[piece.tensor] + at;
      uint32_t* __restrict mm = m[piece.tensor] + at;
      uint32_t* __restrict dd = d[piece.tensor] + at;
      if (h != nullptr) {
        const uint32_t* product = h[piece.tensor] + at;
        for (int64_t i = 0; i < size; ++i) dd[i] = dd[i] | product[i];
      }
      for (int64_t i = 0; i < size; ++i) {
        mm[i] = mm[i] | grad[i];
        next[i] = x[i] | dd[i];
      }
      stream(p[piece.tensor] + at, next, size);
    }
  });
}
}
