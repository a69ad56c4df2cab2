// All operators for the CPU.
#include <string>

#include "../list_ops.h"
#include "../table_ops.h"
#include "launch.h"

namespace sassha {
namespace {

std::string op_cpu_isa() { return kernels().isa; }

}  // namespace
}  // namespace sassha

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CPU, m) {
  sassha::ListOps<sassha::Cpu>::register_in(m);
  sassha::TableOps<sassha::Cpu>::register_in(m);
}

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&sassha::op_cpu_isa));
}
