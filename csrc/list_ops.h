// Operators on lists of tensors, which say what they mutate: schemas, rows and checks, the same on every device. Tests
// check them with opcheck.
//
// `Device` has the passes over rows as static functions.
#pragma once

#include <torch/csrc/stable/library.h>

#include "rows.h"

namespace sassha {

inline void define_list_ops(torch::stable::detail::StableLibrary& m) {
  m.def("rademacher_(Tensor(a!)[] outs, int[] indices, int seed, int draw) -> ()");
  m.def("probe_(Tensor(a!)[] params, int[] indices, Tensor h, int seed, int draw) -> ()");
}

template <typename Device>
struct ListOps {
  using Rows = typename Device::Rows;

  static void rademacher(Tensors outs, Ints indices, int64_t seed, int64_t draw) {
    const std::vector<Row> rows = rows_of("sassha_rademacher", "outs", outs, indices);
    Device::rademacher(Rows(rows, outs[0]), static_cast<uint64_t>(seed), static_cast<uint32_t>(draw));
  }

  static void probe(Tensors params, Ints indices, Tensor h, int64_t seed, int64_t draw) {
    const std::vector<Row> rows = rows_of("sassha_probe", "params", params, indices);
    check_tensor("sassha_probe", "h", h, ScalarType::Double, {}, &params[0]);
    Device::probe(Rows(rows, params[0]), data<const double>(h), static_cast<uint64_t>(seed),
                  static_cast<uint32_t>(draw));
  }

  static void register_in(torch::stable::detail::StableLibrary& m) {
    m.impl("rademacher_", TORCH_BOX(&ListOps::rademacher));
    m.impl("probe_", TORCH_BOX(&ListOps::probe));
  }

 private:
  // The dispatcher refuses empty lists.
  static std::vector<Row> rows_of(const char* op, const char* list, const Tensors& tensors, const Ints& indices) {
    check_size(op, "indices", indices.size(), tensors.size());
    std::vector<Row> rows(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      check_entry(op, list, i, tensors[i], tensors[0]);
      rows[i].param = reinterpret_cast<int64_t>(tensors[i].data_ptr());
      rows[i].numel = tensors[i].numel();
      rows[i].dtype = dtype_code(tensors[i].scalar_type());
      rows[i].index = indices[i];
    }
    return rows;
  }
};

}  // namespace sassha
