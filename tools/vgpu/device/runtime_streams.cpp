// The part of the runtime about streams and events.
#include <algorithm>

#include "api.h"

using namespace vgpu;

// Whoever polls without waiting would poll for ever if nothing ran: after so many questions the work is done.
static constexpr uint64_t kStreamQueries = 1000, kEventQueries = 200;

// ---- streams ------------------------------------------------------------------------------------------------------

static cudaError_t create(cudaStream_t* handle, unsigned flags, int priority) {
  Lock lock;
  *handle = reinterpret_cast<cudaStream_t>(new_stream(flags, priority));
  return cudaSuccess;
}
VGPU_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream, 0, 0); }
VGPU_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create(stream, flags, 0);
}
VGPU_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create(stream, flags, priority);
}
VGPU_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock;
  run_all_of(stream_of(stream));
  return cudaSuccess;
}
VGPU_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Lock lock;
  Stream* stream = stream_of(handle);
  count("sync:stream");
  if (const int error = forbidden_on_captured(stream, "cudaStreamSynchronize")) return status(error);
  if (const int error = forbidden_in_capture("cudaStreamSynchronize")) return status(error);
  return status(remember(run_all_of(stream)));
}
VGPU_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock;
  Stream* stream = stream_of(handle);
  if (const int error = forbidden_on_captured(stream, "cudaStreamQuery")) return status(error);
  if (const int error = forbidden_in_capture("cudaStreamQuery")) return status(error);
  static uint64_t queries = 0;
  if (stream->done < stream->queued && ++queries % kStreamQueries == 0) run_all_of(stream);
  return stream->done < stream->queued ? cudaErrorNotReady : cudaSuccess;
}

// ---- events -------------------------------------------------------------------------------------------------------

VGPU_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{flags});
  return cudaSuccess;
}
VGPU_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
VGPU_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock;
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  Lock lock;
  Event* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  event->queries = 0;
  event->stream = stream;
  event->capture = stream->capture;
  if (stream->capture) {
    event->clock = stream->capture->clocks[stream];
  } else {
    event->ticket = stream->queued;
  }
  note("record s" + std::to_string(stream->id));
  return cudaSuccess;
}
VGPU_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
VGPU_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Lock lock;
  Event* event = reinterpret_cast<Event*>(handle);
  count("event_query");
  if (event->capture) {
    report("query of an event that was recorded in a capture");
    return status(remember(cudaErrorCapturedEvent));
  }
  if (const int error = forbidden_in_capture("cudaEventQuery")) return status(error);
  Stream* stream = event->stream;
  if (stream == nullptr) return cudaSuccess;
  if (stream->done < event->ticket && ++event->queries > kEventQueries) run_until(stream, event->ticket);
  return stream->done >= event->ticket ? cudaSuccess : cudaErrorNotReady;
}
VGPU_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock;
  const Event* event = reinterpret_cast<Event*>(handle);
  count("sync:event");
  if (event->capture) {
    report("wait of the host for an event that was recorded in a capture");
    return status(remember(cudaErrorCapturedEvent));
  }
  if (const int error = forbidden_in_capture("cudaEventSynchronize")) return status(error);
  return status(event->stream ? remember(run_until(event->stream, event->ticket)) : 0);
}
VGPU_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;  // there is no time here
  return cudaSuccess;
}

// A stream that waits for a captured event becomes part of its capture.
static int join_capture(Stream* stream, const Event& event) {
  if (stream->capture && stream->capture != event.capture) {
    report("a captured stream waits for an event of another capture");
    return remember(cudaErrorStreamCaptureMerge);
  }
  if (!stream->capture) {
    stream->capture = event.capture;
    stream->last_captured = 0;
  }
  Clock& clock = event.capture->clocks[stream];
  for (const auto& [other, position] : event.clock) clock[other] = std::max(clock[other], position);
  return 0;
}

VGPU_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  Lock lock;
  const Event& event = *reinterpret_cast<Event*>(event_handle);
  Stream* stream = stream_of(handle);
  if (event.stream == nullptr) return cudaSuccess;
  const std::string other = "s" + std::to_string(event.stream->id);
  note("wait s" + std::to_string(stream->id) + " for " + other);
  if (event.capture) return status(join_capture(stream, event));
  if (stream->capture) {
    stream->capture->invalid = true;
    report("a captured stream waits for an event that is not captured");
    return status(remember(cudaErrorStreamCaptureIsolation));
  }
  const auto run = [from = event.stream, ticket = event.ticket] { return run_until(from, ticket); };
  return status(enqueue(stream, {run, "wait " + other}));
}
