// The passes over rows in device memory: one launch for each dtype, whatever the number of tensors.
#pragma once

#include <optional>

#include "../formats.h"
#include "../passes.h"
#include "multi_tensor.cuh"

namespace sassha::cuda {

// A table of rows and its chunks in device memory, of which the host knows the number alone; the queue that works on
// them; and, from whoever keeps that memory, more of it for partial results.
struct DeviceRows {
  const Row* rows;
  int64_t size;
  const Chunk* chunks;
  int64_t counts[kDTypes];  // chunks of each dtype
  int64_t format;           // of all rows: see formats.h
  Queue queue;

  bool is_compact() const { return format != 0; }
  bool has_correction() const { return correction_of(format) != Correction::kNone; }
  bool has_compact_state() const { return state_of(format) != State::kFull; }
  int64_t n_chunks() const { return counts[0] + counts[1] + counts[2] + counts[3]; }
  const Span* spans() const { return reinterpret_cast<const Span*>(chunks + n_chunks()); }

  // Room for a T of every chunk, for the length of a call.
  template <typename T>
  T* of_every_chunk() const {
    static_assert(sizeof(T) % sizeof(double) == 0, "whole words of a float64 tensor");
    return static_cast<T*>(scratch(n_chunks(), sizeof(T) / sizeof(double)));
  }

  // Calls f(Tag<T>, table, chunks, number of the first chunk) for every dtype that there is.
  template <typename F>
  void for_each_dtype(const F& f) const {
    int64_t first = 0;
    for (int64_t dtype = 0; dtype < kDTypes; ++dtype) {
      if (counts[dtype] == 0) continue;
      with_dtype(dtype, [&](auto tag) { f(tag, Table{rows, chunks + first}, counts[dtype], first); });
      first += counts[dtype];
    }
  }

 protected:
  ~DeviceRows() = default;
  virtual void* scratch(int64_t items, int64_t words) const = 0;
};

// Sum of squares of one chunk.
struct PartialSum {
  double sum;
  int64_t group;
};

// From the partial sums of all chunks to the totals.
void finish_sums(const DeviceRows& rows, const PartialSum* partials, const GroupSums& sums);

// The same passes over rows whose state or weights are stored in fewer bits (compact.cu), as far as these look at the
// format. Updates and sums leave partial results.
void compact_perturb(const DeviceRows& rows, const AscentArgs& args);
void compact_momentum_ascent(const DeviceRows& rows, const AscentArgs& args);
void compact_step(const DeviceRows& rows, const StepArgs& args, PartialSum* squares);
void compact_refresh_step(const DeviceRows& rows, const StepArgs& args, Tally* partials, PartialSum* squares);
void compact_unseen_sums(const DeviceRows& rows, const Tally* tallies, Unseen* partials);
void compact_fill_unseen(const DeviceRows& rows, const FillArgs& args);

struct Cuda {
  struct Rows;  // DeviceRows in tensors: see ops.cu

  static void square_sums(const DeviceRows& rows, int64_t column, bool adaptive, const GroupSums& sums);
  static void perturb(const DeviceRows& rows, const AscentArgs& args);
  static void restore(const DeviceRows& rows);
  // `power` is the one that all cohorts share, if there is one that is known.
  static void step(const DeviceRows& rows, const StepArgs& args, const StepSums& sums, std::optional<double> power);
  static void momentum_ascent(const DeviceRows& rows, const AscentArgs& args);
  static void gap_sums(const DeviceRows& rows, GapSums* total);
  static void decompose(const DeviceRows& rows, const GapScales* scales);
  static void unseen_sums(const DeviceRows& rows, const Tally* tallies, Unseen* sums);
  static void fill_unseen(const DeviceRows& rows, const FillArgs& args);
  static void rademacher(const DeviceRows& rows, uint64_t seed, uint32_t draw);
  static void probe(const DeviceRows& rows, const double* h, uint64_t seed, uint32_t draw);
};

}  // namespace sassha::cuda
