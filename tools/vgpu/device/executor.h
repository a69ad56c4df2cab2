// Runs a translated kernel: blocks and warps in random order, every access checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernel_abi.h"

namespace vgpu {

struct Kernel {
  Entry entry;
  Info info;
  std::string name;      // mangled, as it is registered
  std::string readable;  // as it is reported
};

struct Size {
  uint32_t x, y, z;
  uint64_t total() const { return static_cast<uint64_t>(x) * y * z; }
};

// Errors have the numbers of cudaError_t, of which this part must know nothing else.
enum Outcome : int { kSuccess = 0, kInvalidValue = 1, kIllegalAddress = 700, kLaunchFailure = 719 };

// The kernel in a shared object; null, and reported, if it can't be loaded. Loaded once.
const Kernel* load_kernel(const std::string& shared_object, const std::string& name);

// Runs all blocks. The first error ends the launch.
Outcome execute(const Kernel& kernel, Size grid, Size block, const uint8_t* params, size_t dynamic_shared);

}  // namespace vgpu
