// Launchers of what a refresh did not see.
#include "unseen.cuh"

namespace sassha::cuda {

// One block for each row.
static __global__ void __launch_bounds__(kThreads)
    finish_unseen_kernel(const Span* spans, const Unseen* partials, Unseen* totals) {
  const Span span = spans[blockIdx.x];
  double sums[kUnseenWords] = {0, 0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < span.count; i += kThreads) {
    const Unseen partial = partials[span.first + i];
    sums[0] += partial.elements;
    sums[1] += partial.known;
    sums[2] += partial.curvature;
  }
  block_sum(sums);
  if (threadIdx.x == 0) totals[blockIdx.x] = {sums[0], sums[1], sums[2]};
}

void Cuda::unseen_sums(const DeviceRows& rows, const Tally* tallies, Unseen* sums) {
  Unseen* partials = rows.of_every_chunk<Unseen>();
  if (rows.has_compact_state()) {
    compact_unseen_sums(rows, tallies, partials);
  } else {
    rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t first) {
      launch("unseen_sums", unseen_sums_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table,
             tallies, partials + first);
    });
  }
  launch("unseen_sums", finish_unseen_kernel, rows.size, kThreads, rows.queue, rows.spans(),
         static_cast<const Unseen*>(partials), sums);
}

void Cuda::fill_unseen(const DeviceRows& rows, const FillArgs& args) {
  if (rows.has_compact_state()) return compact_fill_unseen(rows, args);
  rows.for_each_dtype([&](auto tag, const Table& table, int64_t chunks, int64_t) {
    launch("fill_unseen", fill_unseen_kernel<typename decltype(tag)::type>, chunks, kThreads, rows.queue, table,
           args.sums);
  });
}

}  // namespace sassha::cuda
