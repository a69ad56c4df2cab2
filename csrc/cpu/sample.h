// Blocks of products on a refresh: what they add to D and to the tally.
#pragma once

#include "block.h"

namespace sassha {
namespace {

// Hz of one element, up to its scale.
template <Product kProduct, typename C>
SASSHA_HD C product_at(const C* product, const C* g, int64_t i) {
  return kProduct == Product::kProbed ? product[i] - g[i] : product[i];
}

// One block of z * Hz, averaged over probes, and what it adds to the tally. Returns whether all of it is finite and was
// seen.
template <Product kProduct, typename C, typename N>
SASSHA_HD bool curvature_sample(const C* product, const C* g, C* h, N n, const Stream& stream, int64_t element,
                                const StepScalars<C>& s, bool zero_is_seen, Tally& tally) {
  if constexpr (kProduct == Product::kSigned) {
    for (int64_t i = 0; i < n; ++i) h[i] = product[i] * s.product_scale;
  } else {
    C hz[kBlock];
    for (int64_t i = 0; i < n; ++i) hz[i] = product_at<kProduct>(product, g, i) * s.product_scale;
    apply_signs(hz, h, n, sign_bits(stream, element / kBlock));
  }
  int32_t seen = 0, negative = 0;
  const C sum = block_sum(h, n);
  for (int64_t i = 0; i < n; ++i) {
    seen += is_finite(h[i]) && !is_unseen(product_at<kProduct>(product, g, i), g[i], zero_is_seen) ? 1 : 0;
  }
  for (int64_t i = 0; i < n; ++i) negative += is_finite(h[i]) && h[i] < 0 ? 1 : 0;
  if (is_finite(sum)) {  // then every term is
    tally.trace += sum;
  } else {
    for (int64_t i = 0; i < n; ++i) tally.trace += is_finite(h[i]) ? h[i] : C(0);
  }
  tally.negative += negative;
  tally.seen += seen;
  return seen == n;
}

// What a block of products adds to D, in their place. Returns whether all of it is finite and was seen.
template <typename C, typename N>
SASSHA_HD bool sample_block(C* h, N n, Sample sample, bool seen) {
  if (sample == kMagnitude) {
    for (int64_t i = 0; i < n; ++i) h[i] = sampled(h[i], kMagnitude);
  } else if (sample == kSigned) {
    for (int64_t i = 0; i < n; ++i) h[i] = sampled(h[i], kSigned);
  } else {
    for (int64_t i = 0; i < n; ++i) h[i] = sampled(h[i], kSquare);
    return seen && is_finite(block_sum(h, n));  // squares may overflow
  }
  return seen;
}

}  // namespace
}  // namespace sassha
