// One chunked, load-balanced loop over a list of tensors.
//
// Rows are cut into pieces of at most kPiece elements at fixed places and packed into tasks of about kPiece
// elements, so small tensors share a task and large ones are split. Threads take tasks as they become free. A piece
// is always processed whole by one thread: what it returns does not depend on the number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "../params.h"

namespace sassha {

constexpr int64_t kPiece = 16384;        // elements; a multiple of kSignsPerCall, so that no Philox block is split
constexpr int64_t kSerial = 2 * kPiece;  // below this, waking threads costs more than it gains

struct Piece {
  int64_t row;
  int64_t begin;
  int64_t size;
};

class Pieces {
 public:
  Pieces(const Row* rows, int64_t n) {
    int64_t filled = kPiece;  // so that the first piece opens a task
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t begin = 0; begin < rows[r].numel; begin += kPiece) {
        const int64_t size = std::min(kPiece, rows[r].numel - begin);
        if (filled + size > kPiece) {
          tasks_.push_back(static_cast<int64_t>(pieces_.size()));
          filled = 0;
        }
        pieces_.push_back({r, begin, size});
        filled += size;
        elements_ += size;
      }
    }
    tasks_.push_back(static_cast<int64_t>(pieces_.size()));
  }

  int64_t size() const { return static_cast<int64_t>(pieces_.size()); }
  int64_t elements() const { return elements_; }
  const Piece& operator[](int64_t i) const { return pieces_[i]; }

  // Calls f(piece number, piece) once for every piece.
  template <typename F>
  void for_each(const F& f) const {
    const int64_t n_tasks = static_cast<int64_t>(tasks_.size()) - 1;
    const int64_t threads = elements_ <= kSerial ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), n_tasks);
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t, int64_t) {
      for (int64_t t = next.fetch_add(1, std::memory_order_relaxed); t < n_tasks;
           t = next.fetch_add(1, std::memory_order_relaxed)) {
        for (int64_t i = tasks_[t]; i < tasks_[t + 1]; ++i) f(i, pieces_[i]);
      }
    };
    if (threads <= 1) {
      work(0, 1);
    } else {
      torch::stable::parallel_for(0, threads, 1, work);
    }
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<int64_t> tasks_;  // first piece of each task, and the end
  int64_t elements_ = 0;
};

}  // namespace sassha
