// Operators on a table of addresses that Python keeps between steps: schemas, checks and arguments, the same on every
// device. They are for eager execution by the optimizer alone.
//
// `Device` has the passes over rows as static functions, and `Rows`: a table whose memory was found to be one. The
// table lies where the kernels run. On a device it comes with its chunks, their number by dtype, and the power that all
// cohorts share if they do. Outputs are the caller's, and are overwritten. The journal (params.h) lies in host memory.
// An update with `tallies` is a refresh; one with `squares` is of weights that are kept in state.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>

#include "formats.h"
#include "math.h"
#include "passes.h"
#include "rows.h"

namespace sassha {

// One call of an operator: its name and its table, against which the other arguments are checked.
struct Call {
  const char* op;
  const Tensor& table;

  Call(const char* op, const Tensor& table) : op(op), table(table) {
    check("table", table, ScalarType::Long, {"rows", kRowWords});
  }

  void check(const char* name, const Tensor& t, ScalarType type, std::initializer_list<Dim> shape) const {
    check_tensor(op, name, t, type, shape, &table);
  }

  // The number of a draw lives in memory, so that a captured graph can count it up.
  const int64_t* draw(const char* name, const Tensor& t) const {
    check(name, t, ScalarType::Long, {1});
    return data<const int64_t>(t);
  }

  Journal& journal(const Tensor& t) const {
    check_tensor(op, "journal", t, ScalarType::Long, {kJournalWords}, nullptr);
    return *data<Journal>(t);
  }

  GroupSums sums(const char* name, const Tensor& t) const {
    check(name, t, ScalarType::Double, {"groups"});
    return {data<double>(t), t.size(0)};
  }

  // What the kernels trust in rows, as far as the host can read them: the addresses that a pass takes, and that `name`
  // has the row that they name.
  void check_rows(std::initializer_list<int64_t> columns, int64_t Row::* place = nullptr, const char* name = "",
                  int64_t size = 0) const {
    if (!table.is_cpu()) return;
    for (int64_t i = 0; i < table.size(0); ++i) {
      const Row& row = data<const Row>(table)[i];
      STD_TORCH_CHECK(row.numel >= 0 && row.dtype >= 0 && row.dtype < kDTypes, op, ": row ", i, " of table has numel ",
                      row.numel, " and dtype ", row.dtype, ", expected those of a parameter; bind it first");
      const int64_t format = data<const Row>(table)[0].format;
      STD_TORCH_CHECK(row.format == format && takes_format(row.dtype, format), op, ": row ", i, " of table has dtype ",
                      row.dtype, " and format ", row.format,
                      ", expected one that this dtype has and all rows share; make a table for each format");
      for (const int64_t column : columns) {
        STD_TORCH_CHECK(row.numel == 0 || address_in(row, column) != 0 || !has_column(format, column), op, ": row ", i,
                        " of table has no address in column ", column, ", expected that of ", row.numel, " elements");
      }
      if (place == nullptr) continue;
      STD_TORCH_CHECK(row.*place >= 0 && row.*place < size, op, ": row ", i, " of table belongs to entry ", row.*place,
                      " of ", name, ", expected one below ", size);
    }
  }
};

inline void define_table_ops(torch::stable::detail::StableLibrary& m) {
  m.def(
      "table_square_sums(Tensor table, Tensor(a!) sums, int column, bool adaptive, Tensor? chunks=None, "
      "int[] counts=[]) -> ()");
  m.def(
      "table_perturb(Tensor table, Tensor scales, bool adaptive, int seed, Tensor draw, Tensor(a!) journal, "
      "Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def("table_restore(Tensor table, Tensor(a!) journal, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def(
      "table_step(Tensor table, Tensor scalars, int seed, int draw, Tensor? noise_draw, int sample, bool zero_is_seen, "
      "bool adaptive, Tensor(a!)? tallies, Tensor(b!)? squares, Tensor(c!) journal, float? power=None, Tensor? "
      "state_draw=None, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def(
      "table_momentum_ascent(Tensor table, Tensor scales, bool adaptive, int seed, Tensor draw, Tensor? chunks=None, "
      "int[] counts=[]) -> ()");
  m.def("table_gap_sums(Tensor table, Tensor(a!) sums, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def("table_decompose(Tensor table, Tensor scales, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def("table_unseen_sums(Tensor table, Tensor tallies, Tensor(a!) sums, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def(
      "table_fill_unseen(Tensor table, Tensor sums, int seed=0, Tensor? state_draw=None, Tensor? chunks=None, "
      "int[] counts=[]) -> ()");
  m.def("table_rademacher(Tensor table, int seed, int draw, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def("table_probe(Tensor table, Tensor h, int seed, int draw, Tensor? chunks=None, int[] counts=[]) -> ()");
}

template <typename Device>
struct TableOps {
  using Rows = typename Device::Rows;
  using Optional = std::optional<Tensor>;

  static void square_sums(Tensor table, Tensor sums, int64_t column, bool adaptive, Optional chunks, Ints counts) {
    const Call call("sassha_table_square_sums", table);
    const GroupSums out = call.sums("sums", sums);
    STD_TORCH_CHECK(column >= 0 && column <= kFirst && column != kExpAvg && column != kHessian, call.op, ": column is ",
                    column, ", expected one that holds addresses of tensors like the parameters");
    call.check_rows({column, adaptive ? kParam : column}, &Row::group, "sums", out.n_groups);
    Device::square_sums(Rows(call.op, table, chunks, counts), column, adaptive, out);
  }

  static void perturb(Tensor table, Tensor scales, bool adaptive, int64_t seed, Tensor draw, Tensor journal,
                      Optional chunks, Ints counts) {
    const Call call("sassha_table_perturb", table);
    const AscentArgs args = ascent_args(call, scales, adaptive, seed, draw);
    Journal& written = call.journal(journal);
    call.check_rows({kParam, kGrad, kBackup, kCorrection}, &Row::group, "scales", scales.size(0));
    Device::perturb(Rows(call.op, table, chunks, counts), args);
    written.x_in_backup = 1;
  }

  static void restore(Tensor table, Tensor journal, Optional chunks, Ints counts) {
    const Call call("sassha_table_restore", table);
    Journal& written = call.journal(journal);
    call.check_rows({kParam, kBackup});
    Device::restore(Rows(call.op, table, chunks, counts));
    written.x_in_backup = 0;
  }

  // x is in the backups, which may be the parameters themselves; else the update restores as it goes.
  static void step(Tensor table, Tensor scalars, int64_t seed, int64_t draw, Optional noise_draw, int64_t sample,
                   bool zero_is_seen, bool adaptive, Optional tallies, Optional squares, Tensor journal,
                   std::optional<double> power, Optional state_draw, Optional chunks, Ints counts) {
    const Call call("sassha_table_step", table);
    call.check("scalars", scalars, ScalarType::Double, {"cohorts", kStepScalarWords});
    STD_TORCH_CHECK(sample >= kMagnitude && sample <= kSquare, call.op, ": sample is ", sample,
                    ", expected 0 (magnitude), 1 (signed) or 2 (square)");
    if (tallies) call.check("tallies", *tallies, ScalarType::Double, {table.size(0), kTallyWords});
    const StepArgs args{data<const StepScalars<double>>(scalars),
                        static_cast<uint64_t>(seed),
                        static_cast<uint32_t>(draw),
                        noise_draw ? call.draw("noise_draw", *noise_draw) : nullptr,
                        static_cast<Sample>(sample),
                        zero_is_seen,
                        /*refresh=*/tallies.has_value(),
                        /*in_state=*/squares.has_value(),
                        adaptive,
                        state_draw ? call.draw("state_draw", *state_draw) : nullptr};
    const StepSums sums{tallies ? data<Tally>(*tallies) : nullptr,
                        squares ? call.sums("squares", *squares) : GroupSums{nullptr, 0}};
    Journal& written = call.journal(journal);
    call.check_rows(
        {squares ? kBackup : kParam, kBackup, kGrad, kExpAvg, kHessian, kCorrection, kExpAvgScale, kHessianScale},
        &Row::cohort, "scalars", scalars.size(0));
    if (squares) call.check_rows({}, &Row::group, "squares", sums.squares.n_groups);
    Device::step(Rows(call.op, table, chunks, counts), args, sums, power);
    ++written.updates;
    if (!squares) written.x_in_backup = 0;
  }

  // Parameters from x, which is kept in state, and from the momentum.
  static void momentum_ascent(Tensor table, Tensor scales, bool adaptive, int64_t seed, Tensor draw, Optional chunks,
                              Ints counts) {
    const Call call("sassha_table_momentum_ascent", table);
    const AscentArgs args = ascent_args(call, scales, adaptive, seed, draw);
    call.check_rows({kParam, kBackup, kExpAvg, kCorrection, kExpAvgScale}, &Row::group, "scales", scales.size(0));
    Device::momentum_ascent(Rows(call.op, table, chunks, counts), args);
  }

  static void gap_sums(Tensor table, Tensor sums, Optional chunks, Ints counts) {
    const Call call("sassha_table_gap_sums", table);
    call.check("sums", sums, ScalarType::Double, {kGapWords});
    call.check_rows({kGrad, kFirst});
    Device::gap_sums(Rows(call.op, table, chunks, counts), data<GapSums>(sums));
  }

  static void decompose(Tensor table, Tensor scales, Optional chunks, Ints counts) {
    const Call call("sassha_table_decompose", table);
    call.check("scales", scales, ScalarType::Float, {"groups", kGapScaleWords});
    call.check_rows({kGrad, kFirst}, &Row::group, "scales", scales.size(0));
    Device::decompose(Rows(call.op, table, chunks, counts), data<const GapScales>(scales));
  }

  // After a refresh, as long as its gradients and products are there. Rows without a product are left alone.
  static void unseen_sums(Tensor table, Tensor tallies, Tensor sums, Optional chunks, Ints counts) {
    const Call call("sassha_table_unseen_sums", table);
    call.check("tallies", tallies, ScalarType::Double, {table.size(0), kTallyWords});
    call.check("sums", sums, ScalarType::Double, {table.size(0), kUnseenWords});
    call.check_rows({kGrad, kHessian, kHessianScale});
    Device::unseen_sums(Rows(call.op, table, chunks, counts), data<const Tally>(tallies), data<Unseen>(sums));
  }

  static void fill_unseen(Tensor table, Tensor sums, int64_t seed, Optional state_draw, Optional chunks, Ints counts) {
    const Call call("sassha_table_fill_unseen", table);
    call.check("sums", sums, ScalarType::Double, {table.size(0), kUnseenWords});
    call.check_rows({kGrad, kHessian, kHessianScale});
    if (table.is_cpu()) {
      for (int64_t i = 0; i < table.size(0); ++i) {
        const Row& row = data<const Row>(table)[i];
        STD_TORCH_CHECK(row.product != 0 || row.numel == 0 || !has_mean(data<const Unseen>(sums)[i]), call.op, ": row ",
                        i, " of table has no address in column ", static_cast<int64_t>(kProduct),
                        ", but sums has elements of it");
      }
    }
    const FillArgs args{data<const Unseen>(sums), static_cast<uint64_t>(seed),
                        state_draw ? call.draw("state_draw", *state_draw) : nullptr};
    Device::fill_unseen(Rows(call.op, table, chunks, counts), args);
  }

  // Into the parameters' column. Signs are numbered by element of a row, so rows are in logical order.
  static void rademacher(Tensor table, int64_t seed, int64_t draw, Optional chunks, Ints counts) {
    const Call call("sassha_table_rademacher", table);
    call.check_rows({kParam});
    Device::rademacher(Rows(call.op, table, chunks, counts), static_cast<uint64_t>(seed), static_cast<uint32_t>(draw));
  }

  // h lies where the kernels run, as it is made of a norm that nobody waits for.
  static void probe(Tensor table, Tensor h, int64_t seed, int64_t draw, Optional chunks, Ints counts) {
    const Call call("sassha_table_probe", table);
    call.check("h", h, ScalarType::Double, {});
    call.check_rows({kParam});
    Device::probe(Rows(call.op, table, chunks, counts), data<const double>(h), static_cast<uint64_t>(seed),
                  static_cast<uint32_t>(draw));
  }

  static void register_in(torch::stable::detail::StableLibrary& m) {
    m.impl("table_square_sums", TORCH_BOX(&TableOps::square_sums));
    m.impl("table_perturb", TORCH_BOX(&TableOps::perturb));
    m.impl("table_restore", TORCH_BOX(&TableOps::restore));
    m.impl("table_step", TORCH_BOX(&TableOps::step));
    m.impl("table_momentum_ascent", TORCH_BOX(&TableOps::momentum_ascent));
    m.impl("table_gap_sums", TORCH_BOX(&TableOps::gap_sums));
    m.impl("table_decompose", TORCH_BOX(&TableOps::decompose));
    m.impl("table_unseen_sums", TORCH_BOX(&TableOps::unseen_sums));
    m.impl("table_fill_unseen", TORCH_BOX(&TableOps::fill_unseen));
    m.impl("table_rademacher", TORCH_BOX(&TableOps::rademacher));
    m.impl("table_probe", TORCH_BOX(&TableOps::probe));
  }

 private:
  static AscentArgs ascent_args(const Call& call, const Tensor& scales, bool adaptive, int64_t seed,
                                const Tensor& draw) {
    call.check("scales", scales, ScalarType::Float, {"groups"});
    return {data<const float>(scales), adaptive, static_cast<uint64_t>(seed), call.draw("draw", draw)};
  }
};

}  // namespace sassha
