// What the Python half calls: torch's operators as operations of a stream, counters, errors.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "memory.h"

using namespace vgpu;

using PythonOperator = int (*)(uint64_t id);
static PythonOperator run_python = nullptr;

// ---- torch's operators --------------------------------------------------------------------------------------------

VGPU_API void vgpu_set_python(PythonOperator function) {
  Lock lock;
  run_python = function;
}
VGPU_API int vgpu_enqueue_python(cudaStream_t stream, uint64_t id, const char* label) {
  Lock lock;
  count("torch");
  count(std::string("torch:") + label);
  const auto run = [id] {
    Unlocked unlocked;  // it waits for Python's own lock, whose holder may wait for ours
    return run_python(id);
  };
  return enqueue(stream_of(stream), {run, std::string("torch ") + label});
}
VGPU_API int vgpu_is_capturing(cudaStream_t stream) {
  Lock lock;
  return stream_of(stream)->capture != nullptr;
}
// Where the bytes of device memory are for the host; 0, and reported, if they are not all allocated.
VGPU_API uint64_t vgpu_bytes_at(uint64_t address, uint64_t n, const char* who) {
  Lock lock;
  return reinterpret_cast<uint64_t>(bytes_at(reinterpret_cast<void*>(address), n, who));
}

// ---- control ------------------------------------------------------------------------------------------------------

VGPU_API void vgpu_set_lazy(int lazy) {
  Lock lock;
  set_lazy(lazy);
}
VGPU_API void vgpu_seed(uint64_t seed) {
  Lock lock;
  dice().seed(seed);
}
VGPU_API int vgpu_flush(cudaStream_t stream) {
  Lock lock;
  return stream_of(stream)->capture ? 0 : run_all_of(stream_of(stream));
}
VGPU_API int vgpu_flush_all() {
  Lock lock;
  return run_everything();
}
VGPU_API uint64_t vgpu_pending(cudaStream_t stream) {
  Lock lock;
  return stream_of(stream)->queued - stream_of(stream)->done;
}
VGPU_API void vgpu_watch_host_accesses() { watch_host_accesses(); }

// ---- what was seen ------------------------------------------------------------------------------------------------

VGPU_API void vgpu_report(const char* what) { report(what); }
VGPU_API void vgpu_set_tracing(int on) {
  Lock lock;
  set_tracing(on);
}
VGPU_API uint64_t vgpu_errors() {
  Lock lock;
  return errors().size();
}

namespace {
// Copies a text out if there is room for it, and returns its size.
uint64_t hand_out(const std::string& text, char* out, uint64_t room) {
  if (out && room >= text.size()) std::memcpy(out, text.data(), text.size());
  return text.size();
}
std::string joined(const std::vector<std::string>& parts, char end) {
  std::string text;
  for (const std::string& part : parts) text += part + end;
  return text;
}
}  // namespace

// Counters as lines "name <tab> value".
VGPU_API uint64_t vgpu_read_counters(char* out, uint64_t room) {
  Lock lock;
  std::string text;
  for (const auto& [name, value] : counters()) text += name + "\t" + std::to_string(value) + "\n";
  return hand_out(text, out, room);
}
VGPU_API uint64_t vgpu_read_trace(char* out, uint64_t room) {
  Lock lock;
  return hand_out(joined(trace(), '\n'), out, room);
}
// Errors, each ended by a NUL. With a buffer they are forgotten once they are read.
VGPU_API uint64_t vgpu_take_errors(char* out, uint64_t room) {
  Lock lock;
  const std::string text = joined(errors(), '\0');
  if (out && room >= text.size()) errors().clear();
  return hand_out(text, out, room);
}
// A kernel's mangled name as a person would write it.
VGPU_API uint64_t vgpu_readable(const char* mangled, char* out, uint64_t room) {
  return hand_out(readable(mangled), out, room);
}
