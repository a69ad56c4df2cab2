// The part of the runtime that registers and launches kernels.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "kernels.h"

using namespace vgpu;

namespace {
struct Configuration {
  dim3 grid, block;
  size_t dynamic_shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;  // between kernel<<<...>>> and the launch

int blocks_of_multiprocessor(int threads) { return 2048 / std::max(threads, 32); }
}  // namespace

// ---- what nvcc's code calls ---------------------------------------------------------------------------------------

VGPU_API void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
VGPU_API void __cudaRegisterFatBinaryEnd(void**) {}
VGPU_API void __cudaUnregisterFatBinary(void**) {}
VGPU_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                     int*) {
  register_function(host, name);
}
VGPU_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
VGPU_API char __cudaInitModule(void**) { return 0; }
VGPU_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t dynamic_shared, cudaStream_t stream) {
  configurations.push_back({grid, block, dynamic_shared, stream});
  return 0;
}
VGPU_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* dynamic_shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *dynamic_shared = last.dynamic_shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
VGPU_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

// ---- launches -----------------------------------------------------------------------------------------------------

VGPU_API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                      size_t dynamic_shared, cudaStream_t stream) {
  return status(launch_function(function, grid, block, arguments, dynamic_shared, stream));
}
VGPU_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                        size_t dynamic_shared, cudaStream_t stream) {
  return status(launch_function(kernel, grid, block, arguments, dynamic_shared, stream));
}
VGPU_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return status(launch_function(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                                config->stream));
}
VGPU_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  Lock lock;
  const auto run = [function, data] {
    Unlocked unlocked;
    function(data);
    return 0;
  };
  return status(enqueue(stream_of(stream), {run, "host function"}));
}
VGPU_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  Lock lock;
  const auto run = [stream, function, data] {
    Unlocked unlocked;
    function(stream, cudaSuccess, data);
    return 0;
  };
  return status(enqueue(stream_of(stream), {run, "callback"}));
}

// ---- questions about kernels --------------------------------------------------------------------------------------

VGPU_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 80;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
VGPU_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  *blocks = blocks_of_multiprocessor(threads);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads,
                                                                            size_t, unsigned) {
  *blocks = blocks_of_multiprocessor(threads);
  return cudaSuccess;
}
