#include "kernels.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <unordered_map>

#include "lock.h"
#include "log.h"
#include "queue.h"

namespace vgpu {
namespace {

std::unordered_map<const void*, std::string>& functions() {
  static std::unordered_map<const void*, std::string> it;
  return it;
}

// Shared objects by the mangled name of their kernel. VGPU_KERNELS is a file with a name and a path in every line.
std::unordered_map<std::string, std::string> read_index() {
  std::unordered_map<std::string, std::string> index;
  const char* file = std::getenv("VGPU_KERNELS");
  if (file == nullptr) return index;
  std::ifstream lines(file);
  if (!lines) report(std::string("VGPU_KERNELS is ") + file + ", which can't be read");
  std::string name, path;
  while (std::getline(lines, name, '\t') && std::getline(lines, path)) index[name] = path;
  return index;
}

const Kernel* find_kernel(const std::string& name) {
  static const auto index = read_index();
  const auto found = index.find(name);
  return found == index.end() ? nullptr : load_kernel(found->second, name);
}

bool is_valid(Size grid, Size block) {
  return grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 &&
         block.total() > 0 && block.total() <= 1024;
}

}  // namespace

void register_function(const void* function, const char* name) {
  Lock lock;
  functions()[function] = name;
}

int launch_kernel(const Kernel& kernel, Size grid, Size block, void** arguments, size_t dynamic_shared,
                  cudaStream_t stream) {
  Lock lock;
  if (!is_valid(grid, block)) {
    report("kernel " + kernel.readable + ": invalid launch of " + std::to_string(grid.total()) + " blocks with " +
           std::to_string(block.total()) + " threads each");
    return remember(cudaErrorInvalidConfiguration);
  }
  const Info& info = kernel.info;
  auto params = std::make_shared<std::vector<uint8_t>>(info.param_bytes + 16);
  for (uint32_t i = 0; i < info.n_params; ++i) {
    std::memcpy(params->data() + info.param_offsets[i], arguments[i], info.param_sizes[i]);
  }
  count("launch");
  count("launch:" + kernel.name);
  const auto run = [&kernel, grid, block, params, dynamic_shared]() -> int {
    return execute(kernel, grid, block, params->data(), dynamic_shared);
  };
  return enqueue(stream_of(stream), {run, "kernel " + kernel.name + " grid " + std::to_string(grid.x)});
}

int launch_function(const void* function, dim3 grid, dim3 block, void** arguments, size_t dynamic_shared,
                    cudaStream_t stream) {
  Lock lock;
  static std::unordered_map<const void*, const Kernel*> known;
  const Kernel*& kernel = known[function];
  if (kernel == nullptr) {
    const auto found = functions().find(function);
    const std::string name = found == functions().end() ? "a function that was never registered" : found->second;
    if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep: there is no time here
      count("launch:spin");
      return enqueue(stream_of(stream), {[] { return 0; }, "spin"});
    }
    kernel = find_kernel(name);
    if (kernel == nullptr) {
      count("foreign_launch");
      report("launch of a kernel that the virtual GPU does not have: " + readable(name));
      return remember(cudaErrorInvalidDeviceFunction);
    }
  }
  return launch_kernel(*kernel, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, arguments, dynamic_shared,
                       stream);
}

}  // namespace vgpu
