// What the tests ask of the simulator beside the operators: an order of threads, and how often kernels were launched.
#include "../../csrc/cuda/sim.h"

#include <torch/csrc/stable/library.h>

namespace {

void set_order(int64_t order) { sassha::sim::machine().order = static_cast<int>(order); }
int64_t launches() { return sassha::sim::machine().launches; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sassha_fast_sim, m) {
  m.def("set_order(int order) -> ()");
  m.def("launches() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(sassha_fast_sim, CompositeExplicitAutograd, m) {
  m.impl("set_order", TORCH_BOX(&set_order));
  m.impl("launches", TORCH_BOX(&launches));
}
