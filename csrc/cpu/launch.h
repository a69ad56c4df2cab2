// The passes over rows in host memory: kernels, compiled once per instruction set, and one parallel loop each.
#pragma once

#include "../passes.h"
#include "../philox.h"

namespace sassha {

struct Stepped {
  Tally tally;     // of a refresh
  double squares;  // of m, where x is kept in state
};

// A kernel works on `size` elements of one row from `begin` on, where `begin` is a multiple of kSignsPerCall. With
// `stream`, the last argument of some, it writes parameters past the cache.
template <typename Result, typename... Args>
using Kernel = Result(const Row& row, int64_t begin, int64_t size, Args...);

// Every kernel: its name, its result and what it takes beside the row. Those of compact.cpp are for rows that are
// stored in fewer bits than they are computed in; the others never look at the format.
#define SASSHA_KERNELS(K)                              \
  K(square_sum, double, int64_t, bool)                 \
  K(perturb, void, const AscentArgs&)                  \
  K(compact_perturb, void, const AscentArgs&)          \
  K(restore, void, bool)                               \
  K(momentum_ascent, void, const AscentArgs&)          \
  K(compact_momentum_ascent, void, const AscentArgs&)  \
  K(gap_sums, GapSums)                                 \
  K(decompose, void, const GapScales*)                 \
  K(unseen_sums, Unseen)                               \
  K(compact_unseen_sums, Unseen)                       \
  K(fill_unseen, void, float, const FillArgs&)         \
  K(compact_fill_unseen, void, float, const FillArgs&) \
  K(rademacher, void, uint64_t, uint32_t)              \
  K(probe, void, uint64_t, uint32_t, double)           \
  K(step, Stepped, const StepArgs&, bool)              \
  K(compact_step, Stepped, const StepArgs&, bool)

#define SASSHA_POINTER(name, ...) Kernel<__VA_ARGS__>* name;
#define SASSHA_DECLARATION(name, ...) Kernel<__VA_ARGS__> name;
#define SASSHA_NAME(name, ...) name,

struct Kernels {
  const char* isa;
  SASSHA_KERNELS(SASSHA_POINTER)
};

// What the translation units of an instruction set define, and the set of it.
#define SASSHA_DECLARE_KERNELS(ISA)                             \
  namespace ISA {                                               \
  SASSHA_KERNELS(SASSHA_DECLARATION)                            \
  constexpr Kernels kSet = {#ISA, SASSHA_KERNELS(SASSHA_NAME)}; \
  }

SASSHA_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
SASSHA_DECLARE_KERNELS(avx2)
SASSHA_DECLARE_KERNELS(avx512)
#endif

}  // namespace sassha

#if !defined(SASSHA_ISA)  // The kernels see nothing of torch, and no function that the linker might merge.

#include <algorithm>
#include <optional>

#include "../formats.h"
#include "../math.h"
#include "../rows.h"
#include "parallel.h"

namespace sassha {

// The set chosen for this machine: the widest that it runs, or what SASSHA_CPU_ISA names.
const Kernels& kernels();

// A pass that writes more than this leaves nothing of use in a cache, so it writes past it.
constexpr int64_t kStreamElements = int64_t{4} << 20;

struct Cpu {
  struct Rows {
    // A device would need the chunks.
    Rows(const char*, const Tensor& table, const std::optional<Tensor>&, const Ints&)
        : data(sassha::data<const Row>(table)), size(table.size(0)) {}
    Rows(const std::vector<Row>& rows, const Tensor&) : data(rows.data()), size(static_cast<int64_t>(rows.size())) {}

    const Row* data;
    int64_t size;
  };

  static void square_sums(const Rows& rows, int64_t column, bool adaptive, const GroupSums& sums) {
    const Pieces pieces(rows.data, rows.size);
    std::vector<double> partial(static_cast<size_t>(pieces.size()));
    pieces.for_each([&](int64_t i, const Piece& piece) {
      partial[i] = kernels().square_sum(rows.data[piece.row], piece.begin, piece.size, column, adaptive);
    });
    clear(sums);
    for (int64_t i = 0; i < pieces.size(); ++i) sums.totals[rows.data[pieces[i].row].group] += partial[i];
  }

  static void perturb(const Rows& rows, const AscentArgs& args) {
    for_each_piece(rows, has_correction(rows) ? kernels().compact_perturb : kernels().perturb, args);
  }

  static void restore(const Rows& rows) {
    const Pieces pieces(rows.data, rows.size);
    const bool stream = pieces.elements() > kStreamElements;
    pieces.for_each(
        [&](int64_t, const Piece& piece) { kernels().restore(rows.data[piece.row], piece.begin, piece.size, stream); });
  }

  // Each row brings its own power.
  static void step(const Rows& rows, const StepArgs& args, const StepSums& sums, std::optional<double>) {
    const Pieces pieces(rows.data, rows.size);
    const bool in_place = args.in_state || rows.size == 0 || rows.data[0].param == rows.data[0].backup;
    const bool stream = !in_place && pieces.elements() > kStreamElements;
    const bool keeps = args.refresh || args.in_state;
    std::vector<Stepped> partial(keeps ? static_cast<size_t>(pieces.size()) : 0);
    pieces.for_each([&](int64_t i, const Piece& piece) {
      const Row& row = rows.data[piece.row];
      const bool compact = row.format != 0 || row.dtype == kBFloat16 || row.dtype == kFloat16;
      const auto kernel = compact ? kernels().compact_step : kernels().step;
      const Stepped stepped = kernel(row, piece.begin, piece.size, args, stream);
      if (keeps) partial[i] = stepped;
    });
    if (args.refresh) std::fill(sums.tallies, sums.tallies + rows.size, Tally{});
    clear(sums.squares);
    for (size_t i = 0; i < partial.size(); ++i) {
      const int64_t row = pieces[static_cast<int64_t>(i)].row;
      if (args.in_state) sums.squares.totals[rows.data[row].group] += partial[i].squares;
      if (!args.refresh) continue;
      sums.tallies[row].trace += partial[i].tally.trace;
      sums.tallies[row].negative += partial[i].tally.negative;
      sums.tallies[row].seen += partial[i].tally.seen;
    }
  }

  static void momentum_ascent(const Rows& rows, const AscentArgs& args) {
    for_each_piece(rows, is_compact(rows) ? kernels().compact_momentum_ascent : kernels().momentum_ascent, args);
  }

  static void gap_sums(const Rows& rows, GapSums* total) {
    const Pieces pieces(rows.data, rows.size);
    std::vector<GapSums> partial(static_cast<size_t>(pieces.size()));
    pieces.for_each([&](int64_t i, const Piece& piece) {
      partial[i] = kernels().gap_sums(rows.data[piece.row], piece.begin, piece.size);
    });
    *total = {};
    for (const GapSums& sums : partial) {
      total->first += sums.first;
      total->dot += sums.dot;
      total->second += sums.second;
    }
  }

  static void decompose(const Rows& rows, const GapScales* scales) {
    for_each_piece(rows, kernels().decompose, scales);
  }

  static void unseen_sums(const Rows& rows, const Tally* tallies, Unseen* sums) {
    const Pieces pieces(rows.data, rows.size);
    std::vector<Unseen> partial(static_cast<size_t>(pieces.size()));
    const auto kernel = is_compact(rows) ? kernels().compact_unseen_sums : kernels().unseen_sums;
    pieces.for_each([&](int64_t i, const Piece& piece) {
      const Row& row = rows.data[piece.row];
      if (left_some_out(row, tallies[piece.row])) {
        partial[i] = kernel(row, piece.begin, piece.size);
      }
    });
    std::fill(sums, sums + rows.size, Unseen{});
    for (int64_t i = 0; i < pieces.size(); ++i) {
      Unseen& sum = sums[pieces[i].row];
      sum.elements += partial[i].elements;
      sum.known += partial[i].known;
      sum.curvature += partial[i].curvature;
    }
  }

  static void fill_unseen(const Rows& rows, const FillArgs& args) {
    const auto kernel = is_compact(rows) ? kernels().compact_fill_unseen : kernels().fill_unseen;
    Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
      const Unseen& sum = args.sums[piece.row];
      if (!has_mean(sum)) return;
      kernel(rows.data[piece.row], piece.begin, piece.size, mean_curvature(sum), args);
    });
  }

  static void rademacher(const Rows& rows, uint64_t seed, uint32_t draw) {
    for_each_piece(rows, kernels().rademacher, seed, draw);
  }

  static void probe(const Rows& rows, const double* h, uint64_t seed, uint32_t draw) {
    for_each_piece(rows, kernels().probe, seed, draw, *h);
  }

 private:
  // All rows of a table have one format.
  static bool is_compact(const Rows& rows) { return rows.size > 0 && rows.data[0].format != 0; }
  static bool has_correction(const Rows& rows) {
    return rows.size > 0 && correction_of(rows.data[0].format) != Correction::kNone;
  }

  template <typename... Params, typename... Args>
  static void for_each_piece(const Rows& rows, Kernel<void, Params...>* kernel, const Args&... args) {
    Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
      kernel(rows.data[piece.row], piece.begin, piece.size, args...);
    });
  }

  static void clear(const GroupSums& sums) { std::fill(sums.totals, sums.totals + sums.n_groups, 0.0); }
};

}  // namespace sassha

#endif
