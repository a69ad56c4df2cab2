// The part of the runtime that tells of errors and of the device.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "api.h"
#include "device.h"
#include "memory.h"

using namespace vgpu;

// ---- errors -------------------------------------------------------------------------------------------------------

static const char* text_of(int error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered (virtual GPU)";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure (virtual GPU)";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capture was not ended in the same stream, unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    default:
      return "error of the virtual GPU";
  }
}
VGPU_API const char* cudaGetErrorString(cudaError_t error) { return text_of(error); }
VGPU_API const char* cudaGetErrorName(cudaError_t error) { return text_of(error); }
VGPU_API cudaError_t cudaGetLastError() {
  Lock lock;
  const int error = last_error();
  last_error() = 0;
  return status(error);
}
VGPU_API cudaError_t cudaPeekAtLastError() {
  Lock lock;
  return status(last_error());
}

// ---- the device ---------------------------------------------------------------------------------------------------

int vgpu::device_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrClockRate:
      return 1410000;
    case cudaDevAttrTextureAlignment:
      return 512;
    case cudaDevAttrMultiProcessorCount:
      return kMultiprocessors;
    case cudaDevAttrMemoryClockRate:
      return 1215000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrL2CacheSize:
      return 41943040;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrAsyncEngineCount:
      return 2;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    case cudaDevAttrComputeCapabilityMajor:
      return kComputeMajor;
    case cudaDevAttrComputeCapabilityMinor:
      return kComputeMinor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 167936;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 166912;
    default:
      return 0;
  }
}

static thread_local int device_of_thread = 0;

VGPU_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaSetDevice(int device) {
  Lock lock;
  return status(device == 0 ? 0 : remember(cudaErrorInvalidDevice));
}
VGPU_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = device_attribute(attribute);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, kDeviceName);
  p->totalGlobalMem = kCapacity;
  p->sharedMemPerBlock = device_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerBlock = device_attribute(cudaDevAttrMaxRegistersPerBlock);
  p->regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = kComputeMajor;
  p->minor = kComputeMinor;
  p->textureAlignment = 512;
  p->multiProcessorCount = kMultiprocessors;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 41943040;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = p->streamPrioritiesSupported = p->managedMemory = 1;
  p->concurrentKernels = p->canMapHostMemory = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  std::snprintf(text, size, "0000:00:00.0");
  return cudaSuccess;
}
VGPU_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaDeviceSynchronize() {
  Lock lock;
  count("sync:device");
  if (const int error = forbidden_in_capture("cudaDeviceSynchronize")) return status(error);
  return status(remember(run_everything()));
}
VGPU_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
VGPU_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// A function of the driver by its name. What is not there is counted; a caller that needs it will say so.
VGPU_API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, symbol) : nullptr;
  if (*function == nullptr) count(std::string("missing_driver:") + symbol);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : cudaErrorInvalidValue;
}
