// Launches: from a function of the host program, or of a module, to an operation of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "executor.h"

namespace vgpu {

// What the program tells at its start: the kernel that a host function stands for.
void register_function(const void* function, const char* name);

// Queue a launch; the arguments are copied now. They return a cudaError_t.
int launch_kernel(const Kernel& kernel, Size grid, Size block, void** arguments, size_t dynamic_shared,
                  cudaStream_t stream);
int launch_function(const void* function, dim3 grid, dim3 block, void** arguments, size_t dynamic_shared,
                    cudaStream_t stream);

}  // namespace vgpu
