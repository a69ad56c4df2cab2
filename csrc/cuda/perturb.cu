// Launchers of the ascent and the way back.
#include "perturb.cuh"

namespace sassha::cuda {

void Cuda::perturb(const DeviceRows& rows, const AscentArgs& args) {
  if (rows.has_correction()) return compact_perturb(rows, args);
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    using T = typename decltype(tag)::type;
    launch("perturb", args.adaptive ? perturb_kernel<T, true> : perturb_kernel<T, false>, chunks, kThreads, rows.queue,
           table, args);
  });
}

void Cuda::restore(const DeviceRows& rows) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("restore", restore_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table);
  });
}

void Cuda::momentum_ascent(const DeviceRows& rows, const AscentArgs& args) {
  if (rows.is_compact()) return compact_momentum_ascent(rows, args);
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    using T = typename decltype(tag)::type;
    launch("momentum_ascent", args.adaptive ? momentum_ascent_kernel<T, true> : momentum_ascent_kernel<T, false>,
           chunks, kThreads, rows.queue, table, args);
  });
}

}  // namespace sassha::cuda
