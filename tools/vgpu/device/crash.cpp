// What is said when host code touches device memory. Everything in the handler is safe in a signal.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>

#include "memory.h"

namespace vgpu {
namespace {

struct sigaction before;  // Python's faulthandler, as a rule, which says where the host code is
int said_to = -1;         // stderr as it was at first: pytest puts a file in its place, which is lost with the process

// A line put together without memory of its own from the heap.
class Line {
 public:
  Line& operator<<(const char* text) {
    const size_t n = std::strlen(text);
    for (size_t i = 0; i < n && size_ < sizeof text_; ++i) text_[size_++] = text[i];
    return *this;
  }
  Line& number(uint64_t value, unsigned radix) {
    char digits[24];
    int i = sizeof digits - 1;
    digits[i] = 0;
    do {
      digits[--i] = "0123456789abcdef"[value % radix];
      value /= radix;
    } while (value);
    return *this << (radix == 16 ? "0x" : "") << digits + i;
  }
  void write_out() const {
    const ssize_t ignored = write(said_to, text_, size_);
    (void)ignored;
  }

 private:
  char text_[400];
  size_t size_ = 0;
};

void say(uint64_t address) {
  Line line;
  line << "\nVGPU ERROR: host code touches device address ";
  line.number(address, 16);
  if (const Allocation* found = allocation_below(address)) {
    const uint64_t end = found->base + found->size;
    line << (address < end ? ", at offset " : ", beyond the end by ");
    line.number(address < end ? address - found->base : address - end, 10) << " of allocation ";
    line.number(found->number, 10) << " (";
    line.number(found->size, 10) << " bytes at ";
    line.number(found->base, 16) << ")" << (found->freed ? ", which was freed" : "");
  }
  line << "\n";
  line.write_out();
}

// The handler that was there before is put back; the access is repeated when this one returns, and ends there.
void handle(int signal, siginfo_t* info, void*) {
  if (is_device(info->si_addr)) say(reinterpret_cast<uint64_t>(info->si_addr));
  sigaction(signal, &before, nullptr);
}

}  // namespace

void watch_host_accesses() {
  if (said_to < 0) said_to = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
  struct sigaction now = {}, current = {};
  sigaction(SIGSEGV, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == handle) return;
  now.sa_sigaction = handle;
  now.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&now.sa_mask);
  sigaction(SIGSEGV, &now, &before);
}

}  // namespace vgpu
