// Launchers of the signs and the probe.
#include "probe.cuh"

namespace sassha::cuda {

void Cuda::rademacher(const DeviceRows& rows, uint64_t seed, uint32_t draw) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("rademacher", rademacher_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table, seed,
           draw);
  });
}

void Cuda::probe(const DeviceRows& rows, const double* h, uint64_t seed, uint32_t draw) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("probe", probe_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table, h, seed, draw);
  });
}

}  // namespace sassha::cuda
