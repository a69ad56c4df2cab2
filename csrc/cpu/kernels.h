// The CPU kernels, compiled once per instruction set, and the table that holds one set of them.
//
// A kernel works on `size` elements of one row from `begin` on, where `begin` is a multiple of kSignsPerCall.
#pragma once

#include <cstdint>

#include "../params.h"
#include "../philox.h"

namespace sassha {

struct AscentOptions {
  const float* scales;  // per group: +-rho / norm, 0 for no ascent
  bool adaptive;        // ASAM
  uint64_t seed;        // rounding noise of reduced-precision parameters
  uint32_t draw;
};

struct StepOptions {
  const StepScalars<double>* scalars;  // per cohort
  uint64_t seed;
  uint32_t draw;         // of the signs of a product that is not signed yet
  uint32_t noise_draw;   // of the rounding noise of reduced-precision parameters
  bool round_at_random;  // round those with it, not to nearest
  Sample sample;         // what a refresh adds to D
  bool apart;            // x lives in the backup for good: it is updated there, and squares of m are added up
  bool adaptive;         // of |x| m, then
  bool stream;           // write parameters past the cache
};

struct Stepped {
  Tally tally;     // of a refresh
  double squares;  // of m, where x lives apart
};

struct Kernels {
  const char* isa;
  double (*square_sum)(const Row& row, int64_t begin, int64_t size, bool adaptive);
  void (*perturb)(const Row& row, int64_t begin, int64_t size, const AscentOptions& options);
  void (*restore)(const Row& row, int64_t begin, int64_t size, bool stream);
  void (*momentum_ascent)(const Row& row, int64_t begin, int64_t size, const AscentOptions& options);
  GapSums (*gap_sums)(const Row& row, int64_t begin, int64_t size);
  void (*decompose)(const Row& row, int64_t begin, int64_t size, const GapScales* scales);
  void (*rademacher)(const Row& row, int64_t begin, int64_t size, uint64_t seed, uint32_t draw);
  void (*probe)(const Row& row, int64_t begin, int64_t size, uint64_t seed, uint32_t draw, double h);
  Stepped (*step)(const Row& row, int64_t begin, int64_t size, const StepOptions& options);
};

// The set chosen for this machine: the widest that it runs, or what SASSHA_CPU_ISA names.
const Kernels& kernels();

// What each instruction set's translation unit defines.
#define SASSHA_DECLARE_KERNELS(ISA)                                                                \
  namespace ISA {                                                                                  \
  double square_sum(const Row& row, int64_t begin, int64_t size, bool adaptive);                   \
  void perturb(const Row& row, int64_t begin, int64_t size, const AscentOptions& options);         \
  void restore(const Row& row, int64_t begin, int64_t size, bool stream);                          \
  void momentum_ascent(const Row& row, int64_t begin, int64_t size, const AscentOptions& options); \
  GapSums gap_sums(const Row& row, int64_t begin, int64_t size);                                   \
  void decompose(const Row& row, int64_t begin, int64_t size, const GapScales* scales);            \
  void rademacher(const Row& row, int64_t begin, int64_t size, uint64_t seed, uint32_t draw);      \
  void probe(const Row& row, int64_t begin, int64_t size, uint64_t seed, uint32_t draw, double h); \
  Stepped step(const Row& row, int64_t begin, int64_t size, const StepOptions& options);           \
  }

SASSHA_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
SASSHA_DECLARE_KERNELS(avx2)
SASSHA_DECLARE_KERNELS(avx512)
#endif

}  // namespace sassha
