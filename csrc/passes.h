// What the passes take beside the rows, the same on every device. Pointers are to memory of the device.
#pragma once

#include "params.h"

namespace sassha {

struct AscentArgs {
  const float* scales;  // per group: +-rho / norm, 0 for no ascent
  bool adaptive;        // ASAM
  uint64_t seed;        // of the rounding noise of reduced-precision parameters
  const int64_t* draw;  // of the same
};

struct StepArgs {
  const StepScalars<double>* scalars;  // per cohort
  uint64_t seed;
  uint32_t draw;              // of the signs of a product that is not signed yet
  const int64_t* noise_draw;  // of the rounding noise of reduced-precision parameters; null rounds to nearest
  Sample sample;              // what a refresh adds to D
  bool zero_is_seen;          // elements whose gradient and product are 0 have no curvature; else they were not seen
  bool refresh;               // rows with a product refresh D
  bool in_state;              // x is kept in state: it is updated in the backup, and squares of m are added up
  bool adaptive;              // of |x| m, then
  const int64_t* state_draw;  // of the rounding noise of m and D in fewer bits; null rounds them to nearest
};

// With what D is rounded that gets a mean.
struct FillArgs {
  const Unseen* sums;  // per row
  uint64_t seed;
  const int64_t* state_draw;  // as in StepArgs
};

// Sums of squares: one for each group.
struct GroupSums {
  double* totals;
  int64_t n_groups;
};

// What an update finds on its way.
struct StepSums {
  Tally* tallies;     // of every row, on a refresh
  GroupSums squares;  // of m, where x is kept in state
};

}  // namespace sassha
