// Operators on tensor lists, which say what they mutate, and their registration for the CPU.
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "launch.h"

namespace sassha {
namespace {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

void check_scales(const char* op, const Tensor& scales, const std::vector<Row>& rows) {
  STD_TORCH_CHECK(scales.is_cpu() && scales.scalar_type() == ScalarType::Float && scales.is_contiguous(), op,
                  ": scales must be a contiguous float32 tensor on the CPU with one entry per group");
  for (const Row& row : rows) {
    STD_TORCH_CHECK(row.group >= 0 && row.group < scales.numel(), op, ": group ", row.group,
                    " has no entry in scales, which has ", scales.numel());
  }
}

void check_scalars(const char* op, const Tensor& scalars, const std::vector<Row>& rows) {
  STD_TORCH_CHECK(scalars.is_cpu() && scalars.scalar_type() == ScalarType::Double && scalars.is_contiguous() &&
                      scalars.dim() == 2 && scalars.size(1) == kStepScalarWords,
                  op, ": scalars must be a contiguous float64 tensor on the CPU of shape [cohorts, ", kStepScalarWords,
                  "]");
  for (const Row& row : rows) {
    STD_TORCH_CHECK(row.cohort >= 0 && row.cohort < scalars.size(0), op, ": cohort ", row.cohort,
                    " has no row in scalars, which has ", scalars.size(0));
  }
}

std::vector<Row> rows_of(const char* op, const char* list, const Tensors& params) {
  std::vector<Row> rows(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    check_param(op, list, i, params[i]);
    rows[i] = Row{};
    rows[i].param = rows[i].backup = address(params[i]);
    rows[i].numel = params[i].numel();
    rows[i].dtype = dtype_code(params[i].scalar_type());
  }
  return rows;
}

void set_column(const char* op, const char* list, std::vector<Row>& rows, int64_t Row::* column, const Tensors& tensors,
                const Tensors& params, bool state = false) {
  check_size(op, list, tensors.size(), params.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ScalarType type = params[i].scalar_type();
    check_like(op, list, i, tensors[i], params[i], state ? state_type(type) : type);
    rows[i].*column = address(tensors[i]);
  }
}

void set_numbers(const char* op, const char* list, std::vector<Row>& rows, int64_t Row::* column, const Ints& numbers) {
  check_size(op, list, numbers.size(), rows.size());
  for (size_t i = 0; i < numbers.size(); ++i) rows[i].*column = numbers[i];
}

Rows view(const std::vector<Row>& rows) { return {rows.data(), static_cast<int64_t>(rows.size())}; }

Tensor op_square_sums(Tensors grads, Tensors params, Ints groups, int64_t n_groups) {
  const char* op = "sassha_square_sums";
  const bool adaptive = !params.empty();
  std::vector<Row> rows = rows_of(op, "grads", grads);
  for (Row& row : rows) row.grad = row.param;
  if (adaptive) set_column(op, "params", rows, &Row::param, params, grads);
  set_numbers(op, "groups", rows, &Row::group, groups);
  for (const Row& row : rows) {
    STD_TORCH_CHECK(row.group >= 0 && row.group < n_groups, op, ": group ", row.group,
                    " is not below n_groups=", n_groups);
  }
  Tensor sums = new_doubles(grads[0], {n_groups});  // the dispatcher refuses empty lists
  square_sums(view(rows), adaptive, static_cast<double*>(sums.data_ptr()));
  return sums;
}

void op_perturb(Tensors params, Tensors grads, Tensors backups, Tensor scales, Ints groups, Ints indices, bool adaptive,
                int64_t seed, Tensor draw) {
  const char* op = "sassha_perturb";
  std::vector<Row> rows = rows_of(op, "params", params);
  set_column(op, "grads", rows, &Row::grad, grads, params);
  set_column(op, "backups", rows, &Row::backup, backups, params);
  set_numbers(op, "groups", rows, &Row::group, groups);
  set_numbers(op, "indices", rows, &Row::index, indices);
  for (size_t i = 0; i < params.size(); ++i) {
    if (item_size(rows[i].dtype) == 2) check_row_major(op, "params", i, params[i]);
  }
  check_scales(op, scales, rows);
  perturb(view(rows),
          {static_cast<const float*>(scales.data_ptr()), adaptive, static_cast<uint64_t>(seed), draw_in(op, draw)});
}

void op_restore(Tensors params, Tensors backups) {
  std::vector<Row> rows = rows_of("sassha_restore", "params", params);
  set_column("sassha_restore", "backups", rows, &Row::backup, backups, params);
  restore(view(rows));
}

void op_rademacher(Tensors outs, Ints indices, int64_t seed, int64_t draw) {
  const char* op = "sassha_rademacher";
  std::vector<Row> rows = rows_of(op, "outs", outs);
  for (size_t i = 0; i < outs.size(); ++i) check_row_major(op, "outs", i, outs[i]);
  set_numbers(op, "indices", rows, &Row::index, indices);
  rademacher(view(rows), seed, draw);
}

void op_probe(Tensors params, Ints indices, double h, int64_t seed, int64_t draw) {
  const char* op = "sassha_probe";
  std::vector<Row> rows = rows_of(op, "params", params);
  for (size_t i = 0; i < params.size(); ++i) check_row_major(op, "params", i, params[i]);
  set_numbers(op, "indices", rows, &Row::index, indices);
  probe(view(rows), h, seed, draw);
}

// Rows of an update. An empty `backups` means that the parameters hold x themselves.
std::vector<Row> step_rows(const char* op, const Tensors& params, const Tensors& backups, const Tensors& grads,
                           const Tensors& exp_avgs, const Tensors& hessians, const Tensor& scalars, const Ints& cohorts,
                           const Ints& indices, bool round_at_random) {
  std::vector<Row> rows = rows_of(op, "params", params);
  if (!backups.empty()) set_column(op, "backups", rows, &Row::backup, backups, params);
  set_column(op, "grads", rows, &Row::grad, grads, params);
  set_column(op, "exp_avgs", rows, &Row::exp_avg, exp_avgs, params, /*state=*/true);
  set_column(op, "hessians", rows, &Row::hessian, hessians, params, /*state=*/true);
  set_numbers(op, "cohorts", rows, &Row::cohort, cohorts);
  set_numbers(op, "indices", rows, &Row::index, indices);
  for (size_t i = 0; i < params.size(); ++i) {
    if (round_at_random && item_size(rows[i].dtype) == 2) check_row_major(op, "params", i, params[i]);
  }
  check_scalars(op, scalars, rows);
  return rows;
}

void op_step(Tensors params, Tensors backups, Tensors grads, Tensors exp_avgs, Tensors hessians, Tensor scalars,
             Ints cohorts, Ints indices, int64_t seed, std::optional<Tensor> noise_draw) {
  const char* op = "sassha_step";
  const std::vector<Row> rows =
      step_rows(op, params, backups, grads, exp_avgs, hessians, scalars, cohorts, indices, noise_draw.has_value());
  step(view(rows), step_options(op, scalars, seed, 0, noise_draw), nullptr);
}

Tensor op_refresh_step(Tensors params, Tensors backups, Tensors grads, Tensors exp_avgs, Tensors hessians,
                       Tensors products, Tensor scalars, Ints cohorts, Ints indices, bool is_signed, int64_t seed,
                       int64_t draw, std::optional<Tensor> noise_draw) {
  const char* op = "sassha_refresh_step";
  std::vector<Row> rows =
      step_rows(op, params, backups, grads, exp_avgs, hessians, scalars, cohorts, indices, noise_draw.has_value());
  set_column(op, "products", rows, &Row::product, products, params);
  for (size_t i = 0; i < params.size(); ++i) {
    if (is_signed) {
      rows[i].flags = kSignedProduct;
    } else {
      check_row_major(op, "params", i, params[i]);
    }
  }
  Tensor tallies = new_doubles(scalars, {static_cast<int64_t>(rows.size()), kTallyWords});
  step(view(rows), step_options(op, scalars, seed, draw, noise_draw), static_cast<Tally*>(tallies.data_ptr()));
  return tallies;
}

std::string op_cpu_isa() { return kernels().isa; }

}  // namespace
}  // namespace sassha

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CPU, m) {
  m.impl("square_sums", TORCH_BOX(&sassha::op_square_sums));
  m.impl("perturb_", TORCH_BOX(&sassha::op_perturb));
  m.impl("restore_", TORCH_BOX(&sassha::op_restore));
  m.impl("rademacher_", TORCH_BOX(&sassha::op_rademacher));
  m.impl("probe_", TORCH_BOX(&sassha::op_probe));
  m.impl("step_", TORCH_BOX(&sassha::op_step));
  m.impl("refresh_step_", TORCH_BOX(&sassha::op_refresh_step));
}

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&sassha::op_cpu_isa));
}
