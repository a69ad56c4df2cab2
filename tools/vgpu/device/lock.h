// One lock for the whole virtual GPU.
#pragma once

#include <mutex>

namespace vgpu {

namespace detail {
inline std::recursive_mutex& mutex() {
  static std::recursive_mutex it;
  return it;
}
inline thread_local int depth = 0;  // how often this thread holds it
}  // namespace detail

// Held by every function of the API for its length. Functions of the API call each other, so it is recursive.
class Lock {
 public:
  Lock() {
    detail::mutex().lock();
    ++detail::depth;
  }
  Lock(const Lock&) = delete;
  ~Lock() {
    --detail::depth;
    detail::mutex().unlock();
  }
};

// Gives the lock back while foreign code runs: a callback may wait for a thread that waits for the lock.
class Unlocked {
 public:
  Unlocked() : depth_(detail::depth) {
    for (detail::depth = 0; held_ < depth_; ++held_) detail::mutex().unlock();
  }
  Unlocked(const Unlocked&) = delete;
  ~Unlocked() {
    for (int i = 0; i < depth_; ++i) detail::mutex().lock();
    detail::depth = depth_;
  }

 private:
  int depth_, held_ = 0;
};

}  // namespace vgpu
