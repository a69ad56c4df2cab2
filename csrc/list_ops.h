// Operators on tensor lists, which say what they mutate: rows and checks, the same on every device.
//
// `Device` has the passes over checked rows as static functions; `like` is a tensor on the device.
#pragma once

#include <torch/csrc/stable/library.h>

#include <vector>

#include "rows.h"

namespace sassha {

template <typename Device>
struct ListOps {
  static Tensor square_sums(Tensors grads, Tensors params, Ints groups, int64_t n_groups) {
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
    return Device::square_sums(rows, grads[0], adaptive, n_groups);  // the dispatcher refuses empty lists
  }

  static void perturb(Tensors params, Tensors grads, Tensors backups, Tensor scales, Ints groups, Ints indices,
                      bool adaptive, int64_t seed, Tensor draw) {
    const char* op = "sassha_perturb";
    std::vector<Row> rows = rows_of(op, "params", params);
    set_column(op, "grads", rows, &Row::grad, grads, params);
    set_column(op, "backups", rows, &Row::backup, backups, params);
    check_ascent(op, rows, params, scales, groups, indices, draw);
    Device::perturb(rows, params[0], scales, adaptive, seed, draw);
  }

  static void restore(Tensors params, Tensors backups) {
    std::vector<Row> rows = rows_of("sassha_restore", "params", params);
    set_column("sassha_restore", "backups", rows, &Row::backup, backups, params);
    Device::restore(rows, params[0]);
  }

  static void rademacher(Tensors outs, Ints indices, int64_t seed, int64_t draw) {
    const char* op = "sassha_rademacher";
    std::vector<Row> rows = rows_of(op, "outs", outs);
    for (size_t i = 0; i < outs.size(); ++i) check_row_major(op, "outs", i, outs[i]);
    set_numbers(op, "indices", rows, &Row::index, indices);
    Device::rademacher(rows, outs[0], seed, draw);
  }

  static void probe(Tensors params, Ints indices, double h, int64_t seed, int64_t draw) {
    const char* op = "sassha_probe";
    std::vector<Row> rows = rows_of(op, "params", params);
    for (size_t i = 0; i < params.size(); ++i) check_row_major(op, "params", i, params[i]);
    set_numbers(op, "indices", rows, &Row::index, indices);
    Device::probe(rows, params[0], h, seed, draw);
  }

  static void step(Tensors params, Tensors backups, Tensors grads, Tensors exp_avgs, Tensors hessians, Tensor scalars,
                   Ints cohorts, Ints indices, int64_t seed, std::optional<Tensor> noise_draw) {
    const char* op = "sassha_step";
    const std::vector<Row> rows =
        step_rows(op, params, backups, grads, exp_avgs, hessians, scalars, cohorts, indices, noise_draw);
    Device::step(rows, params[0], scalars, seed, noise_draw);
  }

  static Tensor refresh_step(Tensors params, Tensors backups, Tensors grads, Tensors exp_avgs, Tensors hessians,
                             Tensors products, Tensor scalars, Ints cohorts, Ints indices, bool is_signed, int64_t seed,
                             int64_t draw, std::optional<Tensor> noise_draw, int64_t sample) {
    const char* op = "sassha_refresh_step";
    std::vector<Row> rows =
        step_rows(op, params, backups, grads, exp_avgs, hessians, scalars, cohorts, indices, noise_draw);
    set_column(op, "products", rows, &Row::product, products, params);
    for (size_t i = 0; i < params.size(); ++i) {
      if (is_signed) {
        rows[i].flags = kSignedProduct;
      } else {
        check_row_major(op, "params", i, params[i]);
      }
    }
    STD_TORCH_CHECK(sample >= kMagnitude && sample <= kSquare, op, ": sample is ", sample,
                    ", expected 0 (magnitude), 1 (signed) or 2 (square)");
    return Device::refresh_step(rows, params[0], scalars, seed, draw, noise_draw, sample);
  }

  static void momentum_ascent(Tensors params, Tensors weights, Tensors exp_avgs, Tensor scales, Ints groups,
                              Ints indices, bool adaptive, int64_t seed, Tensor draw) {
    const char* op = "sassha_momentum_ascent";
    std::vector<Row> rows = rows_of(op, "params", params);
    set_column(op, "weights", rows, &Row::backup, weights, params);
    set_column(op, "exp_avgs", rows, &Row::exp_avg, exp_avgs, params, /*state=*/true);
    check_ascent(op, rows, params, scales, groups, indices, draw);
    Device::momentum_ascent(rows, params[0], scales, adaptive, seed, draw);
  }

  static Tensor gap_sums(Tensors grads, Tensors firsts) {
    return Device::gap_sums(gap_rows("sassha_gap_sums", grads, firsts), grads[0]);
  }

  static void decompose(Tensors grads, Tensors firsts, Tensor scales, Ints groups) {
    const char* op = "sassha_decompose";
    std::vector<Row> rows = gap_rows(op, grads, firsts);
    set_numbers(op, "groups", rows, &Row::group, groups);
    check_gap_scales(op, scales, rows, grads[0]);
    Device::decompose(rows, grads[0], scales);
  }

  static void register_in(torch::stable::detail::StableLibrary& m) {
    m.impl("square_sums", TORCH_BOX(&ListOps::square_sums));
    m.impl("perturb_", TORCH_BOX(&ListOps::perturb));
    m.impl("restore_", TORCH_BOX(&ListOps::restore));
    m.impl("rademacher_", TORCH_BOX(&ListOps::rademacher));
    m.impl("probe_", TORCH_BOX(&ListOps::probe));
    m.impl("step_", TORCH_BOX(&ListOps::step));
    m.impl("refresh_step_", TORCH_BOX(&ListOps::refresh_step));
    m.impl("momentum_ascent_", TORCH_BOX(&ListOps::momentum_ascent));
    m.impl("gap_sums", TORCH_BOX(&ListOps::gap_sums));
    m.impl("decompose_", TORCH_BOX(&ListOps::decompose));
  }

 private:
  // What both kinds of ascent need beside their tensors.
  static void check_ascent(const char* op, std::vector<Row>& rows, const Tensors& params, const Tensor& scales,
                           const Ints& groups, const Ints& indices, const Tensor& draw) {
    set_numbers(op, "groups", rows, &Row::group, groups);
    set_numbers(op, "indices", rows, &Row::index, indices);
    for (size_t i = 0; i < params.size(); ++i) {
      if (item_size(rows[i].dtype) == 2) check_row_major(op, "params", i, params[i]);
    }
    check_scales(op, scales, rows, params[0]);
    check_draw(op, draw, params[0]);
  }

  static std::vector<Row> gap_rows(const char* op, const Tensors& grads, const Tensors& firsts) {
    std::vector<Row> rows = rows_of(op, "grads", grads);
    for (Row& row : rows) row.grad = row.param;
    set_column(op, "firsts", rows, &Row::first, firsts, grads);
    return rows;
  }

  // Rows of an update. An empty `backups` means that the parameters hold x themselves.
  static std::vector<Row> step_rows(const char* op, const Tensors& params, const Tensors& backups, const Tensors& grads,
                                    const Tensors& exp_avgs, const Tensors& hessians, const Tensor& scalars,
                                    const Ints& cohorts, const Ints& indices, const std::optional<Tensor>& noise_draw) {
    std::vector<Row> rows = rows_of(op, "params", params);
    if (!backups.empty()) set_column(op, "backups", rows, &Row::backup, backups, params);
    set_column(op, "grads", rows, &Row::grad, grads, params);
    set_column(op, "exp_avgs", rows, &Row::exp_avg, exp_avgs, params, /*state=*/true);
    set_column(op, "hessians", rows, &Row::hessian, hessians, params, /*state=*/true);
    set_numbers(op, "cohorts", rows, &Row::cohort, cohorts);
    set_numbers(op, "indices", rows, &Row::index, indices);
    for (size_t i = 0; i < params.size(); ++i) {
      if (noise_draw.has_value() && item_size(rows[i].dtype) == 2) check_row_major(op, "params", i, params[i]);
    }
    check_scalars(op, scalars, rows, params[0]);
    if (noise_draw.has_value()) check_draw(op, *noise_draw, params[0]);
    return rows;
  }
};

}  // namespace sassha
