// Launchers of what a refresh did not see.
#include "unseen.cuh"

namespace sassha::cuda {

void Cuda::unseen_sums(const DeviceRows& rows, const Tally* tallies, Unseen* sums) {
  Unseen* partials = rows.of_every_chunk<Unseen>();
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
    launch("unseen_sums", unseen_sums_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table,
           tallies, partials + first);
  });
  launch("unseen_sums", finish_unseen_kernel, rows.size, kThreads, rows.queue, rows.spans(),
         static_cast<const Unseen*>(partials), sums);
}

void Cuda::fill_unseen(const DeviceRows& rows, const FillArgs& args) {
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("fill_unseen", fill_unseen_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table,
           args.sums);
  });
}

}  // namespace sassha::cuda
