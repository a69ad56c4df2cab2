// Sum of squares in double, over fixed lanes, so that its order depends on nothing but the piece.
#include "block.h"
#include "launch.h"

namespace sassha::SASSHA_ISA {
namespace {

template <typename T, bool kAdaptive>
double square_sum_of(const T* values, const T* param, int64_t size) {
  using C = Compute<T>;
  SquareSum sum;
  if constexpr (std::is_same_v<T, C> && !kAdaptive) {
    sum.add(values, size);
    return sum.total();
  }
  for_each_block(size, [&](int64_t offset, auto n) {
    C v_room[kBlock], x_room[kBlock], scaled[kBlock];
    const C* v = load(values + offset, v_room, n);
    if constexpr (kAdaptive) {
      const C* x = load(param + offset, x_room, n);
      for (int64_t i = 0; i < n; ++i) scaled[i] = absolute(x[i]) * v[i];
      v = scaled;
    }
    sum.add(v, n);
  });
  return sum.total();
}

}  // namespace

double square_sum(const Row& row, int64_t begin, int64_t size, int64_t column, bool adaptive) {
  return with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = at<T>(address_in(row, column), begin);
    return adaptive ? square_sum_of<T, true>(values, at<T>(row.param, begin), size)
                    : square_sum_of<T, false>(values, nullptr, size);
  });
}

}  // namespace sassha::SASSHA_ISA
