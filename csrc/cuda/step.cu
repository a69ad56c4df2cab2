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

}  // namespace

void step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    using T = typename decltype(tag)::type;
    with_power(power, [&](auto p) {
      launch("step", step_kernel<T, decltype(p)::value>, chunks, kThreads, queue, table, args);
    });
  });
}

void refresh_step(const DeviceRows& rows, const StepArgs& args, std::optional<double> power, Tally* partials,
                  Tally* tallies, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    with_power(power, [&](auto p) {
      launch("refresh_step", refresh_step_kernel<T, decltype(p)::value>, chunks, kThreads, queue, table, args,
             partials + first);
    });
  });
  launch("refresh_step", finish_tallies_kernel, rows.size, kThreads, queue, rows.spans(),
         static_cast<const Tally*>(partials), tallies);
}

}  // namespace sassha::cuda
