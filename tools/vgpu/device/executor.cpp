#include "executor.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "fiber.h"
#include "log.h"
#include "memory.h"

namespace vgpu {
namespace {

constexpr int kWarp = 32;

// The launch at hand. There is one at a time: whoever runs it holds the lock.
struct Launch {
  const Kernel* kernel;
  const uint8_t* params;
  Size grid, block;
  int threads;
  std::string error;
  Outcome outcome;
  std::mt19937_64 dice;
  Runtime runtime;
  std::vector<uint8_t> shared;
  uint32_t shared_size;
  uint64_t loaded, stored, pinned_sites;
};
Launch launch;
std::vector<Fiber> fibers;

std::string triple(const uint32_t (&v)[3]) {
  return "(" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + ")";
}

std::string place(const Thread& thread, int line) {
  return "PTX line " + std::to_string(line) + ", block " + triple(thread.ctaid) + ", thread " + triple(thread.tid);
}

// ---- what a kernel calls ------------------------------------------------------------------------------------------

[[noreturn]] void fail(Thread& thread, const std::string& what, int line, Outcome outcome = kIllegalAddress) {
  launch.error = "kernel " + launch.kernel->readable + ": " + what + ", " + place(thread, line);
  launch.outcome = outcome;
  suspend();
  std::abort();  // nobody resumes it
}

std::string access_text(const char* space, uint64_t address, uint32_t bytes, Access access) {
  return (access == Access::kStore ? "store of " : "load of ") + std::to_string(bytes) + " bytes at " + space +
         hexadecimal(address);
}

void find(Thread& thread, uint64_t address, uint32_t bytes, Access access, int line, Range* out) {
  const bool device = is_device(reinterpret_cast<void*>(address));
  const Allocation* found = device ? find_device(address) : find_pinned(address);
  if (found == nullptr || address + bytes > found->base + found->size) {
    fail(thread, access_text("", address, bytes, access) + ", " + describe(address, bytes), line);
  }
  launch.pinned_sites += !device;
  *out = {found->base, found->base + found->size, device ? kShadow : 0, launch.runtime.epoch};
}

void misaligned(Thread& thread, const char* space, uint64_t address, uint32_t bytes, Access access, int line) {
  std::string text = "misaligned " + access_text("", address, bytes, access);
  text += space[0] == 'g' ? ", " + describe(address, bytes) : " of shared memory";
  fail(thread, text, line);
}

void shared_overrun(Thread& thread, uint64_t address, uint32_t bytes, Access access, int line) {
  const std::string size = std::to_string(thread.shared_size);
  fail(thread, access_text("", address, bytes, access) + " of shared memory, which has " + size + " bytes", line);
}

void trap(Thread& thread, int line) { fail(thread, "trap", line, kLaunchFailure); }

void barrier(Thread&, uint32_t id, int line) {
  current().barrier = id;
  current().line = line;
  current().state = State::kAtBarrier;
  suspend();
}

void sync_warp(Thread& thread, uint32_t mask, int line) {
  if (!((mask >> thread.lane) & 1)) fail(thread, "barrier of a warp by a lane that is not in its mask", line);
  current().mask = mask;
  current().line = line;
  current().state = State::kInWarpSync;
  suspend();
}

uint64_t shuffle(Thread& thread, ShuffleMode mode, uint32_t mask, uint32_t value, uint32_t by, uint32_t clamp,
                 int line) {
  Fiber& me = current();
  if (!((mask >> thread.lane) & 1)) fail(thread, "shuffle by a lane that is not in mask " + hexadecimal(mask), line);
  const uint32_t slot = me.shuffles++ & 1;
  me.offered[slot] = value;
  me.mask = mask;
  me.line = line;
  me.state = State::kInShuffle;
  suspend();
  const int lane = thread.lane, distance = by & 31, segment = (clamp >> 8) & 31;
  const int bound = (lane & segment) | (clamp & 31 & ~segment);
  int source = 0;
  switch (mode) {
    case ShuffleMode::kUp:
      source = lane - distance;
      break;
    case ShuffleMode::kDown:
      source = lane + distance;
      break;
    case ShuffleMode::kButterfly:
      source = lane ^ distance;
      break;
    case ShuffleMode::kIndex:
      source = (lane & segment) | (distance & ~segment);
      break;
  }
  const bool inside = mode == ShuffleMode::kUp ? source >= bound : source <= bound;
  if (!inside) source = lane;
  if (!((mask >> source) & 1)) {
    fail(thread, "shuffle reads lane " + std::to_string(source) + ", not in mask " + hexadecimal(mask), line);
  }
  return fibers[thread.warp * kWarp + source].offered[slot] | (static_cast<uint64_t>(inside) << 32);
}

// ---- scheduling ---------------------------------------------------------------------------------------------------

void run_thread() {
  launch.kernel->entry(current().thread, launch.params);
  current().state = State::kEnded;
  suspend();
  std::abort();  // nobody resumes it
}

void begin_block(uint64_t number) {
  const Size &block = launch.block, &grid = launch.grid;
  std::memset(launch.shared.data(), 0xFF, launch.shared.size());  // nobody may rely on what is in it
  for (uint32_t t = 0; t < static_cast<uint32_t>(launch.threads); ++t) {
    Fiber& fiber = fibers[t];
    fiber.state = State::kReady;
    fiber.shuffles = 0;
    fiber.thread = {{t % block.x, t / block.x % block.y, t / block.x / block.y},
                    {block.x, block.y, block.z},
                    {static_cast<uint32_t>(number % grid.x), static_cast<uint32_t>(number / grid.x % grid.y),
                     static_cast<uint32_t>(number / grid.x / grid.y)},
                    {grid.x, grid.y, grid.z},
                    launch.shared.data(),
                    launch.shared_size,
                    t % kWarp,
                    t / kWarp,
                    &launch.runtime,
                    0,
                    0};
    prepare(fiber, run_thread);
  }
}

// Lanes that wait in the same shuffle or warp barrier go on when all of its mask are there.
void release_lanes(int warp) {
  Fiber* lanes = &fibers[warp * kWarp];
  for (State state : {State::kInShuffle, State::kInWarpSync}) {
    for (int lane = 0; lane < kWarp; ++lane) {
      if (lanes[lane].state != state) continue;
      const uint32_t mask = lanes[lane].mask;
      bool complete = true;
      for (int other = 0; other < kWarp; ++other) {
        if ((mask >> other) & 1) complete &= lanes[other].state == state && lanes[other].mask == mask;
      }
      if (!complete) continue;
      for (int other = 0; other < kWarp; ++other) {
        if ((mask >> other) & 1) lanes[other].state = State::kReady;
      }
    }
  }
}

// Runs every ready lane of a warp, forwards or backwards, until it waits. False after an error.
bool run_warp(int warp) {
  const bool backwards = launch.dice() & 1;
  for (int i = 0; i < kWarp; ++i) {
    Fiber& fiber = fibers[warp * kWarp + (backwards ? kWarp - 1 - i : i)];
    if (fiber.state != State::kReady) continue;
    resume(fiber);
    if (!launch.error.empty()) return false;
  }
  release_lanes(warp);
  return true;
}

std::vector<int> ready_warps() {
  std::vector<int> ready;
  for (int warp = 0; warp < launch.threads / kWarp; ++warp) {
    const Fiber* lanes = &fibers[warp * kWarp];
    if (std::any_of(lanes, lanes + kWarp, [](const Fiber& f) { return f.state == State::kReady; })) {
      ready.push_back(warp);
    }
  }
  return ready;
}

// Who waits, and who does not come: the threads that go on wait for ever.
std::string stuck_text() {
  int counts[5] = {};
  for (int t = 0; t < launch.threads; ++t) ++counts[static_cast<int>(fibers[t].state)];
  const auto number = [&](State state) { return std::to_string(counts[static_cast<int>(state)]); };
  // The crowd is at the barrier if anybody is; the first thread that is elsewhere is the one to look at.
  const State crowd = counts[static_cast<int>(State::kAtBarrier)]   ? State::kAtBarrier
                      : counts[static_cast<int>(State::kInShuffle)] ? State::kInShuffle
                                                                    : State::kInWarpSync;
  const auto *begin = fibers.data(), *end = begin + launch.threads;
  const Fiber* waiting = std::find_if(begin, end, [&](const Fiber& f) { return f.state == crowd; });
  const Fiber* missing = std::find_if(begin, end, [&](const Fiber& f) {
    return f.state != crowd || (crowd == State::kAtBarrier ? f.barrier != waiting->barrier : f.mask != waiting->mask);
  });
  std::string text = "threads wait for a barrier or shuffle that not all reach: " + number(State::kAtBarrier) +
                     " at a barrier, " + number(State::kInShuffle) + " in a shuffle, " + number(State::kInWarpSync) +
                     " at a barrier of their warp, " + number(State::kEnded) + " at the end; one waits at " +
                     place(waiting->thread, waiting->line);
  if (missing == end) return text;
  text += "; thread " + triple(missing->thread.tid);
  if (missing->state == State::kEnded) return text + " has ended";
  return text + " waits elsewhere, at PTX line " + std::to_string(missing->line);
}

// Releases a barrier that all threads have reached. False if the block is stuck.
bool release_barrier() {
  for (int t = 0; t < launch.threads; ++t) {
    if (fibers[t].state != State::kAtBarrier || fibers[t].barrier != fibers[0].barrier) return false;
  }
  for (int t = 0; t < launch.threads; ++t) fibers[t].state = State::kReady;
  return true;
}

Outcome run_block(uint64_t number) {
  begin_block(number);
  while (true) {
    const std::vector<int> ready = ready_warps();
    if (!ready.empty()) {
      if (run_warp(ready[launch.dice() % ready.size()])) continue;
      report(launch.error);
      return launch.outcome;
    }
    const auto ended = [](const Fiber& f) { return f.state == State::kEnded; };
    if (std::all_of(fibers.begin(), fibers.begin() + launch.threads, ended)) break;
    if (release_barrier()) continue;
    report("kernel " + launch.kernel->readable + ": " + stuck_text());
    return kLaunchFailure;
  }
  for (int t = 0; t < launch.threads; ++t) {
    launch.loaded += fibers[t].thread.loaded;
    launch.stored += fibers[t].thread.stored;
  }
  return kSuccess;
}

void begin_launch(const Kernel& kernel, Size grid, Size block, const uint8_t* params, size_t dynamic_shared) {
  static uint64_t epoch = 0;
  launch.kernel = &kernel;
  launch.params = params;
  launch.grid = grid;
  launch.block = block;
  launch.threads = static_cast<int>(block.total());
  launch.error.clear();
  launch.dice.seed(dice()());
  launch.runtime = {++epoch, find, misaligned, shared_overrun, trap, barrier, sync_warp, shuffle};
  launch.shared_size = static_cast<uint32_t>(kernel.info.shared_bytes + dynamic_shared);
  launch.shared.resize(launch.shared_size + 16);
  launch.loaded = launch.stored = launch.pinned_sites = 0;
  if (fibers.size() < static_cast<size_t>(launch.threads)) fibers.resize(launch.threads);
}

}  // namespace

const Kernel* load_kernel(const std::string& shared_object, const std::string& name) {
  static std::map<std::string, Kernel*> loaded;
  Kernel*& kernel = loaded[shared_object];
  if (kernel != nullptr) return kernel;
  void* handle = dlopen(shared_object.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    report(std::string("a translated kernel can't be loaded: ") + dlerror());
    return nullptr;
  }
  const auto* entry = static_cast<Entry*>(dlsym(handle, "vgpu_entry"));
  const auto* info = static_cast<Info*>(dlsym(handle, "vgpu_info"));
  kernel = new Kernel{*entry, *info, name, readable(name)};
  return kernel;
}

Outcome execute(const Kernel& kernel, Size grid, Size block, const uint8_t* params, size_t dynamic_shared) {
  if (block.total() > kernel.info.max_threads) {
    report("kernel " + kernel.readable + ": " + std::to_string(block.total()) + " threads, its launch bounds are " +
           std::to_string(kernel.info.max_threads));
    return kInvalidValue;
  }
  if (block.total() % kWarp) {
    report("kernel " + kernel.readable + ": a block of " + std::to_string(block.total()) +
           " threads is not whole warps, which the virtual GPU needs");
    return kInvalidValue;
  }
  begin_launch(kernel, grid, block, params, dynamic_shared);
  std::vector<uint32_t> order(grid.total());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  std::shuffle(order.begin(), order.end(), launch.dice);
  for (uint32_t number : order) {
    if (const Outcome outcome = run_block(number)) return outcome;
  }
  count("bytes:loaded", launch.loaded);
  count("bytes:stored", launch.stored);
  if (launch.pinned_sites) count("zero_copy_sites", launch.pinned_sites);
  return kSuccess;
}

}  // namespace vgpu
