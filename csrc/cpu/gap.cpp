// GSAM's surrogate gap: sums of products of the two gradients, and the descent that they make.
#include "block.h"
#include "launch.h"

namespace sassha::SASSHA_ISA {
namespace {

typedef double Double4 __attribute__((vector_size(32)));
typedef float Float4 __attribute__((vector_size(16)));

SASSHA_HD Double4 four(const double* v) {
  Double4 x;
  memcpy(&x, v, sizeof(x));
  return x;
}

SASSHA_HD Double4 four(const float* v) {
  Float4 x;
  memcpy(&x, v, sizeof(x));
  return __builtin_convertvector(x, Double4);
}

// The three sums over 8 fixed lanes: element i of a block goes to lane i % 8 on every instruction set.
struct Lanes {
  static constexpr int64_t kHalves = 2;
  Double4 first[kHalves] = {}, dot[kHalves] = {}, second[kHalves] = {};

  template <typename C>
  SASSHA_MEMBER void add(const C* g, const C* g2, int64_t n) {
    const int64_t tail = n % (4 * kHalves);
    for (int64_t i = 0; i < n - tail; i += 4 * kHalves) {
#pragma GCC unroll 2
      for (int64_t half = 0; half < kHalves; ++half) {
        const Double4 a = four(g + i + 4 * half), b = four(g2 + i + 4 * half);
        first[half] += a * a;
        dot[half] += a * b;
        second[half] += b * b;
      }
    }
    for (int64_t lane = 0; lane < tail; ++lane) {
      const double a = g[n - tail + lane], b = g2[n - tail + lane];
      first[lane / 4][lane % 4] += a * a;
      dot[lane / 4][lane % 4] += a * b;
      second[lane / 4][lane % 4] += b * b;
    }
  }

  static SASSHA_MEMBER double total(const Double4 (&lanes)[kHalves]) {
    double sum = 0;
    for (const Double4& half : lanes) {
      for (int64_t lane = 0; lane < 4; ++lane) sum += half[lane];
    }
    return sum;
  }
};

}  // namespace

GapSums gap_sums(const Row& row, int64_t begin, int64_t size) {
  return with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const T* grad = at<T>(row.grad, begin);
    const T* first = at<T>(row.first, begin);
    Lanes lanes;
    for_each_block(size, [&](int64_t offset, auto n) {
      C g_room[kBlock], f_room[kBlock];
      lanes.add(load(first + offset, f_room, n), load(grad + offset, g_room, n), n);
    });
    return GapSums{Lanes::total(lanes.first), Lanes::total(lanes.dot), Lanes::total(lanes.second)};
  });
}

void decompose(const Row& row, int64_t begin, int64_t size, const GapScales* scales) {
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const C alpha = scales[row.group].alpha, share = scales[row.group].share;
    if (alpha == 0) return;
    T* grad = at<T>(row.grad, begin);
    const T* first = at<T>(row.first, begin);
    for_each_block(size, [&](int64_t offset, auto n) {
      C g_room[kBlock], f_room[kBlock], next[kBlock];
      const C* g2 = load(grad + offset, g_room, n);
      const C* g = load(first + offset, f_room, n);
      for (int64_t i = 0; i < n; ++i) next[i] = descent(g2[i], g[i], alpha, share);
      store(grad + offset, next, n);
    });
  });
}

}  // namespace sassha::SASSHA_ISA
