#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "log.h"

namespace vgpu {
namespace {

constexpr size_t kMostAllocations = 1 << 24;
constexpr uint8_t kNew = 0xFF, kOld = 0xFE, kNewPinned = 0xFD;  // bytes that nobody wrote

// All device allocations since the beginning, in the order of their addresses, as none is used twice. A plain array
// that never moves, so that a signal handler may search it.
struct Table {
  Allocation* entries;
  size_t size = 0;
  uint64_t next = kDeviceBase;  // the first address that was never used
  uint64_t live_bytes = 0;
};
Table table;

void* map(uint64_t address, uint64_t size, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address ? MAP_FIXED_NOREPLACE : 0);
  void* found = mmap(reinterpret_cast<void*>(address), size, protection, flags, -1, 0);
  if (found == MAP_FAILED || (address && found != reinterpret_cast<void*>(address))) {
    std::fprintf(stderr, "VGPU: no room for device memory at 0x%llx\n", static_cast<unsigned long long>(address));
    std::abort();
  }
  return found;
}

void map_once() {
  if (table.entries != nullptr) return;
  map(kDeviceBase, kDeviceSize, PROT_NONE);
  map(kDeviceBase + kShadow, kDeviceSize, PROT_READ | PROT_WRITE);
  table.entries = static_cast<Allocation*>(map(0, kMostAllocations * sizeof(Allocation), PROT_READ | PROT_WRITE));
}

std::map<uint64_t, Allocation>& pinned() {
  static std::map<uint64_t, Allocation> it;
  return it;
}

uint8_t* shadow(uint64_t address) { return reinterpret_cast<uint8_t*>(address + kShadow); }

}  // namespace

bool is_device(const void* address) {
  const uint64_t a = reinterpret_cast<uint64_t>(address);
  return a >= kDeviceBase && a < kDeviceBase + kDeviceSize;
}

bool is_pinned(const void* address) { return find_pinned(reinterpret_cast<uint64_t>(address)) != nullptr; }

void* allocate_device(size_t n) {
  map_once();
  const uint64_t base = (table.next + kSpacing - 1) / kSpacing * kSpacing;
  if (n > kCapacity || table.live_bytes + n > kCapacity) return nullptr;
  if (base + n + kSpacing > kDeviceBase + kDeviceSize || table.size == kMostAllocations) {
    report("no device addresses are left; they are never used twice");
    return nullptr;
  }
  table.next = base + n + kSpacing;
  table.entries[table.size] = {base, n, table.size + 1, false};
  ++table.size;
  table.live_bytes += n;
  std::memset(shadow(base), kNew, n);
  return reinterpret_cast<void*>(base);
}

void free_device(void* address) {
  const uint64_t base = reinterpret_cast<uint64_t>(address);
  auto* found = const_cast<Allocation*>(allocation_below(base));
  if (found == nullptr || found->base != base || found->freed) {
    report("free of device address " + hexadecimal(base) + ", " + describe(base, 0) + ": not what was allocated");
    return;
  }
  found->freed = true;
  table.live_bytes -= found->size;
  // Whole pages go back to the system, the rest gets another pattern.
  const uint64_t end = base + found->size, first_page = (base + 4095) & ~4095ull, end_page = end & ~4095ull;
  std::memset(shadow(base), kOld, std::min(end, first_page) - base);
  if (end_page > first_page) madvise(shadow(first_page), end_page - first_page, MADV_DONTNEED);
}

uint64_t allocated_bytes() { return table.live_bytes; }

const Allocation* allocation_below(uint64_t address) {
  const Allocation *begin = table.entries, *end = table.entries + table.size;
  const Allocation* above =
      std::upper_bound(begin, end, address, [](uint64_t a, const Allocation& entry) { return a < entry.base; });
  return above == begin ? nullptr : above - 1;
}

const Allocation* find_device(uint64_t address) {
  const Allocation* found = allocation_below(address);
  return found && !found->freed && address < found->base + found->size ? found : nullptr;
}

const Allocation* find_pinned(uint64_t address) {
  auto above = pinned().upper_bound(address);
  if (above == pinned().begin()) return nullptr;
  const Allocation& found = std::prev(above)->second;
  return address < found.base + found.size ? &found : nullptr;
}

void register_pinned(void* address, size_t n) {
  static uint64_t number = 0;
  const uint64_t base = reinterpret_cast<uint64_t>(address);
  pinned()[base] = {base, n, ++number, false};
}

void unregister_pinned(void* address) { pinned().erase(reinterpret_cast<uint64_t>(address)); }

void* allocate_pinned(size_t n) {
  void* address = std::aligned_alloc(4096, (n + 4095) / 4096 * 4096);
  if (address == nullptr) return nullptr;
  std::memset(address, kNewPinned, n);
  register_pinned(address, n);
  return address;
}

void free_pinned(void* address) {
  unregister_pinned(address);
  std::free(address);
}

uint8_t* bytes_at(const void* address, size_t n, const char* who) {
  if (!is_device(address)) return static_cast<uint8_t*>(const_cast<void*>(address));
  const uint64_t a = reinterpret_cast<uint64_t>(address);
  const Allocation* found = find_device(a);
  if (n && (found == nullptr || a + n > found->base + found->size)) {
    report(std::string(who) + ": access to " + std::to_string(n) + " bytes at " + hexadecimal(a) + ", " +
           describe(a, n));
    return nullptr;
  }
  return shadow(a);
}

std::string hexadecimal(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string describe(uint64_t address, uint64_t n) {
  const bool device = is_device(reinterpret_cast<void*>(address));
  const Allocation* found = device ? allocation_below(address) : find_pinned(address);
  if (found == nullptr && device) return "device memory below all allocations";
  if (found == nullptr) return address < 4096 ? "a null pointer" : "host memory that is not pinned";
  const uint64_t end = found->base + found->size;
  std::string where;
  if (address >= end) {
    where = std::to_string(address - end) + " bytes beyond the end of ";
  } else {
    where = "at offset " + std::to_string(address - found->base) + " of ";
  }
  where += std::string(device ? "" : "pinned ") + "allocation " + std::to_string(found->number) + " (" +
           std::to_string(found->size) + " bytes at " + hexadecimal(found->base) + ")";
  if (address < end && address + n > end) where += ", whose end it crosses by " + std::to_string(address + n - end);
  return where + (found->freed ? ", which was freed" : "");
}

}  // namespace vgpu
