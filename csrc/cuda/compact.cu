// Launchers of the passes over rows whose state or weights are stored in fewer bits.
#include "compact.cuh"

namespace sassha::cuda {
namespace {

// Calls f(Stored<...>{}) with what rows of a dtype and of a format are stored as. Formats without fewer bits, and
// those that the dtype has not, never come here.
template <typename T, State kState, typename F>
void with_correction(int64_t format, const F& f) {
  if constexpr (sizeof(T) == 2) {
    if (correction_of(format) == Correction::k8) return f(Stored<T, kState, Correction::k8>{});
    if (correction_of(format) == Correction::k16) return f(Stored<T, kState, Correction::k16>{});
  }
  if constexpr (kState != State::kFull) f(Stored<T, kState, Correction::kNone>{});
}

template <typename T, typename F>
void with_stored(int64_t format, const F& f) {
  if constexpr (sizeof(T) != 8) {
    if (state_of(format) == State::k8) return with_correction<T, State::k8>(format, f);
    if (state_of(format) == State::k16) return with_correction<T, State::k16>(format, f);
    with_correction<T, State::kFull>(format, f);
  }
}

// The same for passes that take D alone.
template <typename T, typename F>
void with_curvature(int64_t format, const F& f) {
  if constexpr (sizeof(T) != 8) {
    if (state_of(format) == State::k8) return f(Stored<T, State::k8, Correction::kNone>{});
    f(Stored<T, State::k16, Correction::kNone>{});
  }
}

}  // namespace

void compact_perturb(const DeviceRows& rows, const AscentArgs& args) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    with_correction<typename decltype(tag)::type, State::kFull>(rows.format, [&](auto stored) {
      launch("perturb", compact_perturb_kernel<decltype(stored)>, chunks, kThreads, rows.queue, table, args);
    });
  });
}

void compact_momentum_ascent(const DeviceRows& rows, const AscentArgs& args) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    with_stored<typename decltype(tag)::type>(rows.format, [&](auto stored) {
      launch("momentum_ascent", compact_momentum_ascent_kernel<decltype(stored)>, chunks, kThreads, rows.queue, table,
             args);
    });
  });
}

void compact_step(const DeviceRows& rows, const StepArgs& args, PartialSum* squares) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    with_stored<typename decltype(tag)::type>(rows.format, [&](auto stored) {
      launch("step", compact_step_kernel<decltype(stored)>, chunks, kThreads, rows.queue, table, args,
             args.in_state ? squares + first : nullptr);
    });
  });
}

void compact_refresh_step(const DeviceRows& rows, const StepArgs& args, Tally* partials, PartialSum* squares) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    with_stored<typename decltype(tag)::type>(rows.format, [&](auto stored) {
      launch("refresh_step", compact_refresh_step_kernel<decltype(stored)>, chunks, kThreads, rows.queue, table, args,
             partials + first, args.in_state ? squares + first : nullptr);
    });
  });
}

void compact_unseen_sums(const DeviceRows& rows, const Tally* tallies, Unseen* partials) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    with_curvature<typename decltype(tag)::type>(rows.format, [&](auto stored) {
      launch("unseen_sums", compact_unseen_sums_kernel<decltype(stored)>, chunks, kThreads, rows.queue, table, tallies,
             partials + first);
    });
  });
}

void compact_fill_unseen(const DeviceRows& rows, const FillArgs& args) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    with_curvature<typename decltype(tag)::type>(rows.format, [&](auto stored) {
      launch("fill_unseen", compact_fill_unseen_kernel<decltype(stored)>, chunks, kThreads, rows.queue, table, args);
    });
  });
}

}  // namespace sassha::cuda
