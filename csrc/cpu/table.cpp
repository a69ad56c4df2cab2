// Operators on a table of addresses that Python keeps between steps, for the CPU.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "launch.h"

namespace sassha {
namespace {

Rows view(const Tensor& table) { return {static_cast<const Row*>(table.data_ptr()), table.size(0)}; }

// Chunks, their counts and a common power are for devices.
Tensor op_table_square_sums(Tensor table, int64_t n_groups, bool adaptive, std::optional<Tensor>, Ints) {
  Tensor sums = new_doubles(table, {n_groups});
  square_sums(view(table), adaptive, static_cast<double*>(sums.data_ptr()));
  return sums;
}

void op_table_perturb(Tensor table, Tensor scales, bool adaptive, int64_t seed, Tensor draw, std::optional<Tensor>,
                      Ints) {
  check_draw("sassha_table_perturb", draw, table);
  perturb(view(table), ascent_options(scales, adaptive, seed, draw));
}

void op_table_restore(Tensor table, std::optional<Tensor>, Ints) { restore(view(table)); }

// x is in the backups, which may be the parameters themselves; else the update restores as it goes.
void op_table_step(Tensor table, Tensor scalars, int64_t seed, std::optional<Tensor> noise_draw, std::optional<double>,
                   std::optional<Tensor>, Ints) {
  step(view(table), step_options(scalars, seed, 0, noise_draw), nullptr);
}

Tensor op_table_refresh_step(Tensor table, Tensor scalars, int64_t seed, int64_t draw, std::optional<Tensor> noise_draw,
                             int64_t sample, std::optional<double>, std::optional<Tensor>, Ints) {
  Tensor tallies = new_doubles(table, {table.size(0), kTallyWords});
  step(view(table), step_options(scalars, seed, draw, noise_draw, sample), static_cast<Tally*>(tallies.data_ptr()));
  return tallies;
}

Tensor step_apart(const Tensor& table, StepOptions options, int64_t n_groups, bool adaptive, Tally* tallies) {
  options.apart = true;
  options.adaptive = adaptive;
  Tensor squares = new_doubles(table, {n_groups});
  step(view(table), options, tallies, static_cast<double*>(squares.data_ptr()));
  return squares;
}

Tensor op_table_apart_step(Tensor table, Tensor scalars, int64_t n_groups, bool adaptive, int64_t seed,
                           std::optional<Tensor> noise_draw, std::optional<double>, std::optional<Tensor>, Ints) {
  return step_apart(table, step_options(scalars, seed, 0, noise_draw), n_groups, adaptive, nullptr);
}

std::tuple<Tensor, Tensor> op_table_apart_refresh_step(Tensor table, Tensor scalars, int64_t n_groups, bool adaptive,
                                                       int64_t seed, int64_t draw, std::optional<Tensor> noise_draw,
                                                       int64_t sample, std::optional<double>, std::optional<Tensor>,
                                                       Ints) {
  Tensor tallies = new_doubles(table, {table.size(0), kTallyWords});
  Tensor squares = step_apart(table, step_options(scalars, seed, draw, noise_draw, sample), n_groups, adaptive,
                              static_cast<Tally*>(tallies.data_ptr()));
  return {tallies, squares};
}

void op_table_momentum_ascent(Tensor table, Tensor scales, bool adaptive, int64_t seed, Tensor draw,
                              std::optional<Tensor>, Ints) {
  check_draw("sassha_table_momentum_ascent", draw, table);
  momentum_ascent(view(table), ascent_options(scales, adaptive, seed, draw));
}

Tensor op_table_gap_sums(Tensor table, std::optional<Tensor>, Ints) { return as_tensor(gap_sums(view(table)), table); }

void op_table_decompose(Tensor table, Tensor scales, std::optional<Tensor>, Ints) {
  decompose(view(table), static_cast<const GapScales*>(scales.data_ptr()));
}

}  // namespace
}  // namespace sassha

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CPU, m) {
  m.impl("table_square_sums", TORCH_BOX(&sassha::op_table_square_sums));
  m.impl("table_perturb", TORCH_BOX(&sassha::op_table_perturb));
  m.impl("table_restore", TORCH_BOX(&sassha::op_table_restore));
  m.impl("table_step", TORCH_BOX(&sassha::op_table_step));
  m.impl("table_refresh_step", TORCH_BOX(&sassha::op_table_refresh_step));
  m.impl("table_apart_step", TORCH_BOX(&sassha::op_table_apart_step));
  m.impl("table_apart_refresh_step", TORCH_BOX(&sassha::op_table_apart_refresh_step));
  m.impl("table_momentum_ascent", TORCH_BOX(&sassha::op_table_momentum_ascent));
  m.impl("table_gap_sums", TORCH_BOX(&sassha::op_table_gap_sums));
  m.impl("table_decompose", TORCH_BOX(&sassha::op_table_decompose));
}
