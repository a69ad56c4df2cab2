// Launchers of the norm pass.
#include "norm.cuh"

namespace sassha::cuda {

void Cuda::square_sums(const DeviceRows& rows, int64_t column, bool adaptive, const GroupSums& sums) {
  PartialSum* partials = rows.of_every_chunk<PartialSum>();
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    launch("square_sums", adaptive ? square_sum_kernel<T, true> : square_sum_kernel<T, false>, chunks, kThreads,
           rows.queue, table, static_cast<int>(column), partials + first);
  });
  finish_sums(rows, partials, sums);
}

void finish_sums(const DeviceRows& rows, const PartialSum* partials, const GroupSums& sums) {
  launch("finish_sums", finish_sums_kernel, sums.n_groups, kThreads, rows.queue, partials, rows.n_chunks(),
         sums.totals);
}

}  // namespace sassha::cuda
