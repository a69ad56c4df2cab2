// What a refresh did not see: how much there is of it, and the curvature that it gets.
#include "block.h"
#include "launch.h"

namespace sassha::SASSHA_ISA {

Unseen unseen_sums(const Row& row, int64_t begin, int64_t size) {
  return with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const T* grad = at<T>(row.grad, begin);
    const T* product = at<T>(row.product, begin);
    const C* hessian = at<C>(row.hessian, begin);
    Unseen sums = {};
    for_each_block(size, [&](int64_t offset, auto n) {
      C g_room[kBlock], p_room[kBlock];
      const C* g = load(grad + offset, g_room, n);
      const C* p = load(product + offset, p_room, n);
      const C* d = hessian + offset;
      int32_t elements = 0, known = 0;
      double curvature = 0;
      for (int64_t i = 0; i < n; ++i) elements += is_unseen(p[i], g[i], false) ? 1 : 0;
      for (int64_t i = 0; i < n; ++i) known += is_unknown(d[i]) ? 0 : 1;
      for (int64_t i = 0; i < n; ++i) curvature += d[i];  // -0 where it is not known
      sums.elements += elements;
      sums.known += known;
      sums.curvature += curvature;
    });
    return sums;
  });
}

void fill_unseen(const Row& row, int64_t begin, int64_t size, float mean, const FillArgs&) {
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const T* grad = at<T>(row.grad, begin);
    const T* product = at<T>(row.product, begin);
    C* hessian = at<C>(row.hessian, begin);
    for_each_block(size, [&](int64_t offset, auto n) {
      C g_room[kBlock], p_room[kBlock];
      const C* g = load(grad + offset, g_room, n);
      const C* p = load(product + offset, p_room, n);
      C* d = hessian + offset;
      for (int64_t i = 0; i < n; ++i) d[i] = filled(d[i], p[i], g[i], C(mean));
    });
  });
}

}  // namespace sassha::SASSHA_ISA
