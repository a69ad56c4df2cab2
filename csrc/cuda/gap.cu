// Launchers of the surrogate gap.
#include "gap.cuh"

namespace sassha::cuda {

void gap_sums(const DeviceRows& rows, GapSums* partials, GapSums* total, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    launch("gap_sums", gap_sums_kernel<typename decltype(tag)::type>, chunks, kThreads, queue, table, partials + first);
  });
  launch("gap_sums", finish_gap_kernel, 1, kThreads, queue, static_cast<const GapSums*>(partials), rows.n_chunks(),
         total);
}

void decompose(const DeviceRows& rows, const GapScales* scales, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("decompose", decompose_kernel<typename decltype(tag)::type>, chunks, kThreads, queue, table, scales);
  });
}

}  // namespace sassha::cuda
