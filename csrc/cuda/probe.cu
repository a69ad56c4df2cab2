// Launchers of the signs and the probe.
#include "probe.cuh"

namespace sassha::cuda {

void rademacher(const DeviceRows& rows, uint64_t seed, uint32_t draw, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("rademacher", rademacher_kernel<typename decltype(tag)::type>, chunks, kThreads, queue, table, seed, draw);
  });
}

void probe(const DeviceRows& rows, double h, uint64_t seed, uint32_t draw, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("probe", probe_kernel<typename decltype(tag)::type>, chunks, kThreads, queue, table, h, seed, draw);
  });
}

}  // namespace sassha::cuda
