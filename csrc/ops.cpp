// Schemas only. Kernels are registered per device: in bind.cpp, cpu/ops.cpp, cpu/table.cpp and cuda/ops.cu.
//
// The first block says what it mutates, works under torch.compile and is what tests check with opcheck. The second
// works on a table of addresses that Python keeps between steps; it is for eager execution by the optimizer alone. On a
// device it takes a copy of the table there, the table's chunks with their number by dtype, and the power that all
// cohorts share if they do. Updates "apart" are of weights that live apart from the parameters: they return squares of
// m.
#include "library.h"

SASSHA_LIBRARY(SASSHA_NAMESPACE, m) {
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
      "int seed, int draw, Tensor? noise_draw, int sample=0) -> Tensor");
  m.def(
      "momentum_ascent_(Tensor(a!)[] params, Tensor[] weights, Tensor[] exp_avgs, Tensor scales, int[] groups, "
      "int[] indices, bool adaptive, int seed, Tensor draw) -> ()");
  m.def("gap_sums(Tensor[] grads, Tensor[] firsts) -> Tensor");
  m.def("decompose_(Tensor(a!)[] grads, Tensor[] firsts, Tensor scales, int[] groups) -> ()");

  m.def("table_bind(Tensor table, int column, Tensor[] tensors) -> (int, int)");
  m.def("table_chunks(Tensor table) -> (Tensor, Tensor)");
  m.def("table_square_sums(Tensor table, int n_groups, bool adaptive, Tensor? chunks=None, int[] counts=[]) -> Tensor");
  m.def(
      "table_perturb(Tensor table, Tensor scales, bool adaptive, int seed, Tensor draw, Tensor? chunks=None, "
      "int[] counts=[]) -> ()");
  m.def("table_restore(Tensor table, Tensor? chunks=None, int[] counts=[]) -> ()");
  m.def(
      "table_step(Tensor table, Tensor scalars, int seed, Tensor? noise_draw, float? power=None, Tensor? chunks=None, "
      "int[] counts=[]) -> ()");
  m.def(
      "table_refresh_step(Tensor table, Tensor scalars, int seed, int draw, Tensor? noise_draw, int sample, "
      "float? power=None, Tensor? chunks=None, int[] counts=[]) -> Tensor");
  m.def(
      "table_apart_step(Tensor table, Tensor scalars, int n_groups, bool adaptive, int seed, Tensor? noise_draw, "
      "float? power=None, Tensor? chunks=None, int[] counts=[]) -> Tensor");
  m.def(
      "table_apart_refresh_step(Tensor table, Tensor scalars, int n_groups, bool adaptive, int seed, int draw, "
      "Tensor? noise_draw, int sample, float? power=None, Tensor? chunks=None, int[] counts=[]) -> (Tensor, Tensor)");
  m.def(
      "table_momentum_ascent(Tensor table, Tensor scales, bool adaptive, int seed, Tensor draw, Tensor? chunks=None, "
      "int[] counts=[]) -> ()");
  m.def("table_gap_sums(Tensor table, Tensor? chunks=None, int[] counts=[]) -> Tensor");
  m.def("table_decompose(Tensor table, Tensor scales, Tensor? chunks=None, int[] counts=[]) -> ()");

  m.def("cpu_isa() -> str");
}
