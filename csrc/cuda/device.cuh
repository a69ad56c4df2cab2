// The few things that differ between nvcc, hipcc and the simulator (sim.h): launching, streams, guards, shuffles.
#pragma once

#include <cstdint>

#if defined(SASSHA_SIM)
#include "sim.h"
#else

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define SASSHA_RUNTIME(name) hip##name
#else
#include <cuda_runtime.h>
#define SASSHA_RUNTIME(name) cuda##name
#endif
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/Exception.h>

// Lives in libtorch_cuda, which a CPU-only torch does not have: weak, so that the library loads there as well.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace sassha::cuda {

using Queue = SASSHA_RUNTIME(Stream_t);  // philox.h has another Stream

inline void check_runtime(SASSHA_RUNTIME(Error_t) error, const char* what) {
  STD_TORCH_CHECK(error == SASSHA_RUNTIME(Success), "sassha_fast: ", what, ": ", SASSHA_RUNTIME(GetErrorString)(error));
}

// Makes a device current for the length of a call, and knows its current stream.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : guard_(device) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "sassha_fast: this torch was built without CUDA");
    void* queue = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &queue));
    queue_ = static_cast<Queue>(queue);
  }
  Queue queue() const { return queue_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  Queue queue_;
};

// From pageable memory, which the runtime has read when this returns.
inline void copy_to_device(void* to, const void* from, size_t bytes, Queue queue) {
  check_runtime(SASSHA_RUNTIME(MemcpyAsync)(to, from, bytes, SASSHA_RUNTIME(MemcpyHostToDevice), queue),
                "copying a table to the device");
}

template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, Queue queue, Args... args) {
  if (blocks == 0) return;
  // clang-format off
  kernel<<<static_cast<unsigned>(blocks), threads, 0, queue>>>(args...);
  // clang-format on
  check_runtime(SASSHA_RUNTIME(GetLastError)(), name);
}

// The value of the lane `delta` above, within groups of 32 lanes on any hardware.
template <typename V>
__device__ __forceinline__ V shuffle_down(V value, int delta) {
#if defined(__HIPCC__)
  return __shfl_down(value, delta, 32);
#else
  return __shfl_down_sync(0xFFFFFFFFu, value, delta, 32);
#endif
}

// The value of the lane whose number differs from this one's by the bits of `mask`.
template <typename V>
__device__ __forceinline__ V shuffle_xor(V value, int mask) {
#if defined(__HIPCC__)
  return __shfl_xor(value, mask, 32);
#else
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask, 32);
#endif
}

// An address from a table as a pointer of which the compiler knows that it is global: it then takes LDG and STG, and
// sees that no store reaches shared memory.
__device__ __forceinline__ void* global_pointer(int64_t address) {
#if defined(__HIPCC__)
  return reinterpret_cast<void*>(address);
#else
  return __cvta_global_to_generic(static_cast<size_t>(address));
#endif
}

using Vector = uint4;

// One access of 128 bits each. Spelled out, because the compiler splits an assignment where it sees fit.
__device__ __forceinline__ Vector read_vector(const Vector* from) {
#if defined(__HIPCC__)
  return *from;
#else
  return __ldca(from);
#endif
}

__device__ __forceinline__ void write_vector(Vector* to, Vector value) {
#if defined(__HIPCC__)
  *to = value;
#else
  __stwb(to, value);
#endif
}

template <typename T>
__device__ __forceinline__ void check_vector_address(const T*) {}

}  // namespace sassha::cuda

#endif
