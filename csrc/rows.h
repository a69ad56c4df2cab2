// Rows of a list of tensors, checked, and the chunks that a device takes them in.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <optional>
#include <vector>

#include "checks.h"

namespace sassha {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

inline int64_t address(const Tensor& t) { return reinterpret_cast<int64_t>(t.data_ptr()); }

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()), type);
}

// ---- rows ----------------------------------------------------------------------------------------------------

inline std::vector<Row> rows_of(const char* op, const char* list, const Tensors& params) {
  std::vector<Row> rows(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    check_param(op, list, i, params[i], params[0]);
    rows[i] = Row{};
    rows[i].param = rows[i].backup = address(params[i]);
    rows[i].numel = params[i].numel();
    rows[i].dtype = dtype_code(params[i].scalar_type());
  }
  return rows;
}

inline void set_column(const char* op, const char* list, std::vector<Row>& rows, int64_t Row::* column,
                       const Tensors& tensors, const Tensors& params, bool state = false) {
  check_size(op, list, tensors.size(), params.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ScalarType type = params[i].scalar_type();
    check_like(op, list, i, tensors[i], params[i], state ? state_type(type) : type);
    rows[i].*column = address(tensors[i]);
  }
}

inline void set_numbers(const char* op, const char* list, std::vector<Row>& rows, int64_t Row::* column,
                        const Ints& numbers) {
  check_size(op, list, numbers.size(), rows.size());
  for (size_t i = 0; i < numbers.size(); ++i) rows[i].*column = numbers[i];
}

inline void check_scales(const char* op, const Tensor& scales, const std::vector<Row>& rows, const Tensor& like) {
  STD_TORCH_CHECK(same_device(scales, like) && scales.scalar_type() == ScalarType::Float && scales.is_contiguous(), op,
                  ": scales must be a contiguous float32 tensor on ", device_of(like), " with one entry per group");
  for (const Row& row : rows) {
    STD_TORCH_CHECK(row.group >= 0 && row.group < scales.numel(), op, ": group ", row.group,
                    " has no entry in scales, which has ", scales.numel());
  }
}

inline void check_gap_scales(const char* op, const Tensor& scales, const std::vector<Row>& rows, const Tensor& like) {
  STD_TORCH_CHECK(same_device(scales, like) && scales.scalar_type() == ScalarType::Float && scales.is_contiguous() &&
                      scales.dim() == 2 && scales.size(1) == 2,
                  op, ": scales must be a contiguous float32 tensor on ", device_of(like), " of shape [groups, 2]");
  for (const Row& row : rows) {
    STD_TORCH_CHECK(row.group >= 0 && row.group < scales.size(0), op, ": group ", row.group,
                    " has no row in scales, which has ", scales.size(0));
  }
}

inline void check_scalars(const char* op, const Tensor& scalars, const std::vector<Row>& rows, const Tensor& like) {
  STD_TORCH_CHECK(same_device(scalars, like) && scalars.scalar_type() == ScalarType::Double &&
                      scalars.is_contiguous() && scalars.dim() == 2 && scalars.size(1) == kStepScalarWords,
                  op, ": scalars must be a contiguous float64 tensor on ", device_of(like), " of shape [cohorts, ",
                  kStepScalarWords, "]");
  for (const Row& row : rows) {
    STD_TORCH_CHECK(row.cohort >= 0 && row.cohort < scalars.size(0), op, ": cohort ", row.cohort,
                    " has no row in scalars, which has ", scalars.size(0));
  }
}

// The number of a draw lives in memory, so that a captured graph can count it up.
inline void check_draw(const char* op, const Tensor& draw, const Tensor& like) {
  STD_TORCH_CHECK(same_device(draw, like) && draw.scalar_type() == ScalarType::Long && draw.numel() == 1, op,
                  ": a draw must be one int64 on ", device_of(like));
}

// ---- chunks --------------------------------------------------------------------------------------------------

// See struct Chunk.
struct Chunks {
  std::vector<Chunk> chunks;
  std::vector<Span> spans;
  int64_t counts[kDTypes] = {};  // chunks of each dtype

  Chunks(const Row* rows, int64_t size) : spans(static_cast<size_t>(size)) {
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
