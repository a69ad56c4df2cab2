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

// A list of tensors that came in over the boundary. Its entries belong to whoever takes them; those that nobody takes
// are deleted with the list, which by itself would leave them alive for ever.
class TakenList {
 public:
  explicit TakenList(StableListHandle handle) : list_(handle) {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list_, &size_));
  }
  TakenList(const TakenList&) = delete;
  ~TakenList() {
    StableIValue item;
    while (taken_ < size_) {
      if (torch_list_get_item(list_, taken_++, &item) != AOTI_TORCH_SUCCESS) continue;
      aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(item));
    }
    torch_delete_list(list_);
  }

  size_t size() const { return size_; }

  // The next entry.
  TensorView take() {
    StableIValue item;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list_, taken_, &item));
    ++taken_;
    return TensorView(torch::stable::detail::to<AtenTensorHandle>(item));
  }

 private:
  StableListHandle list_;
  size_t size_ = 0, taken_ = 0;
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

// Bytes of an element of what a column of a row holds.
int64_t stored_size(const Row& row, int64_t column) {
  const int64_t type = stored_type(row, column);
  return type == kInt8 || type == kUInt8 ? 1 : item_size(type);
}

// Whether a column of a row can hold a tensor: its dtype, number of elements and their order.
bool fits(const Row& row, int64_t column, const TensorView& t) {
  const bool by_group = column == kExpAvgScale || column == kHessianScale;
  const int64_t numel = by_group ? (row.numel + kGroup - 1) / kGroup : row.numel;
  return t.dtype() == stored_type(row, column) && t.numel() == numel && t.layout() == (by_group ? 0 : row.layout);
}

// A list of tensors as it crosses the boundary, beside the rows of a table, in their order. Operators on it run over
// every parameter and gradient of every step, so none makes a torch::stable::Tensor of the entries.
struct Column {
  Column(const char* op, StableIValue* stack)
      : table(torch::stable::detail::to<Tensor>(stack[0])),
        column(torch::stable::detail::to<int64_t>(stack[1])),
        tensors(torch::stable::detail::to<StableListHandle>(stack[2])),
        size(tensors.size()) {
    check_tensor(op, "table", table, ScalarType::Long, {static_cast<int64_t>(size), kRowWords}, nullptr);
    STD_TORCH_CHECK(column >= 0 && column < kAddresses, op, ": column is ", column,
                    ", expected one that holds addresses, below ", static_cast<int64_t>(kAddresses));
    rows = data<Row>(table);
  }

  int64_t& address(size_t i) const { return reinterpret_cast<int64_t*>(&rows[i])[column]; }

  const Tensor table;
  const int64_t column;
  TakenList tensors;
  const size_t size;
  Row* rows;
};

// Writes the addresses of tensors into a column. Returns how many of them do not fit their row (the caller then finds
// out which and says so), and how many gradients share memory.
void boxed_table_bind(StableIValue* stack, uint64_t, uint64_t) {
  Column in("sassha_table_bind", stack);
  std::vector<int64_t> storages(in.column == kGrad ? in.size : 0);
  int64_t misfits = 0;
  for (size_t i = 0; i < in.size; ++i) {
    const TensorView t = in.tensors.take();
    Row& row = in.rows[i];
    if (in.column == kParam) {
      row.dtype = t.dtype();
      row.numel = t.numel();
      row.layout = t.layout();
    }
    const int64_t storage = t.storage_size();
    if (!fits(row, in.column, t) || !t.is_backed(storage, stored_size(row, in.column))) {
      ++misfits;
      continue;
    }
    in.address(i) = t.address();
    if (!storages.empty()) storages[i] = storage;
  }
  stack[0] = torch::stable::detail::from(misfits);
  stack[1] = torch::stable::detail::from(misfits == 0 ? mark_owned(in.rows, storages) : int64_t{0});
}

// Whether a column holds these very tensors, in the form in which they were bound.
void boxed_table_holds(StableIValue* stack, uint64_t, uint64_t) {
  Column in("sassha_table_holds", stack);
  bool all = true;
  for (size_t i = 0; all && i < in.size; ++i) {
    const TensorView t = in.tensors.take();
    all = t.address() == in.address(i) && fits(in.rows[i], in.column, t) &&
          t.is_backed(t.storage_size(), stored_size(in.rows[i], in.column));
  }
  stack[0] = torch::stable::detail::from(all);
}

// What the dispatcher calls where a tensor's memory does not hold its values: with torch's negative bit it holds the
// opposite, and a zero tensor has none. They fit no row. Without these the dispatcher would hand over copies, which are
// gone when the call returns.
void boxed_table_bind_elsewhere(StableIValue* stack, uint64_t, uint64_t) {
  const Column in("sassha_table_bind", stack);
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(in.size));
  stack[1] = torch::stable::detail::from(int64_t{0});
}

void boxed_table_holds_elsewhere(StableIValue* stack, uint64_t, uint64_t) {
  const Column in("sassha_table_holds", stack);
  stack[0] = torch::stable::detail::from(false);
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

namespace {

void register_bind(torch::stable::detail::StableLibrary& m) {
  m.impl("table_bind", &sassha::boxed_table_bind);
  m.impl("table_holds", &sassha::boxed_table_holds);
}

void register_elsewhere(torch::stable::detail::StableLibrary& m) {
  m.impl("table_bind", &sassha::boxed_table_bind_elsewhere);
  m.impl("table_holds", &sassha::boxed_table_holds_elsewhere);
}

}  // namespace

// The table lies in host memory and the tensors anywhere.
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, CPU, m) { register_bind(m); }
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, CUDA, m) { register_bind(m); }
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, Negative, m) { register_elsewhere(m); }
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, ZeroTensor, m) { register_elsewhere(m); }
SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("table_chunks", TORCH_BOX(&sassha::op_table_chunks));
}
