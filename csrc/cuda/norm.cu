// Launchers of the norm pass.
#include "norm.cuh"

namespace sassha::cuda {

void square_sums(const DeviceRows& rows, bool adaptive, const GroupSums& sums, Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    launch("square_sums", adaptive ? square_sum_kernel<T, true> : square_sum_kernel<T, false>, chunks, kThreads, queue,
           table, sums.partials + first);
  });
  finish_sums(rows, sums, queue);
}

void finish_sums(const DeviceRows& rows, const GroupSums& sums, Queue queue) {
  launch("finish_sums", finish_sums_kernel, sums.n_groups, kThreads, queue,
         static_cast<const PartialSum*>(sums.partials), rows.n_chunks(), sums.totals);
}

}  // namespace sassha::cuda
