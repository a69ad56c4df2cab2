// The part of the driver that loads and launches kernels, which is how Triton's come.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "api.h"
#include "kernels.h"

using namespace vgpu;
namespace fs = std::filesystem;

namespace {

struct Module {
  fs::path ptx;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// A module comes as an image of machine code; Triton's cache has the PTX beside a file of the same bytes.
fs::path ptx_of(const void* image) {
  const fs::path cache = environment("TRITON_CACHE_DIR");
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(cache, ignored)) {
    if (entry.path().extension() != ".cubin") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    // An image's size is not told, but its header says where its sections are: others differ in the first bytes.
    if (bytes.size() > 64 && std::memcmp(bytes.data(), image, bytes.size()) == 0) {
      return fs::path(entry.path()).replace_extension(".ptx");
    }
  }
  return {};
}

// VGPU_TRANSLATE is a command that takes a PTX file, a kernel's name and the shared object to make.
bool translate(const fs::path& ptx, const std::string& name, const fs::path& shared_object) {
  const std::string command = "LD_PRELOAD= " + environment("VGPU_TRANSLATE") + " '" + ptx.string() + "' '" + name +
                              "' '" + shared_object.string() + "'";
  return std::system(command.c_str()) == 0;
}

}  // namespace

VGPU_API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const fs::path ptx = ptx_of(image);
  if (ptx.empty()) {
    report("a module whose PTX is not in TRITON_CACHE_DIR");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  count("cuModuleLoadData");
  *module = reinterpret_cast<CUmodule>(new Module{ptx});
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
VGPU_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
VGPU_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const fs::path ptx = reinterpret_cast<Module*>(module)->ptx;
  // Named for the translator as well: another version of it makes another object.
  const fs::path shared_object =
      fs::path(ptx).replace_extension(std::string(name) + "." + environment("VGPU_TRANSLATOR_KEY") + ".so");
  if (!fs::exists(shared_object) && !translate(ptx, name, shared_object)) {
    report("kernel " + std::string(name) + " can't be translated: " + ptx.string());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  Lock lock;
  const Kernel* kernel = load_kernel(shared_object.string(), name);
  if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(const_cast<Kernel*>(kernel));
  return CUDA_SUCCESS;
}

// ---- functions ----------------------------------------------------------------------------------------------------

VGPU_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
VGPU_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
VGPU_API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 8;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned dynamic_shared,
                                 CUstream stream, void** arguments, void**) {
  const Kernel& kernel = *reinterpret_cast<Kernel*>(function);
  return static_cast<CUresult>(
      launch_kernel(kernel, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, arguments, dynamic_shared, stream));
}
VGPU_API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, arguments,
                        extra);
}
