// The chunks that a device takes rows in, and what operators on rows have in common.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <vector>

#include "checks.h"

namespace sassha {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()), type);
}

// See struct Chunk.
struct Chunks {
  std::vector<Chunk> chunks;
  std::vector<Span> spans;
  int64_t counts[kDTypes] = {};  // chunks of each dtype
  int64_t format = 0;            // of all rows

  Chunks(const Row* rows, int64_t size) : spans(static_cast<size_t>(size)) {
    for (int64_t r = 0; r < size; ++r) {
      STD_TORCH_CHECK(rows[r].format == rows[0].format, "sassha_fast: row ", r, " of table has format ", rows[r].format,
                      ", expected ", rows[0].format, " like row 0; make a table for each format");
      format = rows[0].format;
    }
    for (int64_t dtype = 0; dtype < kDTypes; ++dtype) {
      for (int64_t r = 0; r < size; ++r) {
        if (rows[r].dtype != dtype) continue;
        const int64_t count = (rows[r].numel + kChunk - 1) / kChunk;
        spans[r] = {static_cast<int32_t>(chunks.size()), static_cast<int32_t>(count)};
        for (int64_t c = 0; c < count; ++c) chunks.push_back({static_cast<int32_t>(r), static_cast<int32_t>(c)});
        counts[dtype] += count;
      }
    }
    STD_TORCH_CHECK(chunks.size() < size_t{1} << 31, "sassha_fast: ", chunks.size(),
                    " chunks of parameters are more than one launch takes");
  }

  size_t bytes() const { return chunks.size() * sizeof(Chunk) + spans.size() * sizeof(Span); }

  void write(char* to) const {
    std::memcpy(to, chunks.data(), chunks.size() * sizeof(Chunk));
    std::memcpy(to + chunks.size() * sizeof(Chunk), spans.data(), spans.size() * sizeof(Span));
  }
};

}  // namespace sassha
