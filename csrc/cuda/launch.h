// The passes over rows in device memory: one launch for each dtype, whatever the number of tensors.
#pragma once

#include <optional>

#include "multi_tensor.cuh"

namespace sassha::cuda {

// A table of rows and its chunks in device memory. Only their number is known to the host.
struct DeviceRows {
  const Row* rows;
  int64_t size;
  const Chunk* chunks;
  int64_t counts[kDTypes];  // chunks of each dtype

  int64_t n_chunks() const { return counts[0] + counts[1] + counts[2] + counts[3]; }
  const Span* spans() const { return reinterpret_cast<const Span*>(chunks + n_chunks()); }

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
};

// ---- norm ----------------------------------------------------------------------------------------------------

// Sum of squares of one chunk.
struct PartialSum {
  double sum;
  int64_t group;
};

// Memory for sums of squares: `partials` of every chunk, `totals` of every group.
struct GroupSums {
  PartialSum* partials;
  double* totals;
  int64_t n_groups;
};

void square_sums(const DeviceRows& rows, bool adaptive, const GroupSums& sums, Queue queue);
// From the partial sums of all chunks to the totals.
void finish_sums(const DeviceRows& rows, const GroupSums& sums, Queue queue);

// ---- perturb -------------------------------------------------------------------------------------------------

struct AscentArgs {
  const float* scales;  // per group: +-rho / norm, 0 for no ascent
  uint64_t seed;        // rounding noise of reduced-precision parameters
  const int64_t* draw;
};

void perturb(const DeviceRows& rows, bool adaptive, const AscentArgs& args, Queue queue);
void restore(const DeviceRows& rows, Queue queue);
// Parameters from x, which lives in the backups for good, and from the momentum.
void momentum_ascent(const DeviceRows& rows, bool adaptive, const AscentArgs& args, Queue queue);

// ---- gap -----------------------------------------------------------------------------------------------------

// Sums over all rows, of their gradients and those of the first pass. `partials` has room for every chunk.
void gap_sums(const DeviceRows& rows, GapSums* partials, GapSums* total, Queue queue);
void decompose(const DeviceRows& rows, const GapScales* scales, Queue queue);

// ---- probe ---------------------------------------------------------------------------------------------------

void rademacher(const DeviceRows& rows, uint64_t seed, uint32_t draw, Queue queue);
void probe(const DeviceRows& rows, double h, uint64_t seed, uint32_t draw, Queue queue);

// ---- step ----------------------------------------------------------------------------------------------------

struct StepArgs {
  const StepScalars<double>* scalars;  // per cohort
  uint64_t seed;
  uint32_t draw;              // of the signs of a product that is not signed yet
  const int64_t* noise_draw;  // of the rounding noise of reduced-precision parameters; null rounds to nearest
  Sample sample;              // what a refresh adds to D
  bool adaptive;              // where x lives apart, squares are of |x| m
};

// Memory for what a refresh saw: `partials` of every chunk, `totals` of every row.
struct Tallies {
  Tally* partials;
  Tally* totals;
};

// `power` is the one that all cohorts share, if there is one that is known. With `tallies` the update is a refresh.
// With `squares` x lives apart: it is updated in the backups, and squares of m are added up.
void step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power,
          const std::optional<Tallies>& tallies, const std::optional<GroupSums>& squares, Queue queue);

}  // namespace sassha::cuda
