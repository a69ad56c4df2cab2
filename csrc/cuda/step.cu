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

template <bool kApart>
void launch_step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power, PartialSum* squares,
                 Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    with_power(power, [&](auto p) {
      launch("step", step_kernel<T, decltype(p)::value, kApart>, chunks, kThreads, queue, table, args,
             kApart ? squares + first : nullptr);
    });
  });
}

template <bool kApart>
void launch_refresh_step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power, Tally* partials,
                         PartialSum* squares, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    with_power(power, [&](auto p) {
      launch("refresh_step", refresh_step_kernel<T, decltype(p)::value, kApart>, chunks, kThreads, queue, table, args,
             partials + first, kApart ? squares + first : nullptr);
    });
  });
}

}  // namespace

void step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power,
          const std::optional<Tallies>& tallies, const std::optional<GroupSums>& squares, Queue queue) {
  PartialSum* const partial_squares = squares ? squares->partials : nullptr;
  if (tallies) {
    const auto launcher = squares ? launch_refresh_step<true> : launch_refresh_step<false>;
    launcher(rows, args, power, tallies->partials, partial_squares, queue);
    launch("refresh_step", finish_tallies_kernel, rows.size, kThreads, queue, rows.spans(),
           static_cast<const Tally*>(tallies->partials), tallies->totals);
  } else {
    const auto launcher = squares ? launch_step<true> : launch_step<false>;
    launcher(rows, args, power, partial_squares, queue);
  }
  if (squares) finish_sums(rows, *squares, queue);
}

}  // namespace sassha::cuda
