// CUDA's runtime, as torch has loaded it: the functions that nvcc's code calls, found by name when they are needed.
//
// With no runtime of its own the library is as new as torch's CUDA, loads beside a torch without any, and is smaller.
// Where there is none, or an older one than nvcc's code is made for, kernels are not registered and every call is an
// error; `cuda_versions` lets Python say why before one is made.
#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../library.h"

#if defined(__x86_64__)
// glibc 2.34 moved both from libdl to libc; under this version they are found in either.
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
#endif

namespace {

constexpr int kNoRuntime = 35;  // cudaErrorInsufficientDriver

int open_loaded(dl_phdr_info* info, size_t, void* found) {
  if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, "libcudart.so") == nullptr) return 0;
  *static_cast<void**>(found) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  return 1;
}

// A runtime that is loaded already: torch's is visible to all, or at least in memory.
void* symbol_of_any(const char* name) {
  void* symbol = dlsym(RTLD_DEFAULT, name);
  if (symbol != nullptr) return symbol;
  static void* const library = [] {
    void* found = nullptr;
    dl_iterate_phdr(open_loaded, &found);
    return found;
  }();
  return library == nullptr ? nullptr : dlsym(library, name);
}

// 13020 is CUDA 13.2; 0 if nobody can tell.
int version_by(const char* name) {
  int version = 0;
  auto* ask = reinterpret_cast<int (*)(int*)>(symbol_of_any(name));
  return ask != nullptr && ask(&version) == 0 ? version : 0;
}

void* symbol(const char* name) {
  static const bool fits = version_by("cudaRuntimeGetVersion") / 1000 >= SASSHA_CUDA_BUILT / 1000;
  return fits ? symbol_of_any(name) : nullptr;
}

// What the code was built with, the runtime's version, the driver's, and the oldest GPU that it has code for.
std::vector<int64_t> op_cuda_versions() {
  return {SASSHA_CUDA_BUILT, version_by("cudaRuntimeGetVersion"), version_by("cudaDriverGetVersion"),
          SASSHA_CUDA_LEAST};
}

struct Size {
  unsigned x, y, z;
};

}  // namespace

#define SASSHA_FORWARD(result, name, parameters, arguments, otherwise)                \
  extern "C" result name parameters {                                                 \
    static auto* const found = reinterpret_cast<result(*) parameters>(symbol(#name)); \
    return found != nullptr ? found arguments : otherwise;                            \
  }

SASSHA_FORWARD(void**, __cudaRegisterFatBinary, (void* code), (code), nullptr)
SASSHA_FORWARD(void, __cudaRegisterFatBinaryEnd, (void** handle), (handle), void())
SASSHA_FORWARD(void, __cudaUnregisterFatBinary, (void** handle), (handle), void())
SASSHA_FORWARD(void, __cudaRegisterFunction,
               (void** handle, const char* host, char* device, const char* name, int limit, void* thread, void* block,
                void* block_size, void* grid_size, int* warp_size),
               (handle, host, device, name, limit, thread, block, block_size, grid_size, warp_size), void())
SASSHA_FORWARD(void, __cudaRegisterVar,
               (void** handle, char* host, char* address, const char* name, int ext, size_t size, int constant,
                int global),
               (handle, host, address, name, ext, size, constant, global), void())
SASSHA_FORWARD(unsigned, __cudaPushCallConfiguration, (Size grid, Size block, size_t shared, void* stream),
               (grid, block, shared, stream), kNoRuntime)
SASSHA_FORWARD(int, __cudaPopCallConfiguration, (Size * grid, Size* block, size_t* shared, void* stream),
               (grid, block, shared, stream), kNoRuntime)
SASSHA_FORWARD(int, __cudaGetKernel, (void** kernel, const void* host), (kernel, host), kNoRuntime)
SASSHA_FORWARD(int, __cudaLaunchKernel,
               (void* kernel, Size grid, Size block, void** arguments, size_t shared, void* stream),
               (kernel, grid, block, arguments, shared, stream), kNoRuntime)
SASSHA_FORWARD(int, cudaLaunchKernel,
               (const void* kernel, Size grid, Size block, void** arguments, size_t shared, void* stream),
               (kernel, grid, block, arguments, shared, stream), kNoRuntime)
SASSHA_FORWARD(int, cudaMemcpyAsync, (void* to, const void* from, size_t bytes, int kind, void* stream),
               (to, from, bytes, kind, stream), kNoRuntime)
SASSHA_FORWARD(int, cudaGetLastError, (), (), kNoRuntime)
SASSHA_FORWARD(const char*, cudaGetErrorString, (int error), (error), "torch has loaded no CUDA runtime that fits")

STABLE_TORCH_LIBRARY_FRAGMENT(sassha_fast, m) { m.def("cuda_versions() -> int[]"); }

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CompositeExplicitAutograd, m) {
  m.impl("cuda_versions", TORCH_BOX(&op_cuda_versions));
}
