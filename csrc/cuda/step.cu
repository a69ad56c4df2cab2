// Launchers of the update.
#include "step.cuh"

namespace sassha::cuda {
namespace {

template <Power kPower>
struct PowerTag {
  static constexpr Power value = kPower;
};

template <typename F>
void with_power(std::optional<double> power, const F& f) {
  if (power == 0.5) return f(PowerTag<Power::kHalf>{});
  if (power == 1.0) return f(PowerTag<Power::kOne>{});
  f(PowerTag<Power::kGeneral>{});
}

template <bool kInState>
void launch_step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power, PartialSum* squares) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    with_power(power, [&](auto p) {
      launch("step", step_kernel<T, decltype(p)::value, kInState>, chunks, kThreads, rows.queue, table, args,
             kInState ? squares + first : nullptr);
    });
  });
}

template <bool kInState>
void launch_refresh_step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power, Tally* partials,
                         PartialSum* squares) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    with_power(power, [&](auto p) {
      launch("refresh_step", refresh_step_kernel<T, decltype(p)::value, kInState>, chunks, kThreads, rows.queue, table,
             args, partials + first, kInState ? squares + first : nullptr);
    });
  });
}

}  // namespace

// One block for each row.
static __global__ void __launch_bounds__(kThreads)
    finish_tallies_kernel(const Span* spans, const Tally* partials, Tally* tallies) {
  const Span span = spans[blockIdx.x];
  double sums[3] = {0, 0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < span.count; i += kThreads) {
    const Tally partial = partials[span.first + i];
    sums[0] += partial.trace;
    sums[1] += partial.negative;
    sums[2] += partial.seen;
  }
  block_sum(sums);
  if (threadIdx.x == 0) tallies[blockIdx.x] = {sums[0], sums[1], sums[2]};
}

void Cuda::step(const DeviceRows& rows, const StepArgs& args, const StepSums& sums, std::optional<double> power) {
  Tally* tallies = args.refresh ? rows.of_every_chunk<Tally>() : nullptr;
  PartialSum* squares = args.in_state ? rows.of_every_chunk<PartialSum>() : nullptr;
  if (args.refresh) {
    const auto launcher = args.in_state ? launch_refresh_step<true> : launch_refresh_step<false>;
    rows.is_compact() ? compact_refresh_step(rows, args, tallies, squares)
                      : launcher(rows, args, power, tallies, squares);
    launch("refresh_step", finish_tallies_kernel, rows.size, kThreads, rows.queue, rows.spans(),
           static_cast<const Tally*>(tallies), sums.tallies);
  } else {
    const auto launcher = args.in_state ? launch_step<true> : launch_step<false>;
    rows.is_compact() ? compact_step(rows, args, squares) : launcher(rows, args, power, squares);
  }
  if (args.in_state) finish_sums(rows, squares, sums.squares);
}

}  // namespace sassha::cuda
