// Checks of arguments. Each error names the operator, the argument, what is there and what was expected.
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

inline bool is_strided(const Tensor& t) {
  int32_t layout = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(t.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

inline void check_size(const char* op, const char* list, size_t size, size_t expected) {
  STD_TORCH_CHECK(size == expected, op, ": ", list, " has ", size, " entries, expected ", expected);
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "the CPU" : (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// Signs are numbered by logical element, so they need memory in logical order. `first` is the first tensor of the list,
// which says what device the operator works on.
inline void check_entry(const char* op, const char* list, size_t i, const Tensor& t, const Tensor& first) {
  STD_TORCH_CHECK(same_device(t, first) && is_strided(t) && dtype_code(t.scalar_type()) >= 0, op, ": ", list, "[", i,
                  "] must be a dense float32, float64, bfloat16 or float16 tensor on ", device_of(first));
  STD_TORCH_CHECK(t.is_contiguous(), op, ": ", list, "[", i,
                  "] is not contiguous, and signs are numbered by logical element; pass a contiguous copy");
}

// One size of a shape: a number, or a name where any number will do.
struct Dim {
  Dim(int64_t size) : size(size) {}
  Dim(const char* name) : name(name) {}
  std::string text() const { return name == nullptr ? std::to_string(size) : name; }

  int64_t size = -1;
  const char* name = nullptr;
};

inline std::string described(bool contiguous, ScalarType type, const std::string& shape, const std::string& device) {
  return std::string("a ") + (contiguous ? "contiguous " : "non-contiguous ") + torch::headeronly::toString(type) +
         " tensor of shape (" + shape + ") on " + device;
}

// A contiguous tensor of this dtype and shape on the device of `like`, or in host memory where that is null.
inline void check_tensor(const char* op, const char* name, const Tensor& t, ScalarType type,
                         std::initializer_list<Dim> shape, const Tensor* like) {
  const bool contiguous = is_strided(t) && t.is_contiguous();
  bool fits = contiguous && t.scalar_type() == type && (like == nullptr ? t.is_cpu() : same_device(t, *like)) &&
              t.dim() == static_cast<int64_t>(shape.size());
  int64_t d = 0;
  for (const Dim& dim : shape) {
    fits = fits && (dim.name != nullptr || t.size(d) == dim.size);
    ++d;
  }
  if (fits) return;
  std::string found, expected;
  for (const int64_t size : t.sizes()) found += (found.empty() ? "" : ", ") + std::to_string(size);
  for (const Dim& dim : shape) expected += (expected.empty() ? "" : ", ") + dim.text();
  STD_TORCH_CHECK(false, op, ": ", name, " is ", described(contiguous, t.scalar_type(), found, device_of(t)),
                  ", expected ", described(true, type, expected, like == nullptr ? "the CPU" : device_of(*like)));
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
    if (type == aoti_torch_dtype_float16()) return kFloat16;
    if (type == aoti_torch_dtype_int8()) return kInt8;
    if (type == aoti_torch_dtype_uint8()) return kUInt8;
    return type == aoti_torch_dtype_int16() ? static_cast<int64_t>(kInt16) : -1;
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

  // Whether its storage, of so many bytes, reaches as far as its elements, which have no gaps. Others may resize it.
  bool is_backed(int64_t storage, int64_t item) const {
    const int64_t n = numel();
    if (n == 0) return true;
    int64_t offset = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle_, &offset));
    return storage >= (offset + n) * item;
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

}  // namespace sassha
