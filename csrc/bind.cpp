// Writing addresses into a table in host memory, and cutting its rows into chunks: the same for every device.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "formats.h"
#include "library.h"
#include "rows.h"

namespace sassha {
namespace {

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

// The type of what a column of a row holds.
int64_t stored_type(const Row& row, int64_t column) {
  const State state = state_of(row.format);
  switch (column) {
    case kExpAvg:
    case kHessian:
      if (state == State::k16) return kBFloat16;
      if (state == State::k8) return column == kExpAvg || (row.format & kFormatSigned) ? kInt8 : kUInt8;
      return row.dtype == kFloat64 ? kFloat64 : kFloat32;
    case kExpAvgScale:
      return kFloat32;
    case kHessianScale:
      return kBFloat16;
    case kCorrection:
      return correction_of(row.format) == Correction::k8 ? kInt8 : kInt16;
    default:
      return row.dtype;
  }
}

// Writes the addresses of `tensors` into a column. Returns how many of them do not fit their row in dtype, shape or
// order of elements (the caller then finds out which and says so), and how many gradients share memory.
//
// This runs over every gradient of every step, so it takes the list as it crosses the boundary and makes no
// torch::stable::Tensor of its entries.
std::tuple<int64_t, int64_t> table_bind(const Tensor& table, int64_t column, StableListHandle tensors, size_t size) {
  check_tensor("sassha_table_bind", "table", table, ScalarType::Long, {static_cast<int64_t>(size), kRowWords}, nullptr);
  STD_TORCH_CHECK(column >= 0 && column < kAddresses, "sassha_table_bind: column is ", column,
                  ", expected one that holds addresses, below ", static_cast<int64_t>(kAddresses));
  Row* rows = data<Row>(table);
  std::vector<int64_t> storages(column == kGrad ? size : 0);
  int64_t misfits = 0;
  for (size_t i = 0; i < size; ++i) {
    StableIValue item;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(tensors, i, &item));
    const TensorView t(torch::stable::detail::to<AtenTensorHandle>(item));
    Row& row = rows[i];
    if (column == kParam) {
      row.dtype = t.dtype();
      row.numel = t.numel();
      row.layout = t.layout();
    }
    const bool by_group = column == kExpAvgScale || column == kHessianScale;
    const int64_t numel = by_group ? (row.numel + kGroup - 1) / kGroup : row.numel;
    if (t.dtype() != stored_type(row, column) || t.numel() != numel || t.layout() != (by_group ? 0 : row.layout)) {
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

// The chunks of a table as one int32 tensor (see struct Chunk), and the number of chunks of each dtype with the format.
std::tuple<Tensor, Tensor> op_table_chunks(Tensor table) {
  check_tensor("sassha_table_chunks", "table", table, ScalarType::Long, {"rows", kRowWords}, nullptr);
  const Chunks found(data<const Row>(table), table.size(0));
  const int64_t pairs = static_cast<int64_t>(found.chunks.size() + found.spans.size());
  Tensor chunks = new_tensor(table, {pairs, 2}, ScalarType::Int);
  found.write(data<char>(chunks));
  Tensor counts = new_tensor(table, {kCounts}, ScalarType::Long);
  std::memcpy(counts.data_ptr(), found.counts, sizeof(found.counts));
  data<int64_t>(counts)[kDTypes] = found.format;
  return {chunks, counts};
}

}  // namespace
}  // namespace sassha

// The table lies in host memory and the tensors anywhere.
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, CPU, m) { m.impl("table_bind", &sassha::boxed_table_bind); }
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, CUDA, m) { m.impl("table_bind", &sassha::boxed_table_bind); }
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("table_chunks", TORCH_BOX(&sassha::op_table_chunks));
}
