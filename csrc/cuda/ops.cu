// All operators for CUDA: on tensor lists, whose rows are copied to the device, and on tables that are there already.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "../library.h"
#include "../list_ops.h"
#include "launch.h"

#ifndef SASSHA_DISPATCH
#define SASSHA_DISPATCH CUDA
#endif

namespace sassha::cuda {
namespace {

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

AscentArgs ascent_args(const Tensor& scales, int64_t seed, const Tensor& draw) {
  return {data<const float>(scales), static_cast<uint64_t>(seed), data<const int64_t>(draw)};
}

StepArgs step_args(const Tensor& scalars, int64_t seed, int64_t draw, const std::optional<Tensor>& noise_draw,
                   int64_t sample = kMagnitude, bool adaptive = false) {
  return {data<const StepScalars<double>>(scalars),
          static_cast<uint64_t>(seed),
          static_cast<uint32_t>(draw),
          noise_draw.has_value() ? data<const int64_t>(*noise_draw) : nullptr,
          static_cast<Sample>(sample),
          adaptive};
}

// Memory that the passes need on the device, where `like` is.
struct SquareMemory {
  SquareMemory(const DeviceRows& rows, const Tensor& like, int64_t n_groups)
      : partials(new_tensor(like, {rows.n_chunks(), 2}, ScalarType::Double)),
        totals(new_tensor(like, {n_groups}, ScalarType::Double)) {
    static_assert(sizeof(PartialSum) == 2 * sizeof(double), "two words of a float64 tensor");
  }
  GroupSums sums() const { return {data<PartialSum>(partials), data<double>(totals), totals.size(0)}; }

  Tensor partials, totals;
};

struct TallyMemory {
  TallyMemory(const DeviceRows& rows, const Tensor& like)
      : partials(new_tensor(like, {rows.n_chunks(), kTallyWords}, ScalarType::Double)),
        totals(new_tensor(like, {rows.size, kTallyWords}, ScalarType::Double)) {}
  Tallies tallies() const { return {data<Tally>(partials), data<Tally>(totals)}; }

  Tensor partials, totals;
};

// The passes with it.
Tensor square_sums_in(const DeviceRows& rows, const Tensor& like, bool adaptive, int64_t n_groups, Queue queue) {
  const SquareMemory memory(rows, like, n_groups);
  square_sums(rows, adaptive, memory.sums(), queue);
  return memory.totals;
}

Tensor refresh_step_in(const DeviceRows& rows, const Tensor& like, const StepArgs& args, std::optional<double> power,
                       Queue queue) {
  const TallyMemory memory(rows, like);
  step(rows, args, power, memory.tallies(), std::nullopt, queue);
  return memory.totals;
}

Tensor gap_sums_in(const DeviceRows& rows, const Tensor& like, Queue queue) {
  const Tensor partials = new_tensor(like, {rows.n_chunks(), kGapWords}, ScalarType::Double);
  Tensor total = new_tensor(like, {kGapWords}, ScalarType::Double);
  gap_sums(rows, data<GapSums>(partials), data<GapSums>(total), queue);
  return total;
}

// ---- lists ---------------------------------------------------------------------------------------------------

// Rows and chunks of a call, copied to the device.
class Upload {
 public:
  Upload(const std::vector<Row>& rows, const Tensor& like)
      : on_(like.get_device_index()), chunks_(rows.data(), static_cast<int64_t>(rows.size())) {
    const size_t row_bytes = rows.size() * sizeof(Row);
    std::vector<char> bytes(row_bytes + chunks_.bytes());
    std::memcpy(bytes.data(), rows.data(), row_bytes);
    chunks_.write(bytes.data() + row_bytes);
    memory_ = new_tensor(like, {static_cast<int64_t>(bytes.size() / sizeof(int64_t))}, ScalarType::Long);
    copy_to_device(memory_.data_ptr(), bytes.data(), bytes.size(), on_.queue());
    rows_.rows = data<const Row>(memory_);
    rows_.size = static_cast<int64_t>(rows.size());
    rows_.chunks = reinterpret_cast<const Chunk*>(rows_.rows + rows.size());
    std::memcpy(rows_.counts, chunks_.counts, sizeof(rows_.counts));
  }

  const DeviceRows& rows() const { return rows_; }
  Queue queue() const { return on_.queue(); }

 private:
  OnDevice on_;
  Chunks chunks_;
  Tensor memory_;
  DeviceRows rows_;
};

struct Cuda {
  static Tensor square_sums(const std::vector<Row>& rows, const Tensor& like, bool adaptive, int64_t n_groups) {
    const Upload there(rows, like);
    return square_sums_in(there.rows(), like, adaptive, n_groups, there.queue());
  }

  static void perturb(const std::vector<Row>& rows, const Tensor& like, const Tensor& scales, bool adaptive,
                      int64_t seed, const Tensor& draw) {
    const Upload there(rows, like);
    cuda::perturb(there.rows(), adaptive, ascent_args(scales, seed, draw), there.queue());
  }

  static void restore(const std::vector<Row>& rows, const Tensor& like) {
    const Upload there(rows, like);
    cuda::restore(there.rows(), there.queue());
  }

  static void rademacher(const std::vector<Row>& rows, const Tensor& like, int64_t seed, int64_t draw) {
    const Upload there(rows, like);
    cuda::rademacher(there.rows(), static_cast<uint64_t>(seed), static_cast<uint32_t>(draw), there.queue());
  }

  static void probe(const std::vector<Row>& rows, const Tensor& like, double h, int64_t seed, int64_t draw) {
    const Upload there(rows, like);
    cuda::probe(there.rows(), h, static_cast<uint64_t>(seed), static_cast<uint32_t>(draw), there.queue());
  }

  // The powers are on the device, where only the kernels see them.
  static void step(const std::vector<Row>& rows, const Tensor& like, const Tensor& scalars, int64_t seed,
                   const std::optional<Tensor>& noise_draw) {
    const Upload there(rows, like);
    cuda::step(there.rows(), step_args(scalars, seed, 0, noise_draw), std::nullopt, std::nullopt, std::nullopt,
               there.queue());
  }

  static Tensor refresh_step(const std::vector<Row>& rows, const Tensor& like, const Tensor& scalars, int64_t seed,
                             int64_t draw, const std::optional<Tensor>& noise_draw, int64_t sample) {
    const Upload there(rows, like);
    return refresh_step_in(there.rows(), like, step_args(scalars, seed, draw, noise_draw, sample), std::nullopt,
                           there.queue());
  }

  static void momentum_ascent(const std::vector<Row>& rows, const Tensor& like, const Tensor& scales, bool adaptive,
                              int64_t seed, const Tensor& draw) {
    const Upload there(rows, like);
    cuda::momentum_ascent(there.rows(), adaptive, ascent_args(scales, seed, draw), there.queue());
  }

  static Tensor gap_sums(const std::vector<Row>& rows, const Tensor& like) {
    const Upload there(rows, like);
    return gap_sums_in(there.rows(), like, there.queue());
  }

  static void decompose(const std::vector<Row>& rows, const Tensor& like, const Tensor& scales) {
    const Upload there(rows, like);
    cuda::decompose(there.rows(), data<const GapScales>(scales), there.queue());
  }
};

// ---- tables --------------------------------------------------------------------------------------------------

DeviceRows rows_in(const char* op, const Tensor& table, const std::optional<Tensor>& chunks, const Ints& counts) {
  STD_TORCH_CHECK(table.is_contiguous() && table.dim() == 2 && table.size(1) == kRowWords &&
                      table.scalar_type() == ScalarType::Long,
                  op, ": table must be a contiguous int64 tensor of shape [rows, ", kRowWords, "]");
  STD_TORCH_CHECK(chunks.has_value() && counts.size() == static_cast<size_t>(kDTypes), op,
                  ": a table on a device needs its chunks, and their number for each of ", kDTypes, " dtypes");
  DeviceRows rows{data<const Row>(table), table.size(0), data<const Chunk>(*chunks), {}};
  for (int64_t dtype = 0; dtype < kDTypes; ++dtype) rows.counts[dtype] = counts[dtype];
  STD_TORCH_CHECK(same_device(*chunks, table) && chunks->scalar_type() == ScalarType::Int && chunks->is_contiguous() &&
                      chunks->numel() == 2 * (rows.n_chunks() + rows.size),
                  op, ": chunks must be a contiguous int32 tensor of shape [", rows.n_chunks() + rows.size, ", 2] on ",
                  device_of(table));
  return rows;
}

Tensor op_table_square_sums(Tensor table, int64_t n_groups, bool adaptive, std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  return square_sums_in(rows_in("sassha_table_square_sums", table, chunks, counts), table, adaptive, n_groups,
                        on.queue());
}

void op_table_perturb(Tensor table, Tensor scales, bool adaptive, int64_t seed, Tensor draw,
                      std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  check_scales("sassha_table_perturb", scales, {}, table);
  check_draw("sassha_table_perturb", draw, table);
  perturb(rows_in("sassha_table_perturb", table, chunks, counts), adaptive, ascent_args(scales, seed, draw),
          on.queue());
}

void op_table_restore(Tensor table, std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  restore(rows_in("sassha_table_restore", table, chunks, counts), on.queue());
}

// x is in the backups, which may be the parameters themselves; else the update restores as it goes.
void op_table_step(Tensor table, Tensor scalars, int64_t seed, std::optional<Tensor> noise_draw,
                   std::optional<double> power, std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  check_scalars("sassha_table_step", scalars, {}, table);
  step(rows_in("sassha_table_step", table, chunks, counts), step_args(scalars, seed, 0, noise_draw), power,
       std::nullopt, std::nullopt, on.queue());
}

Tensor op_table_refresh_step(Tensor table, Tensor scalars, int64_t seed, int64_t draw, std::optional<Tensor> noise_draw,
                             int64_t sample, std::optional<double> power, std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  check_scalars("sassha_table_refresh_step", scalars, {}, table);
  return refresh_step_in(rows_in("sassha_table_refresh_step", table, chunks, counts), table,
                         step_args(scalars, seed, draw, noise_draw, sample), power, on.queue());
}

// x is in the backups for good.
Tensor op_table_apart_step(Tensor table, Tensor scalars, int64_t n_groups, bool adaptive, int64_t seed,
                           std::optional<Tensor> noise_draw, std::optional<double> power, std::optional<Tensor> chunks,
                           Ints counts) {
  const OnDevice on(table.get_device_index());
  check_scalars("sassha_table_apart_step", scalars, {}, table);
  const DeviceRows rows = rows_in("sassha_table_apart_step", table, chunks, counts);
  const SquareMemory squares(rows, table, n_groups);
  step(rows, step_args(scalars, seed, 0, noise_draw, kMagnitude, adaptive), power, std::nullopt, squares.sums(),
       on.queue());
  return squares.totals;
}

std::tuple<Tensor, Tensor> op_table_apart_refresh_step(Tensor table, Tensor scalars, int64_t n_groups, bool adaptive,
                                                       int64_t seed, int64_t draw, std::optional<Tensor> noise_draw,
                                                       int64_t sample, std::optional<double> power,
                                                       std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  check_scalars("sassha_table_apart_refresh_step", scalars, {}, table);
  const DeviceRows rows = rows_in("sassha_table_apart_refresh_step", table, chunks, counts);
  const TallyMemory tallies(rows, table);
  const SquareMemory squares(rows, table, n_groups);
  step(rows, step_args(scalars, seed, draw, noise_draw, sample, adaptive), power, tallies.tallies(), squares.sums(),
       on.queue());
  return {tallies.totals, squares.totals};
}

void op_table_momentum_ascent(Tensor table, Tensor scales, bool adaptive, int64_t seed, Tensor draw,
                              std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  check_scales("sassha_table_momentum_ascent", scales, {}, table);
  check_draw("sassha_table_momentum_ascent", draw, table);
  momentum_ascent(rows_in("sassha_table_momentum_ascent", table, chunks, counts), adaptive,
                  ascent_args(scales, seed, draw), on.queue());
}

Tensor op_table_gap_sums(Tensor table, std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  return gap_sums_in(rows_in("sassha_table_gap_sums", table, chunks, counts), table, on.queue());
}

void op_table_decompose(Tensor table, Tensor scales, std::optional<Tensor> chunks, Ints counts) {
  const OnDevice on(table.get_device_index());
  check_gap_scales("sassha_table_decompose", scales, {}, table);
  decompose(rows_in("sassha_table_decompose", table, chunks, counts), data<const GapScales>(scales), on.queue());
}

}  // namespace
}  // namespace sassha::cuda

SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, SASSHA_DISPATCH, m) {
  sassha::ListOps<sassha::cuda::Cuda>::register_in(m);
  m.impl("table_square_sums", TORCH_BOX(&sassha::cuda::op_table_square_sums));
  m.impl("table_perturb", TORCH_BOX(&sassha::cuda::op_table_perturb));
  m.impl("table_restore", TORCH_BOX(&sassha::cuda::op_table_restore));
  m.impl("table_step", TORCH_BOX(&sassha::cuda::op_table_step));
  m.impl("table_refresh_step", TORCH_BOX(&sassha::cuda::op_table_refresh_step));
  m.impl("table_apart_step", TORCH_BOX(&sassha::cuda::op_table_apart_step));
  m.impl("table_apart_refresh_step", TORCH_BOX(&sassha::cuda::op_table_apart_refresh_step));
  m.impl("table_momentum_ascent", TORCH_BOX(&sassha::cuda::op_table_momentum_ascent));
  m.impl("table_gap_sums", TORCH_BOX(&sassha::cuda::op_table_gap_sums));
  m.impl("table_decompose", TORCH_BOX(&sassha::cuda::op_table_decompose));
}
