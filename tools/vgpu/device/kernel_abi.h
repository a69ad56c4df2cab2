// What the executor and a translated kernel know of each other.
#pragma once

#include <cstdint>

namespace vgpu {

struct Thread;

// The addresses [begin, end) lie at address + delta on the host. Valid for one launch, which epoch names.
struct Range {
  uint64_t begin, end, delta, epoch;
};

enum class ShuffleMode : int { kUp, kDown, kButterfly, kIndex };
enum class Access : int { kLoad, kStore };

// Functions of the executor that a kernel calls. `line` is a line of its PTX.
struct Runtime {
  uint64_t epoch;
  // The range around an access; does not return if there is none.
  void (*find)(Thread&, uint64_t address, uint32_t bytes, Access access, int line, Range* out);
  void (*misaligned)(Thread&, const char* space, uint64_t address, uint32_t bytes, Access access, int line);
  void (*shared_overrun)(Thread&, uint64_t address, uint32_t bytes, Access access, int line);
  void (*trap)(Thread&, int line);
  void (*barrier)(Thread&, uint32_t id, int line);
  void (*sync_warp)(Thread&, uint32_t mask, int line);
  // The value in the lower half, and whether it came from a lane of the range above it.
  uint64_t (*shuffle)(Thread&, ShuffleMode mode, uint32_t mask, uint32_t value, uint32_t lane, uint32_t clamp,
                      int line);
};

struct Thread {
  uint32_t tid[3], ntid[3], ctaid[3], nctaid[3];
  uint8_t* shared;
  uint32_t shared_size;
  uint32_t lane, warp;
  const Runtime* runtime;
  uint64_t loaded, stored;  // bytes of global memory
};

typedef void (*Entry)(Thread&, const uint8_t* params);

struct Info {
  uint32_t param_bytes, shared_bytes, n_params, max_threads;
  const uint32_t* param_offsets;
  const uint32_t* param_sizes;
};

}  // namespace vgpu
