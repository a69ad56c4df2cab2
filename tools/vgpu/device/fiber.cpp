#include "fiber.h"

#include <sys/mman.h>

// Saves the registers that a call preserves on this stack, stores its pointer, and takes over another stack.
extern "C" void vgpu_switch(void** from, void* to);
asm(R"(
.text
.globl vgpu_switch
.hidden vgpu_switch
.type vgpu_switch,@function
vgpu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace vgpu {
namespace {
constexpr size_t kStack = 256 << 10;
constexpr int kSavedRegisters = 6;
void* main_stack_pointer;
Fiber* running;
}  // namespace

void prepare(Fiber& fiber, void (*body)()) {
  if (fiber.stack == nullptr) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fiber.stack = static_cast<uint8_t*>(memory);
  }
  // As if body had been called: no return address, then what vgpu_switch pops.
  auto* top = reinterpret_cast<uint64_t*>(fiber.stack + kStack - 64);
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(body);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  fiber.stack_pointer = top;
}

void resume(Fiber& fiber) {
  running = &fiber;
  vgpu_switch(&main_stack_pointer, fiber.stack_pointer);
}

void suspend() { vgpu_switch(&running->stack_pointer, main_stack_pointer); }

Fiber& current() { return *running; }

}  // namespace vgpu
