// Streams as queues of operations that run when somebody waits for them, and what is captured from them.
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace vgpu {

// Work of a stream; returns a cudaError_t.
struct Operation {
  std::function<int()> run;
  std::string label;
};

struct Capture;

struct Stream {
  uint64_t id;
  unsigned flags;
  int priority = 0;
  std::deque<Operation> queue = {};
  uint64_t queued = 0, done = 0;  // operations since the stream was made
  bool busy = false;              // one of them runs,
  pthread_t runner = {};          // in this thread
  std::shared_ptr<Capture> capture = nullptr;
  uint64_t last_captured = 0;  // position in the graph of its last operation
};

struct Graph {
  std::vector<Operation> operations;
};

// How far every stream's captured work is known to be finished: position in the graph, by stream.
using Clock = std::map<Stream*, uint64_t>;

struct Capture {
  uint64_t id;
  int mode;
  Stream* origin;
  pthread_t thread;
  bool invalid = false;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::map<Stream*, Clock> clocks = {};
};

struct Event {
  unsigned flags;
  Stream* stream = nullptr;  // null until it is recorded
  uint64_t ticket = 0;       // operations of the stream that come before it
  std::shared_ptr<Capture> capture = nullptr;
  Clock clock = {};
  uint64_t queries = 0;
};

// ---- streams ------------------------------------------------------------------------------------------------------

Stream* default_stream();
std::set<Stream*>& streams();
Stream* new_stream(unsigned flags, int priority);
Stream* stream_of(cudaStream_t handle);

// Adds an operation to a stream, or to the graph that is captured from it.
int enqueue(Stream* stream, Operation operation);

// Runs a stream until so many of its operations are done; returns the last error.
int run_until(Stream* stream, uint64_t count);
inline int run_all_of(Stream* stream) { return run_until(stream, stream->queued); }
int run_everything();

// Whether operations wait for somebody who needs them (VGPU_POLICY=lazy, the default) or run at once (eager).
void set_lazy(bool lazy);

// Remembers an error for cudaGetLastError and returns it.
int remember(int error);
int& last_error();
inline cudaError_t status(int error) { return static_cast<cudaError_t>(error); }

// ---- captures -----------------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<Capture>>& captures();
int& capture_mode_of_thread();

// An error if this call is not allowed while any stream is captured; the capture is invalid then.
int forbidden_in_capture(const char* what);
// An error if this call is not allowed on a stream that is captured.
int forbidden_on_captured(Stream* stream, const char* what);
cudaStreamCaptureStatus capture_status(const Stream* stream);

}  // namespace vgpu
