// Stand-in libcuda.so.1: what torch and Triton ask of the driver, on top of the stand-in runtime.
#include <cuda.h>

#include <cstdio>

#include "api.h"
#include "device.h"
#include "memory.h"

using namespace vgpu;

static CUcontext the_context() { return reinterpret_cast<CUcontext>(16); }

// ---- device and context -------------------------------------------------------------------------------------------

VGPU_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
VGPU_API CUresult cuDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  std::snprintf(text, size, "%s", kDeviceName);
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = device_attribute(attribute);
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = the_context();
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = the_context();
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
VGPU_API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
VGPU_API CUresult cuCtxSynchronize() { return static_cast<CUresult>(cudaDeviceSynchronize()); }
VGPU_API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

// ---- streams and addresses ----------------------------------------------------------------------------------------

VGPU_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* result) {
  Lock lock;
  *result = static_cast<CUstreamCaptureStatus>(capture_status(stream_of(stream)));
  return CUDA_SUCCESS;
}
VGPU_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  Lock lock;
  const void* pointer = reinterpret_cast<void*>(address);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (!is_device(pointer) && !is_pinned(pointer)) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUdeviceptr*>(value) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = is_device(pointer) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    default:
      *static_cast<unsigned*>(value) = 0;
      return CUDA_SUCCESS;
  }
}
VGPU_API CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* attributes, void** values,
                                         CUdeviceptr address) {
  for (unsigned i = 0; i < n; ++i) cuPointerGetAttribute(values[i], attributes[i], address);
  return CUDA_SUCCESS;
}
