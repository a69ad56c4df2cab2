// A thread of the device as a fiber of the host: it runs until it waits, and goes on where it waited.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_abi.h"

namespace vgpu {

enum class State { kReady, kAtBarrier, kInShuffle, kInWarpSync, kEnded };

struct Fiber {
  Thread thread;
  State state;
  uint32_t mask;        // of the shuffle or warp barrier it waits in
  uint32_t barrier;     // that it waits at
  int line;             // of the PTX it waits in
  uint32_t offered[2];  // values for other lanes: of a shuffle, and of the one before it, which others may still read
  uint32_t shuffles;
  void* stack_pointer;
  uint8_t* stack;
};

// Makes a fiber call `body` when it is next resumed. Its stack is made on first use.
void prepare(Fiber& fiber, void (*body)());

// Runs a fiber until it calls suspend; `current` is the one that runs.
void resume(Fiber& fiber);
void suspend();
Fiber& current();

}  // namespace vgpu
