// Runs the kernels of this directory on the CPU, compiled by g++: blocks one after the other, the threads of a block as
// fibers that give way at barriers and shuffles alone.
//
// One order of threads hides a missing barrier, so there are several: in each, a thread runs as far as it can before
// the next one starts. What hardware would punish is an error here: a barrier that not all threads reach, and a vector
// at an address that does not allow it.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

namespace sassha::sim {

constexpr int kWarpLanes = 32;

struct Index {
  unsigned x;
};

enum class Wait { kNothing, kBlock, kWarp, kDone };

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  Wait wait = Wait::kNothing;
  double slot = 0;  // what the lane offers in a shuffle
  std::unique_ptr<char[]> stack;
};

// One block at a time. Kernels run on the thread that launches them.
class Machine {
 public:
  Index thread{0}, block{0};
  int64_t launches = 0;

  // Order of threads: 0 ascending, 1 descending, 2 odd ones first, 3 warps from the last to the first, and from 4 on
  // random ones that change at every barrier.
  int order = 0;

  void run(int64_t blocks, int threads, const std::function<void()>& kernel) {
    ++launches;
    kernel_ = &kernel;
    error_.clear();
    random_.seed(static_cast<unsigned>(order));
    while (static_cast<int>(fibers_.size()) < threads) {
      fibers_.emplace_back();
      fibers_.back().stack.reset(new char[kStack]);
    }
    threads_ = threads;
    turns_ = permutation(threads);
    for (const int64_t b : permutation(blocks)) {
      block.x = static_cast<unsigned>(b);
      run_block();
      if (!error_.empty()) throw std::runtime_error("sim: " + error_ + " in block " + std::to_string(b));
    }
  }

  void wait(Wait for_what) {
    Fiber& self = fibers_[thread.x];
    self.wait = for_what;
    leave(self);
  }

  // The value of another lane of the warp, whose lanes all come here; one outside of it gives back the own value.
  double shuffle(double value, int lane) {
    const unsigned me = thread.x, first = me - me % kWarpLanes;
    fibers_[me].slot = value;
    wait(Wait::kWarp);
    const double other = lane < kWarpLanes ? fibers_[first + static_cast<unsigned>(lane)].slot : value;
    wait(Wait::kWarp);  // nobody overwrites a slot that is still to be read
    return other;
  }

  int lane() const { return static_cast<int>(thread.x % kWarpLanes); }

  // Ends the launch; the thread that calls it never goes on.
  void fail(const std::string& what) {
    error_ = what;
    wait(Wait::kDone);
  }

 private:
  static constexpr size_t kStack = 256 << 10;

  std::vector<int> permutation(int64_t n) {
    std::vector<int> out(static_cast<size_t>(n));
    std::iota(out.begin(), out.end(), 0);
    const auto by = [&](auto key) {
      std::stable_sort(out.begin(), out.end(), [&](int a, int b) { return key(a) < key(b); });
    };
    if (order == 1) by([](int i) { return -i; });
    if (order == 2) by([](int i) { return i % 2 == 0; });
    if (order == 3) by([](int i) { return -(i / kWarpLanes); });
    if (order >= 4) std::shuffle(out.begin(), out.end(), random_);
    return out;
  }

  void run_block() {
    for (int t = 0; t < threads_; ++t) {
      fibers_[t].started = false;
      fibers_[t].wait = Wait::kNothing;
    }
    while (true) {
      if (order >= 4) turns_ = permutation(threads_);
      for (const int t : turns_) {
        if (fibers_[t].wait == Wait::kNothing) enter(t);
        if (!error_.empty()) return;
      }
      if (count(0, threads_, Wait::kDone) == threads_) return;
      if (!release_warps() && !release_block()) error_ = "a barrier that not all threads reach";
      if (!error_.empty()) return;
    }
  }

  int count(int begin, int end, Wait wait) const {
    return static_cast<int>(
        std::count_if(fibers_.begin() + begin, fibers_.begin() + end, [&](const Fiber& f) { return f.wait == wait; }));
  }

  void release(int begin, int end) {
    for (int t = begin; t < end; ++t) fibers_[t].wait = Wait::kNothing;
  }

  bool release_warps() {
    bool any = false;
    for (int begin = 0; begin < threads_; begin += kWarpLanes) {
      const int end = std::min(begin + kWarpLanes, threads_);
      if (count(begin, end, Wait::kWarp) != end - begin) continue;
      release(begin, end);
      any = true;
    }
    return any;
  }

  bool release_block() {
    if (count(0, threads_, Wait::kBlock) != threads_) return false;
    release(0, threads_);
    return true;
  }

  // ---- switching. Under a sanitizer by swapcontext, which it understands; else by longjmp, which makes no system
  // call.

  void enter(int t) {
    Fiber& fiber = fibers_[t];
    thread.x = static_cast<unsigned>(t);
    if (!fiber.started) {
      fiber.started = true;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStack;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, reinterpret_cast<void (*)()>(&Machine::body), 0);
#if !defined(__SANITIZE_ADDRESS__)
      if (_setjmp(scheduler_) == 0) setcontext(&fiber.start);
      return;
#endif
    }
#if defined(__SANITIZE_ADDRESS__)
    swapcontext(&scheduler_context_, &fiber.start);
#else
    if (_setjmp(scheduler_) == 0) _longjmp(fiber.at, 1);
#endif
  }

  void leave(Fiber& self) {
    const unsigned me = thread.x;
#if defined(__SANITIZE_ADDRESS__)
    swapcontext(&self.start, &scheduler_context_);
#else
    if (_setjmp(self.at) == 0) _longjmp(scheduler_, 1);
#endif
    thread.x = me;
  }

  static void body();

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Fiber> fibers_;
  int threads_ = 0;
  std::vector<int> turns_;
  std::string error_;
  std::mt19937 random_;
  jmp_buf scheduler_;
  ucontext_t scheduler_context_;
};

inline Machine& machine() {
  static Machine one;
  return one;
}

inline void Machine::body() {
  Machine& self = machine();
  (*self.kernel_)();
  self.wait(Wait::kDone);
}

}  // namespace sassha::sim

#define threadIdx (::sassha::sim::machine().thread)
#define blockIdx (::sassha::sim::machine().block)
inline void __syncthreads() { ::sassha::sim::machine().wait(::sassha::sim::Wait::kBlock); }

namespace sassha::cuda {

struct Queue {};

class OnDevice {
 public:
  explicit OnDevice(int32_t) {}
  Queue queue() const { return {}; }
};

inline void copy_to_device(void* to, const void* from, size_t bytes, Queue) { std::memcpy(to, from, bytes); }

template <typename... Params, typename... Args>
void launch(const char*, void (*kernel)(Params...), int64_t blocks, int threads, Queue, Args... args) {
  if (blocks > 0) sim::machine().run(blocks, threads, [&] { kernel(args...); });
}

// A slot holds every value of 32 bits exactly.
template <typename V>
inline V shuffle_down(V value, int delta) {
  return static_cast<V>(sim::machine().shuffle(static_cast<double>(value), sim::machine().lane() + delta));
}

template <typename V>
inline V shuffle_xor(V value, int mask) {
  return static_cast<V>(sim::machine().shuffle(static_cast<double>(value), sim::machine().lane() ^ mask));
}

inline void* global_pointer(int64_t address) { return reinterpret_cast<void*>(address); }

struct alignas(16) Vector {
  uint32_t x, y, z, w;
};

inline Vector read_vector(const Vector* from) { return *from; }
inline void write_vector(Vector* to, Vector value) { *to = value; }

template <typename T>
inline void check_vector_address(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) sim::machine().fail("a vector at an odd address");
}

}  // namespace sassha::cuda
