// Launchers: rows in, one parallel loop each.
#include "launch.h"

#include "parallel.h"

namespace sassha {
namespace {

// A pass that writes more than this leaves nothing of use in a cache, so it writes past it.
constexpr int64_t kStreamElements = int64_t{4} << 20;

}  // namespace

void square_sums(Rows rows, bool adaptive, double* sums) {
  const Pieces pieces(rows.data, rows.size);
  std::vector<double> partial(static_cast<size_t>(pieces.size()));
  pieces.for_each([&](int64_t i, const Piece& piece) {
    partial[i] = kernels().square_sum(rows.data[piece.row], piece.begin, piece.size, adaptive);
  });
  for (int64_t i = 0; i < pieces.size(); ++i) sums[rows.data[pieces[i].row].group] += partial[i];
}

void perturb(Rows rows, const AscentOptions& options) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().perturb(rows.data[piece.row], piece.begin, piece.size, options);
  });
}

void restore(Rows rows) {
  const Pieces pieces(rows.data, rows.size);
  const bool stream = pieces.elements() > kStreamElements;
  pieces.for_each(
      [&](int64_t, const Piece& piece) { kernels().restore(rows.data[piece.row], piece.begin, piece.size, stream); });
}

void rademacher(Rows rows, int64_t seed, int64_t draw) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().rademacher(rows.data[piece.row], piece.begin, piece.size, static_cast<uint64_t>(seed),
                         static_cast<uint32_t>(draw));
  });
}

void probe(Rows rows, double h, int64_t seed, int64_t draw) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().probe(rows.data[piece.row], piece.begin, piece.size, static_cast<uint64_t>(seed),
                    static_cast<uint32_t>(draw), h);
  });
}

void step(Rows rows, StepOptions options, Tally* tallies) {
  const Pieces pieces(rows.data, rows.size);
  const bool in_place = rows.size == 0 || rows.data[0].param == rows.data[0].backup;
  options.stream = !in_place && pieces.elements() > kStreamElements;
  std::vector<Tally> partial(tallies == nullptr ? 0 : static_cast<size_t>(pieces.size()));
  pieces.for_each([&](int64_t i, const Piece& piece) {
    const Tally tally = kernels().step(rows.data[piece.row], piece.begin, piece.size, options);
    if (tallies != nullptr) partial[i] = tally;
  });
  for (size_t i = 0; i < partial.size(); ++i) {
    Tally& total = tallies[pieces[static_cast<int64_t>(i)].row];
    total.trace += partial[i].trace;
    total.negative += partial[i].negative;
    total.finite += partial[i].finite;
  }
}

}  // namespace sassha
