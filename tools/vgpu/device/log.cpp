#include "log.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>

#include "lock.h"

namespace vgpu {

std::map<std::string, uint64_t>& counters() {
  static std::map<std::string, uint64_t> it;
  return it;
}

std::vector<std::string>& errors() {
  static std::vector<std::string> it;
  return it;
}

std::vector<std::string>& trace() {
  static std::vector<std::string> it;
  return it;
}

static bool tracing = false;

void set_tracing(bool on) {
  tracing = on;
  trace().clear();
}

void count(const std::string& what, uint64_t n) {
  Lock lock;
  counters()[what] += n;
}

void note(const std::string& event) {
  Lock lock;
  if (tracing) trace().push_back(event);
}

void report(const std::string& what) {
  Lock lock;
  std::fprintf(stderr, "VGPU ERROR: %s\n", what.c_str());
  errors().push_back(what);
  count("error");
  note("error " + what);
}

static std::mt19937_64 seeded() {
  const char* seed = std::getenv("VGPU_SEED");
  return seed ? std::mt19937_64(std::strtoull(seed, nullptr, 10)) : std::mt19937_64();
}

std::mt19937_64& dice() {
  static std::mt19937_64 it = seeded();
  return it;
}

std::string readable(const std::string& mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  if (text == nullptr) return mangled;
  const std::string full = text;
  std::free(text);
  static const std::string kAnonymous = "(anonymous namespace)";
  // The name begins after the last blank, and ends before the first parenthesis, outside of angle brackets.
  size_t begin = 0, end = full.size();
  int depth = 0;
  for (size_t i = 0; i < full.size(); ++i) {
    if (full.compare(i, kAnonymous.size(), kAnonymous) == 0) {
      i += kAnonymous.size() - 1;
      continue;
    }
    depth += full[i] == '<';
    depth -= full[i] == '>';
    if (depth == 0 && full[i] == ' ') begin = i + 1;
    if (depth == 0 && full[i] == '(') {
      end = i;
      break;
    }
  }
  return full.substr(begin, end - begin);
}

}  // namespace vgpu
