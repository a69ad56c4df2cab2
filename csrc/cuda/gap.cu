// Launchers of the surrogate gap.
#include "gap.cuh"

namespace sassha::cuda {

void Cuda::gap_sums(const DeviceRows& rows, GapSums* total) {
  GapSums* partials = rows.of_every_chunk<GapSums>();
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    launch("gap_sums", gap_sums_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table,
           partials + first);
  });
  launch("gap_sums", finish_gap_kernel, 1, kThreads, rows.queue, static_cast<const GapSums*>(partials), rows.n_chunks(),
         total);
}

void Cuda::decompose(const DeviceRows& rows, const GapScales* scales) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("decompose", decompose_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table, scales);
  });
}

}  // namespace sassha::cuda
