// Launchers of the norm pass.
#include "norm.cuh"

namespace sassha::cuda {

void square_sums(const DeviceRows& rows, bool adaptive, int64_t n_groups, PartialSum* partials, double* sums,
                 Queue queue) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    using T = typename decltype(tag)::type;
    launch("square_sums", adaptive ? square_sum_kernel<T, true> : square_sum_kernel<T, false>, chunks, kThreads, queue,
           table, partials + first);
  });
  launch("square_sums", finish_sums_kernel, n_groups, kThreads, queue, static_cast<const PartialSum*>(partials),
         rows.n_chunks(), sums);
}

}  // namespace sassha::cuda
