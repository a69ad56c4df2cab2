// The part of the runtime that captures streams and replays graphs.
#include <algorithm>

#include "api.h"

using namespace vgpu;

static Graph* graph_of(cudaGraph_t graph) { return reinterpret_cast<Graph*>(graph); }
static Graph* graph_of(cudaGraphExec_t graph) { return reinterpret_cast<Graph*>(graph); }

// ---- capture ------------------------------------------------------------------------------------------------------

VGPU_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Lock lock;
  Stream* stream = stream_of(handle);
  if (stream == default_stream()) return status(remember(cudaErrorStreamCaptureImplicit));
  if (stream->capture) return status(remember(cudaErrorIllegalState));
  static uint64_t number = 0;
  stream->capture = std::make_shared<Capture>(Capture{++number, mode, stream, pthread_self()});
  stream->last_captured = 0;
  captures().push_back(stream->capture);
  count("capture");
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock;
  Stream* stream = stream_of(handle);
  const std::shared_ptr<Capture> capture = stream->capture;
  *graph = nullptr;
  if (!capture) return status(remember(cudaErrorIllegalState));
  int error = capture->invalid ? cudaErrorStreamCaptureInvalidated : 0;
  if (capture->origin != stream) error = cudaErrorStreamCaptureUnmatched;
  for (Stream* other : streams()) {
    if (other == stream || other->capture != capture) continue;
    if (capture->clocks[stream][other] < other->last_captured) {
      error = cudaErrorStreamCaptureUnjoined;
      report("captured work of another stream that was not joined");
    }
    other->capture = nullptr;
  }
  stream->capture = nullptr;
  captures().erase(std::find(captures().begin(), captures().end(), capture));
  if (error) return status(remember(error));
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(*capture->graph));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* result) {
  Lock lock;
  *result = capture_status(stream_of(stream));
  return cudaSuccess;
}
VGPU_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* result,
                                              unsigned long long* id, cudaGraph_t* graph,
                                              const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                              size_t* n_dependencies) {
  Lock lock;
  Stream* stream = stream_of(handle);
  *result = capture_status(stream);
  if (stream->capture) {
    if (id) *id = stream->capture->id;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph.get());
  }
  static cudaGraphNode_t none;
  if (dependencies) *dependencies = &none;
  if (edges) *edges = nullptr;
  if (n_dependencies) *n_dependencies = 0;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*,
                                                         size_t, unsigned) {
  return cudaSuccess;
}
VGPU_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const int before = capture_mode_of_thread();
  capture_mode_of_thread() = *mode;
  *mode = static_cast<cudaStreamCaptureMode>(before);
  return cudaSuccess;
}

// ---- graphs: lists of operations in the order of their capture ----------------------------------------------------

VGPU_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  Lock lock;
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*graph_of(graph)));
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                   unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
VGPU_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n) {
  Lock lock;
  const size_t size = graph_of(graph)->operations.size();
  for (size_t i = 0; nodes && i < std::min(size, *n); ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(i + 1);
  *n = size;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Lock lock;
  const Graph& graph = *graph_of(executable);
  count("graph_launch");
  count("graph_nodes", graph.operations.size());
  for (const Operation& operation : graph.operations) {
    if (const int error = enqueue(stream_of(stream), operation)) return status(error);
  }
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  Lock lock;
  delete graph_of(executable);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Lock lock;
  delete graph_of(graph);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = reinterpret_cast<cudaUserObject_t>(8);
  return cudaSuccess;
}
VGPU_API cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
VGPU_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}
