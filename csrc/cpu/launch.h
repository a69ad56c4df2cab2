// The passes over rows: one parallel loop each. Operators on lists and on tables of addresses both end here.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../rows.h"
#include "kernels.h"

namespace sassha {

struct Rows {
  const Row* data;
  int64_t size;
};

// Adds each row's sum of squares to its group's entry.
void square_sums(Rows rows, bool adaptive, double* sums);
void perturb(Rows rows, const AscentOptions& options);
void restore(Rows rows);
// Parameters from x, which lives in the backups for good, and from the momentum.
void momentum_ascent(Rows rows, const AscentOptions& options);
// Sums over all rows, of their gradients and those of the first pass.
GapSums gap_sums(Rows rows);
void decompose(Rows rows, const GapScales* scales);
void rademacher(Rows rows, int64_t seed, int64_t draw);
void probe(Rows rows, double h, int64_t seed, int64_t draw);
// `tallies` has one entry per row, or is null on an ordinary step; `squares`, where x lives apart, one per group.
// `options.stream` is decided here.
void step(Rows rows, StepOptions options, Tally* tallies, double* squares = nullptr);

inline uint32_t number_in(const Tensor& draw) {
  return static_cast<uint32_t>(*static_cast<const int64_t*>(draw.data_ptr()));
}

inline AscentOptions ascent_options(const Tensor& scales, bool adaptive, int64_t seed, const Tensor& draw) {
  return {static_cast<const float*>(scales.data_ptr()), adaptive, static_cast<uint64_t>(seed), number_in(draw)};
}

// Options of an update; a `noise_draw` asks for rounding at random.
inline StepOptions step_options(const Tensor& scalars, int64_t seed, int64_t draw,
                                const std::optional<Tensor>& noise_draw, int64_t sample = kMagnitude) {
  return {static_cast<const StepScalars<double>*>(scalars.data_ptr()),
          static_cast<uint64_t>(seed),
          static_cast<uint32_t>(draw),
          noise_draw.has_value() ? number_in(*noise_draw) : 0,
          noise_draw.has_value(),
          static_cast<Sample>(sample),
          /*apart=*/false,
          /*adaptive=*/false,
          /*stream=*/false};
}

inline Tensor new_doubles(const Tensor& like, std::initializer_list<int64_t> sizes) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_zeros(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()),
                                  ScalarType::Double);
}

inline Tensor as_tensor(const GapSums& sums, const Tensor& like) {
  Tensor out = new_doubles(like, {kGapWords});
  *static_cast<GapSums*>(out.data_ptr()) = sums;
  return out;
}

}  // namespace sassha
