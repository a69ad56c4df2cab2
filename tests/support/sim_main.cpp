// Runs every kernel on the simulator over memory of exactly the size it may touch, for the address and undefined
// behaviour sanitizers to watch. What the kernels compute is the business of the Python tests.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../../csrc/cuda/launch.h"
#include "../../csrc/rows.h"

using namespace sassha;
using cuda::Cuda;
using cuda::DeviceRows;

namespace {

// A block of its own for every tensor, with room for nothing beside it; `skew` elements in front spoil the alignment.
class Memory {
 public:
  int64_t tensor(int64_t numel, int64_t dtype, int64_t skew) {
    const size_t item = static_cast<size_t>(item_size(dtype)), bytes = item * static_cast<size_t>(numel + skew);
    // malloc(0) may share its block; one byte that nobody may touch does no harm.
    blocks_.emplace_back(static_cast<char*>(std::malloc(bytes == 0 ? 1 : bytes)), &std::free);
    char* data = blocks_.back().get() + item * static_cast<size_t>(skew);
    for (int64_t i = 0; i < numel; ++i) write(data, i, dtype);
    return reinterpret_cast<int64_t>(data);
  }

  // Codes or corrections of 8 bits.
  int64_t codes(int64_t numel, int64_t skew) {
    const size_t bytes = static_cast<size_t>(numel + skew);
    blocks_.emplace_back(static_cast<char*>(std::malloc(bytes == 0 ? 1 : bytes)), &std::free);
    char* data = blocks_.back().get() + skew;
    for (int64_t i = 0; i < numel; ++i) data[i] = static_cast<char>(i % 251 - 125);
    return reinterpret_cast<int64_t>(data);
  }

  // m or D in a format.
  int64_t state(int64_t numel, int64_t dtype, int64_t format, int64_t skew) {
    if (state_of(format) == State::k8) return codes(numel, skew);
    if (state_of(format) == State::k16) return tensor(numel, kBFloat16, skew);
    return tensor(numel, dtype == kFloat64 ? kFloat64 : kFloat32, skew);
  }

 private:
  static void write(char* data, int64_t i, int64_t dtype) {
    const float value = 0.25f * static_cast<float>(i % 13 - 6);
    with_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      reinterpret_cast<T*>(data)[i] = narrow<T>(static_cast<Compute<T>>(value));
    });
  }

  std::vector<std::unique_ptr<char, decltype(&std::free)>> blocks_;
};

// With room for partial results of exactly the size that a pass asks for.
struct Lists : DeviceRows {
  Lists(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dtypes, int64_t skew, int64_t stored = 0) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t n = sizes[i], dtype = dtypes[i % dtypes.size()];
      const int64_t groups = (n + kGroup - 1) / kGroup;
      Row row = {};
      row.param = memory.tensor(n, dtype, skew);
      row.grad = memory.tensor(n, dtype, i % 2 == 0 ? skew : 0);
      row.backup = memory.tensor(n, dtype, skew);
      row.exp_avg = memory.state(n, dtype, stored, skew);
      row.hessian = memory.state(n, dtype, stored, 0);
      row.exp_avg_scale = memory.tensor(groups, kFloat32, 0);
      row.hessian_scale = memory.tensor(groups, kBFloat16, skew);
      // Two bytes of float16 are as good as int16 here.
      row.correction = correction_of(stored) == Correction::k8 ? memory.codes(n, 0) : memory.tensor(n, kFloat16, 0);
      row.format = stored;
      row.product = i % 4 == 3 ? 0 : memory.tensor(n, dtype, skew);
      row.first = memory.tensor(n, dtype, skew);
      row.numel = n;
      row.dtype = dtype;
      row.index = static_cast<int64_t>(i);
      row.group = row.cohort = static_cast<int64_t>(i % 2);
      if (i % 4 == 1) row.flags = kSignedProduct;
      if (i % 4 == 2) row.flags = kProbeGradient;
      list.push_back(row);
    }
    const Chunks found(list.data(), static_cast<int64_t>(list.size()));
    bytes.resize(found.bytes());
    found.write(bytes.data());
    rows = list.data();
    size = static_cast<int64_t>(list.size());
    chunks = reinterpret_cast<const Chunk*>(bytes.data());
    for (int64_t d = 0; d < kDTypes; ++d) counts[d] = found.counts[d];
    format = found.format;
  }

 private:
  void* scratch(int64_t items, int64_t words) const override {
    partials.emplace_back(new double[static_cast<size_t>(items * words)]());
    return partials.back().get();
  }

  Memory memory;
  std::vector<Row> list;
  std::vector<char> bytes;
  mutable std::vector<std::unique_ptr<double[]>> partials;
};

// What the passes add up, in memory of exactly the size that they ask for.
struct Sums {
  explicit Sums(const DeviceRows& rows)
      : squares(2), tallies(static_cast<size_t>(rows.size)), unseen(static_cast<size_t>(rows.size)), gap(1) {}

  GroupSums by_group() { return {squares.data(), 2}; }

  std::vector<double> squares;
  std::vector<Tally> tallies;
  std::vector<Unseen> unseen;
  std::vector<GapSums> gap;
};

// Every update: ordinary and a refresh, of parameters and of x in state.
void run_updates(const DeviceRows& rows, StepArgs args, std::optional<double> power) {
  for (const bool refresh : {true, false}) {
    for (const bool in_state : {false, true}) {
      Sums sums(rows);
      args.refresh = refresh;
      args.in_state = in_state;
      Cuda::step(rows, args, {sums.tallies.data(), sums.by_group()}, power);
      if (!refresh) continue;
      Cuda::unseen_sums(rows, sums.tallies.data(), sums.unseen.data());
      Cuda::fill_unseen(rows, {sums.unseen.data(), args.seed, args.state_draw});
    }
  }
}

void run(const Lists& rows) {
  const std::vector<float> scales = {0.3f, 0.0f};
  const std::vector<GapScales> gap_scales = {{0.3f, -0.2f}, {0.0f, 0.4f}};
  const auto draw = std::make_unique<int64_t>(7);
  StepScalars<double> usual = {0.9, 0.9, 0.1, 0.99, 0.01, 0.3, 0.2, 0.3, 1.1, 1e-4, 0.1, 0.5, 0.7, 0.9, 0.3, 0.0, 0.1};
  StepScalars<double> skipped = usual;
  skipped.skip = 1;
  for (const bool adaptive : {false, true}) {
    Sums sums(rows);
    const AscentArgs ascent{scales.data(), adaptive, 5, draw.get()};
    Cuda::square_sums(rows, adaptive ? kGrad : kBackup, adaptive, sums.by_group());
    Cuda::perturb(rows, ascent);
    Cuda::restore(rows);
    Cuda::momentum_ascent(rows, ascent);
    Cuda::gap_sums(rows, sums.gap.data());
    Cuda::decompose(rows, gap_scales.data());
  }
  const double length = 0.1;
  Cuda::probe(rows, &length, 3, 4);
  Sample sample = kMagnitude;
  for (const double power : {0.5, 1.0, 0.7}) {
    usual.power = skipped.power = power;
    const std::optional<double> shared = power == 0.7 ? std::nullopt : std::optional<double>(power);
    for (const bool skip : {false, true}) {
      const std::vector<StepScalars<double>> scalars = {usual, skip ? skipped : usual};
      const int64_t* noise = skip ? nullptr : draw.get();
      run_updates(rows, StepArgs{scalars.data(), 5, 6, noise, sample, skip, false, false, skip, noise}, shared);
    }
    sample = static_cast<Sample>(sample + 1);
  }
  Cuda::rademacher(rows, 3, 4);
}

}  // namespace

int main() {
  const std::vector<int64_t> sizes = {0, 1, 9, 129, 8193, 0};
  int lists = 0;
  for (const int64_t skew : {0, 1}) {
    for (int64_t dtype = 0; dtype < kDTypes; ++dtype) {
      sim::machine().order = lists++;  // every list in another order of threads
      run(Lists(sizes, {dtype}, skew));
    }
  }
  run(Lists({5, 300, 8200, 0}, {kFloat32, kFloat64, kBFloat16, kFloat16}, 0));
  ++lists;
  // Every kind of state and of correction, with codes of D that have a sign and those that have none.
  // Two warps take runs of 1100 elements, and the rest is single ones.
  const std::vector<int64_t> few = {0, 1, 1100, 45, 1100, 1100};
  for (const int64_t skew : {0, 1}) {
    for (const int64_t format : std::vector<int64_t>{1, 2, 2 | kFormatSigned}) {
      sim::machine().order = lists++;
      run(Lists(few, {kFloat32, kBFloat16}, skew, format));
    }
    for (const int64_t format : std::vector<int64_t>{4, 8, 4 | 1, 8 | 2, 4 | 2 | kFormatSigned}) {
      sim::machine().order = lists++;
      run(Lists(few, {kBFloat16, kFloat16}, skew, format));
    }
  }
  std::printf("%d lists, %d launches\n", lists, static_cast<int>(sim::machine().launches));
  return 0;
}
