// Rademacher signs: written out as a tensor, or added to the parameters as x + h z.
#include "block.h"
#include "launch.h"

namespace sassha::SASSHA_ISA {
namespace {

// n copies of v, signed: v * z.
template <typename C, typename N>
SASSHA_HD void signed_constant(C v, C* out, N n, const Stream& stream, int64_t element) {
  C constant[kBlock];
  for (int64_t i = 0; i < n; ++i) constant[i] = v;
  apply_signs(constant, out, n, sign_bits(stream, element / kBlock));
}

}  // namespace

void rademacher(const Row& row, int64_t begin, int64_t size, uint64_t seed, uint32_t draw) {
  const Stream stream{seed, static_cast<uint32_t>(row.index), draw};
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    T* out = at<T>(row.param, begin);
    for_each_block(size, [&](int64_t offset, auto n) {
      C z[kBlock];
      signed_constant(C(1), z, n, stream, begin + offset);
      store(out + offset, z, n);
    });
  });
}

void probe(const Row& row, int64_t begin, int64_t size, uint64_t seed, uint32_t draw, double h) {
  const Stream stream{seed, static_cast<uint32_t>(row.index), draw};
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    T* param = at<T>(row.param, begin);
    const C length = static_cast<C>(h);
    for_each_block(size, [&](int64_t offset, auto n) {
      C x_room[kBlock], moved[kBlock];
      signed_constant(length, moved, n, stream, begin + offset);
      const C* x = load(param + offset, x_room, n);
      for (int64_t i = 0; i < n; ++i) moved[i] = x[i] + moved[i];
      store(param + offset, moved, n);
    });
  });
}

}  // namespace sassha::SASSHA_ISA
