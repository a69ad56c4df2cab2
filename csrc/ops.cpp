// Schemas only. Kernels are registered per device: csrc/cpu/ops.cpp and table.cpp.
//
// The first block says what it mutates, works under torch.compile and is what tests check with opcheck. The second
// works on a table of addresses that Python keeps between steps; it is for eager execution by the optimizer alone.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(sassha_fast, m) {
  m.def("square_sums(Tensor[] grads, Tensor[] params, int[] groups, int n_groups) -> Tensor");
  m.def(
      "perturb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] backups, Tensor scales, int[] groups, "
      "int[] indices, bool adaptive, int seed, Tensor draw) -> ()");
  m.def("restore_(Tensor(a!)[] params, Tensor[] backups) -> ()");
  m.def("rademacher_(Tensor(a!)[] outs, int[] indices, int seed, int draw) -> ()");
  m.def("probe_(Tensor(a!)[] params, int[] indices, float h, int seed, int draw) -> ()");
  m.def(
      "step_(Tensor(a!)[] params, Tensor[] backups, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] hessians, "
      "Tensor scalars, int[] cohorts, int[] indices, int seed, Tensor? noise_draw) -> ()");
  m.def(
      "refresh_step_(Tensor(a!)[] params, Tensor[] backups, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] hessians, Tensor[] products, Tensor scalars, int[] cohorts, int[] indices, bool signed, "
      "int seed, int draw, Tensor? noise_draw) -> Tensor");

  m.def("table_bind(Tensor table, int column, Tensor[] tensors) -> (int, int)");
  m.def("table_square_sums(Tensor table, int n_groups, bool adaptive) -> Tensor");
  m.def("table_perturb(Tensor table, Tensor scales, bool adaptive, int seed, Tensor draw) -> ()");
  m.def("table_restore(Tensor table) -> ()");
  m.def("table_step(Tensor table, Tensor scalars, int seed, Tensor? noise_draw) -> ()");
  m.def(
      "table_refresh_step(Tensor table, Tensor scalars, int seed, int draw, Tensor? noise_draw) "
      "-> Tensor");

  m.def("cpu_isa() -> str");
}
