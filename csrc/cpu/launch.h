// The passes over rows: one parallel loop each. Operators on lists and on tables of addresses both end here.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
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
// `scalars` are rows of StepScalars<double>; `tallies` has one entry per row, or is null on an ordinary step.
void step(Rows rows, const double* scalars, int64_t seed, int64_t draw, Tally* tallies);

inline int64_t address(const Tensor& t) { return reinterpret_cast<int64_t>(t.data_ptr()); }

inline Tensor new_doubles(const Tensor& like, std::initializer_list<int64_t> sizes) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_zeros(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()),
                                  ScalarType::Double);
}

}  // namespace sassha
