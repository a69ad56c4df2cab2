// What every file with functions of the CUDA API includes.
#pragma once

#include <cuda_runtime_api.h>

#include "lock.h"
#include "log.h"
#include "queue.h"

#define VGPU_API extern "C" __attribute__((visibility("default")))
