// Checks of tensor lists. Each error names the operator, the list, the index, what is there and what was expected.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

#include "params.h"

namespace sassha {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// DType of a scalar type, or -1 where there is no kernel for it.
inline int64_t dtype_code(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::Double:
      return kFloat64;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kFloat16;
    default:
      return -1;
  }
}

inline ScalarType state_type(ScalarType type) { return type == ScalarType::Double ? type : ScalarType::Float; }

inline int64_t item_size(int64_t dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

inline bool is_strided(const Tensor& t) {
  int32_t layout = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(t.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

// Whether the elements fill a block of memory without gaps or overlap, in whatever order of dimensions.
inline bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  std::vector<bool> used(sizes.size(), false);
  int64_t expected = 1;
  for (size_t round = 0; round < sizes.size(); ++round) {
    bool found = false;
    for (size_t d = 0; d < sizes.size() && !found; ++d) {
      if (used[d] || (sizes[d] != 1 && strides[d] != expected)) continue;
      used[d] = found = true;
      expected *= sizes[d];
    }
    if (!found) return false;
  }
  return true;
}

// Whether two dense tensors of one shape hold corresponding elements at corresponding offsets.
inline bool same_order(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  const auto sizes = a.sizes();
  const auto a_strides = a.strides();
  const auto b_strides = b.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a_strides[d] != b_strides[d]) return false;
  }
  return true;
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  const auto left = a.sizes();
  const auto right = b.sizes();
  if (left.size() != right.size()) return false;
  for (size_t d = 0; d < left.size(); ++d) {
    if (left[d] != right[d]) return false;
  }
  return true;
}

inline std::string shape_of(const Tensor& t) {
  std::string out = "(";
  for (const int64_t size : t.sizes()) out += (out.size() > 1 ? ", " : "") + std::to_string(size);
  return out + ")";
}

inline void check_size(const char* op, const char* list, size_t size, size_t expected) {
  STD_TORCH_CHECK(size == expected, op, ": ", list, " has ", size, " entries, expected ", expected, " like params");
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "the CPU" : (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// `first` is the first tensor of the list, which says what device the operator works on.
inline void check_param(const char* op, const char* list, size_t i, const Tensor& t, const Tensor& first) {
  STD_TORCH_CHECK(same_device(t, first) && is_strided(t) && dtype_code(t.scalar_type()) >= 0, op, ": ", list, "[", i,
                  "] must be a dense float32, float64, bfloat16 or float16 tensor on ", device_of(first));
  STD_TORCH_CHECK(is_dense(t), op, ": ", list, "[", i,
                  "] has gaps or overlaps in memory; pass a contiguous copy and copy the result back");
}

inline void check_like(const char* op, const char* list, size_t i, const Tensor& t, const Tensor& param,
                       ScalarType expected) {
  STD_TORCH_CHECK(same_device(t, param) && is_strided(t), op, ": ", list, "[", i, "] must be a dense tensor on ",
                  device_of(param), " like params[", i, "]");
  STD_TORCH_CHECK(t.scalar_type() == expected, op, ": ", list, "[", i, "] is ",
                  torch::headeronly::toString(t.scalar_type()), ", expected ", torch::headeronly::toString(expected),
                  " beside params[", i, "]");
  STD_TORCH_CHECK(same_shape(t, param), op, ": ", list, "[", i, "] has shape ", shape_of(t), ", expected ",
                  shape_of(param), " like params[", i, "]");
  STD_TORCH_CHECK(same_order(t, param), op, ": ", list, "[", i, "] has other strides than params[", i,
                  "]; copy it into a tensor made by torch.empty_like(param)");
}

// One entry of a list that came in over the boundary, with no more than a table row needs of it.
class TensorView {
 public:
  explicit TensorView(AtenTensorHandle handle) : handle_(handle) {}
  TensorView(const TensorView&) = delete;
  ~TensorView() { aoti_torch_delete_tensor_object(handle_); }

  int64_t dtype() const {
    int32_t type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &type));
    if (type == aoti_torch_dtype_float32()) return kFloat32;
    if (type == aoti_torch_dtype_float64()) return kFloat64;
    if (type == aoti_torch_dtype_bfloat16()) return kBFloat16;
    return type == aoti_torch_dtype_float16() ? static_cast<int64_t>(kFloat16) : -1;
  }

  int64_t numel() const {
    int64_t n = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle_, &n));
    return n;
  }

  int64_t address() const {
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle_, &data));
    return reinterpret_cast<int64_t>(data);
  }

  int64_t storage_size() const {
    int64_t bytes = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle_, &bytes));
    return bytes;
  }

  // 0 in logical order, else a number that tensors share whose elements lie in the same order, but for collisions.
  int64_t layout() const {
    bool contiguous = false;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &contiguous));
    if (contiguous) return 0;
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &dims));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle_, &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle_, &strides));
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (int64_t d = 0; d < dims; ++d) {
      for (const int64_t v : {sizes[d], sizes[d] == 1 ? 0 : strides[d]}) {
        hash = (hash ^ static_cast<uint64_t>(v)) * 0x100000001B3u + (hash >> 29);
      }
    }
    return static_cast<int64_t>(hash | 1u);
  }

 private:
  AtenTensorHandle handle_;
};

// Probes are numbered by logical element, so they need memory in logical order.
inline void check_row_major(const char* op, const char* list, size_t i, const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous(), op, ": ", list, "[", i,
                  "] is not contiguous, and signs are numbered by logical element; pass a contiguous copy");
}

}  // namespace sassha
