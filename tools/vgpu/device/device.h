// The device that is pretended: an A100 with less memory.
#pragma once

namespace vgpu {

constexpr const char* kDeviceName = "Virtual A100";
constexpr int kComputeMajor = 8, kComputeMinor = 0;
constexpr int kMultiprocessors = 108;

// Value of a cudaDeviceAttr or CUdevice_attribute, which have the same numbers.
int device_attribute(int attribute);

}  // namespace vgpu
