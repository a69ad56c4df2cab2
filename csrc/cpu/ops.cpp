// Launchers and registration of the CPU kernels.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace sassha {
namespace {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

// A pass that writes more than this leaves nothing of use in a cache, so it writes past it.
constexpr int64_t kStreamElements = int64_t{4} << 20;

int64_t address(const Tensor& t) { return reinterpret_cast<int64_t>(t.data_ptr()); }

Tensor new_doubles(const Tensor& like, std::initializer_list<int64_t> sizes) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_zeros(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()),
                                  ScalarType::Double);
}

// ---- launchers: rows in, one parallel loop each ---------------------------------------------------------------

struct Rows {
  const Row* data;
  int64_t size;
};

void square_sums(Rows rows, bool adaptive, double* sums) {
  const Pieces pieces(rows.data, rows.size);
  std::vector<double> partial(static_cast<size_t>(pieces.size()));
  pieces.for_each([&](int64_t i, const Piece& piece) {
    partial[i] = kernels().square_sum(rows.data[piece.row], piece.begin, piece.size, adaptive);
  });
  for (int64_t i = 0; i < pieces.size(); ++i) sums[rows.data[pieces[i].row].group] += partial[i];
}

void perturb(Rows rows, const AscentOptions& options) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().perturb(rows.data[piece.row], piece.begin, piece.size, options);
  });
}

void restore(Rows rows) {
  const Pieces pieces(rows.data, rows.size);
  const bool stream = pieces.elements() > kStreamElements;
  pieces.for_each(
      [&](int64_t, const Piece& piece) { kernels().restore(rows.data[piece.row], piece.begin, piece.size, stream); });
}

void rademacher(Rows rows, int64_t seed, int64_t draw) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().rademacher(rows.data[piece.row], piece.begin, piece.size, static_cast<uint64_t>(seed),
                         static_cast<uint32_t>(draw));
  });
}

void probe(Rows rows, double h, int64_t seed, int64_t draw) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().probe(rows.data[piece.row], piece.begin, piece.size, static_cast<uint64_t>(seed),
                    static_cast<uint32_t>(draw), h);
  });
}

// `tallies` has one entry per row, or is null on an ordinary step.
void step(Rows rows, const double* scalars, int64_t seed, int64_t draw, Tally* tallies) {
  const Pieces pieces(rows.data, rows.size);
  const bool in_place = rows.size == 0 || rows.data[0].param == rows.data[0].backup;
  const StepOptions options{reinterpret_cast<const StepScalars<double>*>(scalars), static_cast<uint64_t>(seed),
                            static_cast<uint32_t>(draw), !in_place && pieces.elements() > kStreamElements};
  std::vector<Tally> partial(tallies == nullptr ? 0 : static_cast<size_t>(pieces.size()));
  pieces.for_each([&](int64_t i, const Piece& piece) {
    const Tally tally = kernels().step(rows.data[piece.row], piece.begin, piece.size, options);
    if (tallies != nullptr) partial[i] = tally;
  });
  for (size_t i = 0; i < partial.size(); ++i) {
    Tally& total = tallies[pieces[static_cast<int64_t>(i)].row];
    total.trace += partial[i].trace;
    total.negative += partial[i].negative;
    total.finite += partial[i].finite;
  }
}

// ---- checks of scalar tables ---------------------------------------------------------------------------------

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

// ---- operators on lists --------------------------------------------------------------------------------------

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
                int64_t seed, int64_t draw) {
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
  perturb(view(rows), {static_cast<const float*>(scales.data_ptr()), adaptive, static_cast<uint64_t>(seed),
                       static_cast<uint32_t>(draw)});
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
                           const Tensors& exp_avgs, const Tensors& hessians, const Tensor& scalars,
                           const Ints& cohorts) {
  std::vector<Row> rows = rows_of(op, "params", params);
  if (!backups.empty()) set_column(op, "backups", rows, &Row::backup, backups, params);
  set_column(op, "grads", rows, &Row::grad, grads, params);
  set_column(op, "exp_avgs", rows, &Row::exp_avg, exp_avgs, params, /*state=*/true);
  set_column(op, "hessians", rows, &Row::hessian, hessians, params, /*state=*/true);
  set_numbers(op, "cohorts", rows, &Row::cohort, cohorts);
  check_scalars(op, scalars, rows);
  return rows;
}

void op_step(Tensors params, Tensors backups, Tensors grads, Tensors exp_avgs, Tensors hessians, Tensor scalars,
             Ints cohorts) {
  step(view(step_rows("sassha_step", params, backups, grads, exp_avgs, hessians, scalars, cohorts)),
       static_cast<const double*>(scalars.data_ptr()), 0, 0, nullptr);
}

Tensor op_refresh_step(Tensors params, Tensors backups, Tensors grads, Tensors exp_avgs, Tensors hessians,
                       Tensors products, Tensor scalars, Ints cohorts, Ints indices, bool is_signed, int64_t seed,
                       int64_t draw) {
  const char* op = "sassha_refresh_step";
  std::vector<Row> rows = step_rows(op, params, backups, grads, exp_avgs, hessians, scalars, cohorts);
  set_column(op, "products", rows, &Row::product, products, params);
  set_numbers(op, "indices", rows, &Row::index, indices);
  for (size_t i = 0; i < params.size(); ++i) {
    if (is_signed) {
      rows[i].flags = kSignedProduct;
      continue;
    }
    check_row_major(op, "params", i, params[i]);
    const double samples = static_cast<const StepScalars<double>*>(scalars.data_ptr())[rows[i].cohort].samples;
    STD_TORCH_CHECK(samples == 1, op, ": products[", i, "] is one unsigned product, but its scalars count ", samples,
                    " samples; sum z * Hz over the probes and pass signed=True");
  }
  Tensor tallies = new_doubles(scalars, {static_cast<int64_t>(rows.size()), kTallyWords});
  step(view(rows), static_cast<const double*>(scalars.data_ptr()), seed, draw, static_cast<Tally*>(tallies.data_ptr()));
  return tallies;
}

// ---- operators on a table of addresses -----------------------------------------------------------------------

Row* rows_in(const Tensor& table) { return static_cast<Row*>(table.data_ptr()); }
Rows view(const Tensor& table) { return {rows_in(table), table.size(0)}; }

constexpr int64_t kParamColumn = offsetof(Row, param) / sizeof(int64_t);
constexpr int64_t kGradColumn = offsetof(Row, grad) / sizeof(int64_t);
constexpr int64_t kExpAvgColumn = offsetof(Row, exp_avg) / sizeof(int64_t);
constexpr int64_t kHessianColumn = offsetof(Row, hessian) / sizeof(int64_t);
constexpr int64_t kLastAddress = offsetof(Row, product) / sizeof(int64_t);

void use_params_as_backups(const Tensor& table, bool restored) {
  if (!restored) return;
  for (int64_t i = 0; i < table.size(0); ++i) rows_in(table)[i].backup = rows_in(table)[i].param;
}

// Owns a list that came in over the boundary.
struct ListOwner {
  explicit ListOwner(StableListHandle handle) : list(handle) {}
  ListOwner(const ListOwner&) = delete;
  ~ListOwner() { torch_delete_list(list); }
  size_t size() const {
    size_t n = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list, &n));
    return n;
  }
  StableListHandle list;
};

// Marks the rows whose gradient is alone in its storage, and returns how many are not. `storages` has their sizes.
int64_t mark_owned(Row* rows, const std::vector<int64_t>& storages) {
  struct Range {
    int64_t begin, end;
    size_t row;
  };
  std::vector<Range> ranges;
  ranges.reserve(storages.size());
  bool sorted = true;
  for (size_t i = 0; i < storages.size(); ++i) {
    const int64_t bytes = rows[i].numel * item_size(rows[i].dtype);
    rows[i].flags = storages[i] == bytes ? rows[i].flags | kOwnsBuffer : rows[i].flags & ~kOwnsBuffer;
    if (bytes == 0) continue;
    sorted = sorted && (ranges.empty() || ranges.back().begin <= rows[i].grad);
    ranges.push_back({rows[i].grad, rows[i].grad + bytes, i});
  }
  if (!sorted) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  }
  size_t widest = 0;  // the range that reaches furthest so far
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[widest].end) {
      rows[ranges[i].row].flags &= ~kOwnsBuffer;
      rows[ranges[widest].row].flags &= ~kOwnsBuffer;
    }
    if (ranges[i].end > ranges[widest].end) widest = i;
  }
  int64_t shared = 0;
  for (size_t i = 0; i < storages.size(); ++i) shared += (rows[i].flags & kOwnsBuffer) == 0;
  return shared;
}

// Writes the addresses of `tensors` into a column. Returns how many of them do not fit their row in dtype, shape or
// order of elements (the caller then finds out which and says so), and how many gradients share memory.
//
// This runs over every gradient of every step, so it takes the list as it crosses the boundary and makes no
// torch::stable::Tensor of its entries.
std::tuple<int64_t, int64_t> table_bind(const Tensor& table, int64_t column, StableListHandle tensors, size_t size) {
  STD_TORCH_CHECK(table.is_contiguous() && table.dim() == 2 && table.size(1) == kRowWords &&
                      table.scalar_type() == ScalarType::Long && table.size(0) == static_cast<int64_t>(size),
                  "sassha_table_bind: table must be a contiguous int64 tensor of shape [", size, ", ", kRowWords, "]");
  STD_TORCH_CHECK(column >= 0 && column <= kLastAddress, "sassha_table_bind: column ", column, " holds no addresses");
  Row* rows = rows_in(table);
  std::vector<int64_t> storages(column == kGradColumn ? size : 0);
  int64_t misfits = 0;
  for (size_t i = 0; i < size; ++i) {
    StableIValue item;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(tensors, i, &item));
    const TensorView t(torch::stable::detail::to<AtenTensorHandle>(item));
    Row& row = rows[i];
    if (column == kParamColumn) {
      row.dtype = t.dtype();
      row.numel = t.numel();
      row.layout = t.layout();
    }
    const bool state = column == kExpAvgColumn || column == kHessianColumn;
    const int64_t expected = state && row.dtype != kFloat64 ? static_cast<int64_t>(kFloat32) : row.dtype;
    if (t.dtype() != expected || t.numel() != row.numel || t.layout() != row.layout) {
      ++misfits;
      continue;
    }
    reinterpret_cast<int64_t*>(&row)[column] = t.address();
    if (!storages.empty()) storages[i] = t.storage_size();
  }
  return {misfits, misfits == 0 ? mark_owned(rows, storages) : 0};
}

void boxed_table_bind(StableIValue* stack, uint64_t, uint64_t) {
  namespace detail = torch::stable::detail;
  const Tensor table = detail::to<Tensor>(stack[0]);
  const int64_t column = detail::to<int64_t>(stack[1]);
  const ListOwner tensors(detail::to<StableListHandle>(stack[2]));
  const auto [misfits, shared] = table_bind(table, column, tensors.list, tensors.size());
  stack[0] = detail::from(misfits);
  stack[1] = detail::from(shared);
}

Tensor op_table_square_sums(Tensor table, int64_t n_groups, bool adaptive) {
  Tensor sums = new_doubles(table, {n_groups});
  square_sums(view(table), adaptive, static_cast<double*>(sums.data_ptr()));
  return sums;
}

// With `into_grads`, x goes into the gradients' own memory.
void op_table_perturb(Tensor table, Tensor scales, bool into_grads, bool adaptive, int64_t seed, int64_t draw) {
  if (into_grads) {
    for (int64_t i = 0; i < table.size(0); ++i) rows_in(table)[i].backup = rows_in(table)[i].grad;
  }
  perturb(view(table), {static_cast<const float*>(scales.data_ptr()), adaptive, static_cast<uint64_t>(seed),
                        static_cast<uint32_t>(draw)});
}

void op_table_restore(Tensor table) { restore(view(table)); }

// With `restored`, the parameters hold x themselves; else x is in the backups, and the update restores as it goes.
void op_table_step(Tensor table, std::vector<double> scalars, bool restored) {
  use_params_as_backups(table, restored);
  step(view(table), scalars.data(), 0, 0, nullptr);
}

Tensor op_table_refresh_step(Tensor table, std::vector<double> scalars, bool restored, int64_t seed, int64_t draw) {
  use_params_as_backups(table, restored);
  Tensor tallies = new_doubles(table, {table.size(0), kTallyWords});
  step(view(table), scalars.data(), seed, draw, static_cast<Tally*>(tallies.data_ptr()));
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
  m.impl("table_bind", &sassha::boxed_table_bind);
  m.impl("table_square_sums", TORCH_BOX(&sassha::op_table_square_sums));
  m.impl("table_perturb", TORCH_BOX(&sassha::op_table_perturb));
  m.impl("table_restore", TORCH_BOX(&sassha::op_table_restore));
  m.impl("table_step", TORCH_BOX(&sassha::op_table_step));
  m.impl("table_refresh_step", TORCH_BOX(&sassha::op_table_refresh_step));
}

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&sassha::op_cpu_isa));
}
