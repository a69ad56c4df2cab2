// Launchers of the ascent and the way back.
#include "perturb.cuh"

namespace sassha::cuda {

void perturb(const DeviceRows& rows, bool adaptive, const AscentArgs& args, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    using T = typename decltype(tag)::type;
    launch("perturb", adaptive ? perturb_kernel<T, true> : perturb_kernel<T, false>, chunks, kThreads, queue, table,
           args);
  });
}

void restore(const DeviceRows& rows, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("restore", restore_kernel<typename decltype(tag)::type>, chunks, kThreads, queue, table);
  });
}

void momentum_ascent(const DeviceRows& rows, bool adaptive, const AscentArgs& args, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    using T = typename decltype(tag)::type;
    launch("momentum_ascent", adaptive ? momentum_ascent_kernel<T, true> : momentum_ascent_kernel<T, false>, chunks,
           kThreads, queue, table, args);
  });
}

}  // namespace sassha::cuda
