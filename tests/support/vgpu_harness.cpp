// The executor of the virtual GPU without a CUDA runtime around it, for test_vgpu.py.
#include <cstdint>
#include <cstring>
#include <string>

#include "executor.h"
#include "log.h"
#include "memory.h"

using namespace vgpu;

extern "C" {

uint64_t harness_allocate(uint64_t n) { return reinterpret_cast<uint64_t>(allocate_device(n)); }
void harness_free(uint64_t address) { free_device(reinterpret_cast<void*>(address)); }
void harness_write(uint64_t address, const void* from, uint64_t n) {
  std::memcpy(reinterpret_cast<void*>(address + kShadow), from, n);
}
void harness_read(uint64_t address, void* to, uint64_t n) {
  std::memcpy(to, reinterpret_cast<void*>(address + kShadow), n);
}
void harness_watch() { watch_host_accesses(); }
void harness_seed(uint64_t seed) { dice().seed(seed); }
uint64_t harness_count(const char* name) { return counters()[name]; }

int harness_launch(const char* shared_object, const char* name, uint32_t blocks, uint32_t threads,
                   const uint8_t* params) {
  const Kernel* kernel = load_kernel(shared_object, name);
  return kernel ? execute(*kernel, {blocks, 1, 1}, {threads, 1, 1}, params, 0) : -1;
}

// The last error; the text is good until the next call.
const char* harness_take_error() {
  static std::string text;
  text = errors().empty() ? "" : errors().back();
  errors().clear();
  return text.c_str();
}
}
