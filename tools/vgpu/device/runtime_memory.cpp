// The part of the runtime that allocates, copies and fills memory.
#include <cstring>

#include "api.h"
#include "memory.h"

using namespace vgpu;

// ---- allocation ---------------------------------------------------------------------------------------------------

static int allocate(void** address, size_t n) {
  *address = n == 0 ? nullptr : allocate_device(n);
  return n == 0 || *address ? 0 : remember(cudaErrorMemoryAllocation);
}

VGPU_API cudaError_t cudaMalloc(void** address, size_t n) {
  Lock lock;
  count("cudaMalloc");
  count("cudaMalloc:bytes", n);
  if (const int error = forbidden_in_capture("cudaMalloc")) return status(error);
  return status(allocate(address, n));
}
VGPU_API cudaError_t cudaFree(void* address) {
  Lock lock;
  if (address == nullptr) return cudaSuccess;
  count("cudaFree");
  if (const int error = forbidden_in_capture("cudaFree")) return status(error);
  run_everything();
  free_device(address);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaMallocAsync(void** address, size_t n, cudaStream_t) {
  Lock lock;
  count("cudaMallocAsync");
  note("alloc");
  return status(allocate(address, n));
}
VGPU_API cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  Lock lock;
  if (address == nullptr) return cudaSuccess;
  count("cudaFreeAsync");
  if (stream_of(stream)->capture) return cudaSuccess;  // a graph keeps its memory
  const auto run = [address] {
    free_device(address);
    return 0;
  };
  return status(enqueue(stream_of(stream), {run, "free"}));
}
VGPU_API cudaError_t cudaMallocManaged(void**, size_t, unsigned) {
  Lock lock;
  report("cudaMallocManaged is not there");
  return status(remember(cudaErrorNotSupported));
}

static int allocate_host(void** address, size_t n) {
  Lock lock;
  count("cudaHostAlloc");
  if (const int error = forbidden_in_capture("cudaHostAlloc")) return error;
  *address = allocate_pinned(n);
  return *address ? 0 : remember(cudaErrorMemoryAllocation);
}
VGPU_API cudaError_t cudaHostAlloc(void** address, size_t n, unsigned) { return status(allocate_host(address, n)); }
VGPU_API cudaError_t cudaMallocHost(void** address, size_t n) { return status(allocate_host(address, n)); }
VGPU_API cudaError_t cudaFreeHost(void* address) {
  Lock lock;
  count("cudaFreeHost");
  if (const int error = forbidden_in_capture("cudaFreeHost")) return status(error);
  run_everything();
  free_pinned(address);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaHostRegister(void* address, size_t n, unsigned) {
  Lock lock;
  register_pinned(address, n);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaHostUnregister(void* address) {
  Lock lock;
  run_everything();
  unregister_pinned(address);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock;
  *total = kCapacity;
  *free = kCapacity - allocated_bytes();
  return cudaSuccess;
}
VGPU_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock;
  std::memset(attributes, 0, sizeof *attributes);
  void* pointer = const_cast<void*>(address);
  if (is_device(address)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = pointer;
  } else if (is_pinned(address)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = attributes->devicePointer = pointer;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = pointer;
  }
  return cudaSuccess;
}

// ---- copies -------------------------------------------------------------------------------------------------------

namespace {

struct Copy {
  void* to;
  const void* from;
  size_t n;
  bool to_device = is_device(to), from_device = is_device(from);
  bool pageable = (!to_device && !is_pinned(to)) || (!from_device && !is_pinned(from));

  int kind() const { return to_device ? (from_device ? 3 : 1) : (from_device ? 2 : 0); }  // a cudaMemcpyKind
  std::string label() const {
    static const char* const names[] = {"H2H", "H2D", "D2H", "D2D"};
    const char* memory = pageable ? " pageable " : kind() == cudaMemcpyDeviceToDevice ? " " : " pinned ";
    return std::string("memcpy ") + names[kind()] + memory;
  }
};

// Pageable memory of the host is read now, pinned memory when the copy runs.
Operation operation_of(const Copy& copy) {
  const std::string label = copy.label() + std::to_string(copy.n);
  if (!copy.from_device && copy.pageable) {
    const auto* begin = static_cast<const uint8_t*>(copy.from);
    const auto data = std::make_shared<std::vector<uint8_t>>(begin, begin + copy.n);
    return {[copy, data]() -> int {
              uint8_t* to = bytes_at(copy.to, copy.n, "memcpy");
              if (to == nullptr) return cudaErrorIllegalAddress;
              std::memcpy(to, data->data(), copy.n);
              return 0;
            },
            label};
  }
  return {[copy]() -> int {
            if (!copy.from_device && !is_pinned(copy.from)) {
              report("a queued copy reads pinned memory that has been freed, at " +
                     hexadecimal(reinterpret_cast<uint64_t>(copy.from)));
              return cudaErrorIllegalAddress;
            }
            uint8_t* to = bytes_at(copy.to, copy.n, "memcpy");
            const uint8_t* from = bytes_at(copy.from, copy.n, "memcpy");
            if (to == nullptr || from == nullptr) return cudaErrorIllegalAddress;
            std::memmove(to, from, copy.n);
            return 0;
          },
          label};
}

int queue_copy(void* to, const void* from, size_t n, int kind, cudaStream_t handle, bool async) {
  if (n == 0) return 0;
  Stream* stream = stream_of(handle);
  const Copy copy{to, from, n};
  if (kind != cudaMemcpyDefault && kind != copy.kind()) {
    report("copy of the wrong kind: it is " + copy.label() + std::to_string(n));
    return remember(cudaErrorInvalidMemcpyDirection);
  }
  count(copy.label() + (async ? "async" : "sync"));
  count(copy.label() + "bytes", n);
  if (!async) {
    if (const int error = forbidden_in_capture("cudaMemcpy")) return error;
  }
  if (stream->capture && copy.pageable) return forbidden_on_captured(stream, "copy of pageable memory");
  if (const int error = enqueue(stream, operation_of(copy))) return error;
  const bool to_pageable = copy.kind() == cudaMemcpyDeviceToHost && copy.pageable;
  if (async && to_pageable) count("implicit_sync:D2H pageable");
  return async && !to_pageable ? 0 : remember(run_all_of(stream));
}

}  // namespace

VGPU_API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  Lock lock;
  count("sync:memcpy");
  return status(queue_copy(to, from, n, kind, nullptr, false));
}
VGPU_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  Lock lock;
  return status(queue_copy(to, from, n, kind, stream, true));
}
VGPU_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
  Lock lock;
  return status(queue_copy(to, from, n, cudaMemcpyDeviceToDevice, stream, true));
}
VGPU_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                       size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; ++i) {
    char* row = static_cast<char*>(to) + i * to_pitch;
    const cudaError_t error =
        cudaMemcpyAsync(row, static_cast<const char*>(from) + i * from_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
VGPU_API cudaError_t cudaMemsetAsync(void* address, int value, size_t n, cudaStream_t stream) {
  Lock lock;
  if (n == 0) return cudaSuccess;
  count("memset");
  const auto run = [address, value, n]() -> int {
    uint8_t* to = bytes_at(address, n, "memset");
    if (to == nullptr) return cudaErrorIllegalAddress;
    std::memset(to, value, n);
    return 0;
  };
  return status(enqueue(stream_of(stream), {run, "memset " + std::to_string(n)}));
}
VGPU_API cudaError_t cudaMemset(void* address, int value, size_t n) {
  return cudaMemsetAsync(address, value, n, nullptr);
}

// ---- pools: there is one, and it has no options -------------------------------------------------------------------

VGPU_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(8);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
VGPU_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
VGPU_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
VGPU_API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
