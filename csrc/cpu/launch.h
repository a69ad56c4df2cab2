// The passes over rows: one parallel loop each. Operators on lists and on tables of addresses both end here.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../checks.h"
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
void rademacher(Rows rows, int64_t seed, int64_t draw);
void probe(Rows rows, double h, int64_t seed, int64_t draw);
// `tallies` has one entry per row, or is null on an ordinary step. `options.stream` is decided here.
void step(Rows rows, StepOptions options, Tally* tallies);

inline int64_t address(const Tensor& t) { return reinterpret_cast<int64_t>(t.data_ptr()); }

// The number of a draw, which lives in memory so that a captured graph can count it up.
inline uint32_t draw_in(const char* op, const Tensor& draw) {
  STD_TORCH_CHECK(draw.is_cpu() && draw.scalar_type() == ScalarType::Long && draw.numel() == 1, op,
                  ": a draw must be one int64 on the CPU");
  return static_cast<uint32_t>(*static_cast<const int64_t*>(draw.data_ptr()));
}

// Options of an update; a `noise_draw` asks for rounding at random.
inline StepOptions step_options(const char* op, const Tensor& scalars, int64_t seed, int64_t draw,
                                const std::optional<Tensor>& noise_draw) {
  return {static_cast<const StepScalars<double>*>(scalars.data_ptr()),
          static_cast<uint64_t>(seed),
          static_cast<uint32_t>(draw),
          noise_draw.has_value() ? draw_in(op, *noise_draw) : 0,
          noise_draw.has_value(),
          /*stream=*/false};
}

inline Tensor new_doubles(const Tensor& like, std::initializer_list<int64_t> sizes) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_zeros(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()),
                                  ScalarType::Double);
}

}  // namespace sassha
