// Device memory: a range of addresses that the host can't touch, with its bytes in a shadow mapping. And pinned memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace vgpu {

constexpr uint64_t kDeviceBase = 0x600000000000ull;
constexpr uint64_t kDeviceSize = 256ull << 30;  // of addresses, which are never used twice
constexpr uint64_t kShadow = 0x10000000000ull;  // the bytes of a device address are at address + kShadow
constexpr uint64_t kCapacity = 16ull << 30;     // of bytes that are allocated at a time
constexpr uint64_t kSpacing = 512;              // alignment of allocations, and the least room between them

struct Allocation {
  uint64_t base, size;
  uint64_t number;  // 1 is the first
  bool freed;
};

bool is_device(const void* address);
bool is_pinned(const void* address);

// New memory of n bytes, full of NaN; null if there is too little.
void* allocate_device(size_t n);
void free_device(void* address);
uint64_t allocated_bytes();

// The allocation at or below an address, live or freed; null if there is none. Safe in a signal handler.
const Allocation* allocation_below(uint64_t address);
// The live device or pinned allocation that an address is in; null if there is none.
const Allocation* find_device(uint64_t address);
const Allocation* find_pinned(uint64_t address);

void* allocate_pinned(size_t n);
void free_pinned(void* address);
void register_pinned(void* address, size_t n);
void unregister_pinned(void* address);

// Where the bytes of an address are: device memory is checked and reported in the name of `who` (then null is
// returned), host memory is what it is.
uint8_t* bytes_at(const void* address, size_t n, const char* who);

// "at offset 8 of allocation 3 (16 bytes at 0x…)", or how far beyond it, and whether it was freed.
std::string describe(uint64_t address, uint64_t n);
std::string hexadecimal(uint64_t value);

// Says which device address host code has touched, before the process dies of it. Idempotent.
void watch_host_accesses();

}  // namespace vgpu
