// The passes over rows whose state or weights are stored in fewer bits: the same maths as in perturb.cpp, step.cpp and
// unseen.cpp, on blocks that are decoded first and encoded last.
#include "compact.h"

#include "launch.h"
#include "sample.h"

namespace sassha::SASSHA_ISA {
namespace {

// Calls f for each block of the piece.
template <typename F>
SASSHA_HD void for_each_place(const Row& row, int64_t begin, int64_t size, const F& f) {
  for (int64_t offset = 0; offset < size; offset += kBlock) {
    f(Place{row, begin + offset, size - offset < kBlock ? size - offset : kBlock});
  }
}

// Asks for what a later block is read from: elements of so many bytes. Coding a block takes longer than the processor
// looks ahead, so without this it would work and wait in turns.
SASSHA_MEMBER void ask_for(const Place& place, int64_t address, int64_t bytes) {
  constexpr int64_t kBlocksAhead = 4, kLine = 64;
  const int64_t begin = address + (place.element + kBlocksAhead * kBlock) * bytes;
  for (int64_t offset = 0; offset < kBlock * bytes; offset += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(static_cast<uintptr_t>(begin + offset)));
  }
}

// The same for x at `address` with its correction, and for m or D.
SASSHA_MEMBER void ask_for_weight(const Place& place, int64_t address) {
  ask_for(place, address, item_size(place.row.dtype));
  ask_for(place, place.row.correction, static_cast<int64_t>(correction_of(place.row.format)));
}
SASSHA_MEMBER void ask_for_state(const Place& place, int64_t address) {
  ask_for(place, address, 4 >> static_cast<int64_t>(state_of(place.row.format)));
}

Stream stream_of(const Row& row, uint64_t seed, const int64_t* draw) {
  return {seed, static_cast<uint32_t>(row.index), draw ? static_cast<uint32_t>(*draw) : 0};
}

// The bits by which m or D of one row is rounded, at random or to nearest.
class StateNoise {
 public:
  StateNoise(const Row& row, uint64_t seed, const int64_t* draw, Domain domain)
      : noise_(stream_of(row, seed, draw), domain),
        at_random_(draw != nullptr && state_of(row.format) != State::kFull) {
    for (uint16_t& bits : nearest_) bits = kNearest;
  }

  // Of a block, until it is called again.
  const uint16_t* of(const Place& place) { return at_random_ ? noise_.of(place.element) : nearest_; }

 private:
  Noise noise_;
  bool at_random_;
  uint16_t nearest_[kBlock];
};

// ---- ascent ----------------------------------------------------------------------------------------------------

// x + eps, with eps from the gradient or the momentum `along`.
SASSHA_BLOCK void ascend(float* x, const float* along, float scale, bool adaptive) {
  if (adaptive) {
    for (int64_t i = 0; i < kBlock; ++i) x[i] = x[i] + adaptive_ascent(scale, along[i], x[i]);
  } else {
    for (int64_t i = 0; i < kBlock; ++i) x[i] = x[i] + ascent(scale, along[i]);
  }
}

void copy_elements(const Row& row, int64_t to, int64_t from, int64_t begin, int64_t size) {
  with_stored_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    memcpy(at<T>(to, begin), at<T>(from, begin), static_cast<size_t>(size) * sizeof(T));
  });
}

// ---- update ----------------------------------------------------------------------------------------------------

// One block in float32.
struct Block {
  alignas(64) float x[kBlock], g[kBlock], m[kBlock], d[kBlock], bias2[kBlock];
};

// D of a refresh, and by what it is to be corrected.
template <Product kProduct, typename N>
SASSHA_HD void refresh(Block& b, const float* raw, N n, const Place& place, const StepScalars<float>& scalars,
                       const StepArgs& args, Tally& tally) {
  const StepScalars<float> s = scalars;  // a copy that no element of the block can be part of
  float h[kBlock] = {};
  const Stream signs{args.seed, static_cast<uint32_t>(place.row.index), args.draw};
  const bool seen = curvature_sample<kProduct>(raw, b.g, h, n, signs, place.element, s, args.zero_is_seen, tally);
  if (sample_block(h, n, args.sample, seen)) {
    for (int64_t i = 0; i < n; ++i) b.d[i] = curvature(b.d[i], h[i], s);
    for (int64_t i = 0; i < n; ++i) b.bias2[i] = s.bias2;
    return;
  }
  for (int64_t i = 0; i < n; ++i) {  // a product that is not finite leaves D and its correction as they were
    const bool unseen = is_unseen(product_at<kProduct>(raw, b.g, i), b.g[i], args.zero_is_seen);
    const float refreshed = unseen ? b.d[i] * s.kept : curvature(b.d[i], h[i], s);
    b.d[i] = is_finite(h[i]) ? refreshed : b.d[i];
    b.bias2[i] = is_finite(h[i]) ? s.bias2 : s.bias2_kept;
  }
}

template <Product kProduct>
SASSHA_BLOCK void refresh_block(Block& b, const Place& place, const StepScalars<float>& s, const StepArgs& args,
                                Tally& tally) {
  float raw[kBlock];
  load_values(place, place.row.product, raw);
  if (place.n == kBlock) {
    refresh<kProduct>(b, raw, std::integral_constant<int64_t, kBlock>{}, place, s, args, tally);
  } else {
    refresh<kProduct>(b, raw, place.n, place, s, args, tally);
  }
}

// m and x of the next step, in the place of those of this one.
template <Power kPower>
SASSHA_BLOCK void descend_block(Block& b, const StepScalars<float>& scalars) {
  const StepScalars<float> s = scalars;
  for (int64_t i = 0; i < kBlock; ++i) {
    const float denom = denominator<kPower>(b.d[i], b.bias2[i], s);
    b.m[i] = momentum(b.m[i], b.g[i], s);
    b.x[i] = descend(b.x[i], b.m[i], b.d[i], denom, s);
  }
}

// Adds up squares of m, or of |x| m for the x that was written.
void add_squares(SquareSum& sum, const Place& place, const float* m, bool adaptive) {
  if (!adaptive) {
    sum.add(m, place.n);
    return;
  }
  float weight[kBlock], scaled[kBlock];
  load_values(place, place.row.backup, weight);
  for (int64_t i = 0; i < kBlock; ++i) scaled[i] = absolute(weight[i]) * m[i];
  sum.add(scaled, place.n);
}

// Gradients overflowed: x returns and nothing else happens.
Stepped skip(const Row& row, int64_t begin, int64_t size, const StepArgs& args) {
  SquareSum squares;
  if (!args.in_state) {
    if (row.param != row.backup) copy_elements(row, row.param, row.backup, begin, size);
    return {};
  }
  for_each_place(row, begin, size, [&](const Place& place) {
    float m[kBlock];
    load_momentum(place, m);
    add_squares(squares, place, m, args.adaptive);
  });
  return {{}, squares.total()};
}

}  // namespace

void compact_perturb(const Row& row, int64_t begin, int64_t size, const AscentArgs& args) {
  const float scale = args.scales[row.group];
  if (scale == 0) return copy_elements(row, row.backup, row.param, begin, size);
  Noise noise(stream_of(row, args.seed, args.draw), kAscentNoise);
  for_each_place(row, begin, size, [&](const Place& place) {
    ask_for_weight(place, row.param);
    ask_for(place, row.grad, item_size(row.dtype));
    float x[kBlock], g[kBlock];
    load_weight(place, row.param, x);
    load_values(place, row.grad, g);  // before the backup, which may take its place
    copy_elements(row, row.backup, row.param, place.element, place.n);
    ascend(x, g, scale, args.adaptive);
    round_to_parameter(place, x, noise);
    store_values(place, row.param, x, false);
  });
}

void compact_momentum_ascent(const Row& row, int64_t begin, int64_t size, const AscentArgs& args) {
  const float scale = args.scales[row.group];
  if (scale == 0) return copy_elements(row, row.param, row.backup, begin, size);
  Noise noise(stream_of(row, args.seed, args.draw), kAscentNoise);
  for_each_place(row, begin, size, [&](const Place& place) {
    ask_for_weight(place, row.backup);
    ask_for_state(place, row.exp_avg);
    float x[kBlock], m[kBlock];
    load_weight(place, row.backup, x);
    load_momentum(place, m);
    ascend(x, m, scale, args.adaptive);
    round_to_parameter(place, x, noise);
    store_values(place, row.param, x, false);
  });
}

Stepped compact_step(const Row& row, int64_t begin, int64_t size, const StepArgs& args, bool stream) {
  const StepScalars<float> s = rounded<float>(args.scalars[row.cohort]);
  if (s.skip != 0) return skip(row, begin, size, args);
  const Product product = args.refresh ? product_of(row) : Product::kNone;
  const int64_t target = args.in_state ? row.backup : row.param;
  const double power = args.scalars[row.cohort].power;
  StateNoise momentum_noise(row, args.seed, args.state_draw, kMomentumNoise);
  StateNoise curvature_noise(row, args.seed, args.state_draw, kCurvatureNoise);
  Noise update_noise(stream_of(row, args.seed, args.noise_draw), kUpdateNoise);
  Tally tally = {};
  SquareSum squares;
  Block b;
  for (float& bias2 : b.bias2) bias2 = s.bias2;
  for_each_place(row, begin, size, [&](const Place& place) {
    ask_for_weight(place, row.backup);
    ask_for(place, row.grad, item_size(row.dtype));
    ask_for_state(place, row.exp_avg);
    ask_for_state(place, row.hessian);
    if (product != Product::kNone) ask_for(place, row.product, item_size(row.dtype));
    load_weight(place, row.backup, b.x);
    load_values(place, row.grad, b.g);
    load_momentum(place, b.m);
    load_curvature(place, b.d);
    if (product == Product::kUnsigned) refresh_block<Product::kUnsigned>(b, place, s, args, tally);
    if (product == Product::kSigned) refresh_block<Product::kSigned>(b, place, s, args, tally);
    if (product == Product::kProbed) refresh_block<Product::kProbed>(b, place, s, args, tally);
    if (power == 0.5) {
      descend_block<Power::kHalf>(b, s);
    } else if (power == 1.0) {
      descend_block<Power::kOne>(b, s);
    } else {
      descend_block<Power::kGeneral>(b, s);
    }
    if (args.noise_draw != nullptr) round_to_parameter(place, b.x, update_noise);
    store_weight(place, target, b.x, stream);
    store_momentum(place, b.m, momentum_noise.of(place));
    if (product != Product::kNone) store_curvature(place, b.d, curvature_noise.of(place));
    if (args.in_state) add_squares(squares, place, b.m, args.adaptive);
  });
  if (stream) stream_fence();
  return {tally, squares.total()};
}

Unseen compact_unseen_sums(const Row& row, int64_t begin, int64_t size) {
  Unseen sums = {};
  for_each_place(row, begin, size, [&](const Place& place) {
    float g[kBlock], p[kBlock], d[kBlock];
    load_values(place, row.grad, g);
    load_values(place, row.product, p);
    load_curvature(place, d);
    int32_t elements = 0, known = 0;
    double curvature = 0;
    for (int64_t i = 0; i < place.n; ++i) elements += is_unseen(p[i], g[i], false) ? 1 : 0;
    for (int64_t i = 0; i < place.n; ++i) known += is_unknown(d[i]) ? 0 : 1;
    for (int64_t i = 0; i < place.n; ++i) curvature += d[i];  // -0 where it is not known
    sums.elements += elements;
    sums.known += known;
    sums.curvature += curvature;
  });
  return sums;
}

void compact_fill_unseen(const Row& row, int64_t begin, int64_t size, float mean, const FillArgs& args) {
  StateNoise noise(row, args.seed, args.state_draw, kCurvatureNoise);
  for_each_place(row, begin, size, [&](const Place& place) {
    float g[kBlock], p[kBlock], d[kBlock];
    load_values(place, row.grad, g);
    load_values(place, row.product, p);
    load_curvature(place, d);
    // What lies beyond the end is unknown too, but no part of its group.
    for (int64_t i = 0; i < place.n; ++i) d[i] = filled(d[i], p[i], g[i], mean);
    store_curvature(place, d, noise.of(place));
  });
}

}  // namespace sassha::SASSHA_ISA
