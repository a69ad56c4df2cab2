// Runtime choice of the instruction set.
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "launch.h"

namespace sassha {
namespace {

Kernels choose() {
  const char* set = std::getenv("SASSHA_CPU_ISA");
  const char* wanted = set == nullptr ? "" : set;
  const auto allowed = [wanted](const char* isa) { return *wanted == 0 || std::strcmp(wanted, isa) == 0; };
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx512 && allowed("avx512")) return avx512::kSet;
  if (has_avx2 && allowed("avx2")) return avx2::kSet;
#endif
  STD_TORCH_CHECK(allowed("generic"), "SASSHA_CPU_ISA=", wanted,
                  " is not available on this machine; unset it, or use one of avx512, avx2, generic that it runs");
  return generic::kSet;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace sassha
