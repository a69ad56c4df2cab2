// All operators for CUDA: on lists of tensors, whose rows are copied to the device, and on tables that are there.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../library.h"
#include "../list_ops.h"
#include "../table_ops.h"
#include "launch.h"

#ifndef SASSHA_DISPATCH
#define SASSHA_DISPATCH CUDA
#endif

namespace sassha::cuda {

struct Cuda::Rows : DeviceRows {
  Rows(const char* op, const Tensor& table, const std::optional<Tensor>& given, const Ints& numbers) : Rows(table) {
    STD_TORCH_CHECK(given.has_value() && numbers.size() == static_cast<size_t>(kCounts), op, ": counts has ",
                    numbers.size(), " entries and chunks is ", given.has_value() ? "given" : "None",
                    "; a table on a device needs its chunks, their number for each of ", kDTypes,
                    " dtypes, and its format");
    for (int64_t dtype = 0; dtype < kDTypes; ++dtype) {
      STD_TORCH_CHECK(numbers[dtype] >= 0, op, ": counts[", dtype, "] is ", numbers[dtype], ", expected 0 or more");
      counts[dtype] = numbers[dtype];
    }
    format = numbers[kDTypes];
    rows = data<const Row>(table);
    size = table.size(0);
    chunks = data<const Chunk>(*given);
    check_tensor(op, "chunks", *given, ScalarType::Int, {n_chunks() + size, 2}, &table);
  }

  // Copies rows and their chunks.
  Rows(const std::vector<Row>& list, const Tensor& first) : Rows(first) {
    const Chunks found(list.data(), static_cast<int64_t>(list.size()));
    const size_t row_bytes = list.size() * sizeof(Row);
    std::vector<char> bytes(row_bytes + found.bytes());
    std::memcpy(bytes.data(), list.data(), row_bytes);
    found.write(bytes.data() + row_bytes);
    kept.push_back(new_tensor(first, {static_cast<int64_t>(bytes.size() / sizeof(int64_t))}, ScalarType::Long));
    copy_to_device(kept[0].data_ptr(), bytes.data(), bytes.size(), queue);
    rows = data<const Row>(kept[0]);
    size = static_cast<int64_t>(list.size());
    chunks = reinterpret_cast<const Chunk*>(rows + size);
    std::memcpy(counts, found.counts, sizeof(counts));
    format = found.format;
  }

 private:
  explicit Rows(const Tensor& like) : DeviceRows(), on(like.get_device_index()), like(like) { queue = on.queue(); }

  // Beside `like`. The queue orders whoever gets this memory next after the kernels of this call.
  void* scratch(int64_t items, int64_t words) const override {
    kept.push_back(new_tensor(like, {items, words}, ScalarType::Double));
    return kept.back().data_ptr();
  }

  OnDevice on;
  Tensor like;
  mutable std::vector<Tensor> kept;  // memory of this call
};

}  // namespace sassha::cuda

SASSHA_LIBRARY_IMPL(SASSHA_NAMESPACE, SASSHA_DISPATCH, m) {
  sassha::ListOps<sassha::cuda::Cuda>::register_in(m);
  sassha::TableOps<sassha::cuda::Cuda>::register_in(m);
}
