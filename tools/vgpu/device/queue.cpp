#include "queue.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>

#include "lock.h"
#include "log.h"

namespace vgpu {
namespace {

constexpr size_t kLongest = 200000;  // operations of a queue that nobody waits for

bool& lazy() {
  static const char* policy = std::getenv("VGPU_POLICY");
  static bool it = policy == nullptr || std::string(policy) != "eager";
  return it;
}

std::string name_of(const Stream* stream) { return "s" + std::to_string(stream->id); }

bool blocks_default_stream(const Stream* stream) { return !(stream->flags & cudaStreamNonBlocking); }

void push(Stream* stream, Operation operation) {
  stream->queue.push_back(std::move(operation));
  ++stream->queued;
}

// Work of the default stream comes after that of all blocking streams, and theirs after its.
void push_implicit_waits(Stream* stream) {
  const auto wait_for = [&](Stream* other) {
    if (other->queued == other->done) return;
    push(stream, {[other, ticket = other->queued] { return run_until(other, ticket); }, "implicit"});
  };
  if (stream != default_stream()) {
    if (blocks_default_stream(stream)) wait_for(default_stream());
    return;
  }
  for (Stream* other : streams()) {
    if (other != stream && blocks_default_stream(other)) wait_for(other);
  }
}

}  // namespace

Stream* default_stream() {
  static Stream it{0, 0};
  return &it;
}

std::set<Stream*>& streams() {
  static std::set<Stream*> it{default_stream()};
  return it;
}

Stream* new_stream(unsigned flags, int priority) {
  auto* stream = new Stream{streams().size(), flags, priority};  // never destroyed: handles may be used late
  streams().insert(stream);
  return stream;
}

Stream* stream_of(cudaStream_t handle) {
  // 0, cudaStreamLegacy and cudaStreamPerThread.
  return reinterpret_cast<uint64_t>(handle) <= 2 ? default_stream() : reinterpret_cast<Stream*>(handle);
}

int run_until(Stream* stream, uint64_t count) {
  int error = 0;
  while (stream->done < count) {
    // An operation may queue others: Python's garbage collector frees a tensor while it runs. They come after it.
    if (stream->busy && pthread_equal(stream->runner, pthread_self())) return error;
    if (stream->busy || stream->queue.empty()) {  // another thread runs it
      Unlocked unlocked;
      sched_yield();
      continue;
    }
    const Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    stream->runner = pthread_self();
    const int failed = operation.run();
    stream->busy = false;
    ++stream->done;
    note("exec " + name_of(stream) + " " + operation.label);
    if (failed) error = remember(failed);
  }
  return error;
}

int enqueue(Stream* stream, Operation operation) {
  note("queue " + name_of(stream) + (stream->capture ? " capture " : " ") + operation.label);
  if (Capture* capture = stream->capture.get()) {
    if (capture->invalid) return remember(cudaErrorStreamCaptureInvalidated);
    capture->graph->operations.push_back(std::move(operation));
    stream->last_captured = capture->graph->operations.size();
    capture->clocks[stream][stream] = stream->last_captured;
    return 0;
  }
  push_implicit_waits(stream);
  push(stream, std::move(operation));
  return lazy() && stream->queue.size() <= kLongest ? 0 : run_all_of(stream);
}

int run_everything() {
  std::vector<Stream*> order(streams().begin(), streams().end());
  std::shuffle(order.begin(), order.end(), dice());
  int error = 0;
  for (Stream* stream : order) {
    if (const int failed = run_all_of(stream)) error = failed;
  }
  return error;
}

void set_lazy(bool value) {
  run_everything();
  lazy() = value;
}

int& last_error() {
  static int it = 0;
  return it;
}

int remember(int error) {
  if (error) last_error() = error;
  return error;
}

// ---- captures -----------------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<Capture>>& captures() {
  static std::vector<std::shared_ptr<Capture>> it;
  return it;
}

int& capture_mode_of_thread() {
  static thread_local int it = cudaStreamCaptureModeGlobal;
  return it;
}

static int violated(Capture& capture, const std::string& what, const char* where) {
  capture.invalid = true;
  count("capture_violation:" + what);
  report(what + where);
  return remember(cudaErrorStreamCaptureUnsupported);
}

// The rules of cudaThreadExchangeStreamCaptureMode.
static bool is_prohibited_by(const Capture& capture) {
  const bool mine = capture.thread == pthread_self();
  switch (capture_mode_of_thread()) {
    case cudaStreamCaptureModeRelaxed:
      return false;
    case cudaStreamCaptureModeThreadLocal:
      return mine && capture.mode != cudaStreamCaptureModeRelaxed;
    default:
      return mine ? capture.mode != cudaStreamCaptureModeRelaxed : capture.mode == cudaStreamCaptureModeGlobal;
  }
}

int forbidden_in_capture(const char* what) {
  for (auto& capture : captures()) {
    if (is_prohibited_by(*capture)) return violated(*capture, what, " while a stream is captured");
  }
  return 0;
}

int forbidden_on_captured(Stream* stream, const char* what) {
  return stream->capture ? violated(*stream->capture, what, " on a stream that is captured") : 0;
}

cudaStreamCaptureStatus capture_status(const Stream* stream) {
  if (!stream->capture) return cudaStreamCaptureStatusNone;
  return stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

}  // namespace vgpu
