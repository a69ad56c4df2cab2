// Every schema; kernels are registered for each device: in bind.cpp, cpu/ops.cpp and cuda/ops.cu.
#include "library.h"
#include "list_ops.h"
#include "table_ops.h"

SASSHA_LIBRARY(SASSHA_NAMESPACE, m) {
  sassha::define_list_ops(m);
  sassha::define_table_ops(m);
  m.def("table_bind(Tensor table, int column, Tensor[] tensors) -> (int, int)");
  m.def("table_holds(Tensor table, int column, Tensor[] tensors) -> bool");
  m.def("table_chunks(Tensor table) -> (Tensor, Tensor)");
  m.def("cpu_isa() -> str");
}
