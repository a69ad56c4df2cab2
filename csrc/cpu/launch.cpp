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

void momentum_ascent(Rows rows, const AscentOptions& options) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().momentum_ascent(rows.data[piece.row], piece.begin, piece.size, options);
  });
}

GapSums gap_sums(Rows rows) {
  const Pieces pieces(rows.data, rows.size);
  std::vector<GapSums> partial(static_cast<size_t>(pieces.size()));
  pieces.for_each([&](int64_t i, const Piece& piece) {
    partial[i] = kernels().gap_sums(rows.data[piece.row], piece.begin, piece.size);
  });
  GapSums total = {};
  for (const GapSums& sums : partial) {
    total.first += sums.first;
    total.dot += sums.dot;
    total.second += sums.second;
  }
  return total;
}

void decompose(Rows rows, const GapScales* scales) {
  Pieces(rows.data, rows.size).for_each([&](int64_t, const Piece& piece) {
    kernels().decompose(rows.data[piece.row], piece.begin, piece.size, scales);
  });
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

void step(Rows rows, StepOptions options, Tally* tallies, double* squares) {
  const Pieces pieces(rows.data, rows.size);
  const bool in_place = options.apart || rows.size == 0 || rows.data[0].param == rows.data[0].backup;
  options.stream = !in_place && pieces.elements() > kStreamElements;
  const bool keeps = tallies != nullptr || squares != nullptr;
  std::vector<Stepped> partial(keeps ? static_cast<size_t>(pieces.size()) : 0);
  pieces.for_each([&](int64_t i, const Piece& piece) {
    const Stepped stepped = kernels().step(rows.data[piece.row], piece.begin, piece.size, options);
    if (keeps) partial[i] = stepped;
  });
  for (size_t i = 0; i < partial.size(); ++i) {
    const int64_t row = pieces[static_cast<int64_t>(i)].row;
    if (squares != nullptr) squares[rows.data[row].group] += partial[i].squares;
    if (tallies == nullptr) continue;
    tallies[row].trace += partial[i].tally.trace;
    tallies[row].negative += partial[i].tally.negative;
    tallies[row].finite += partial[i].tally.finite;
  }
}

}  // namespace sassha
