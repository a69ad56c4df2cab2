// What the virtual GPU remembers for whoever watches it: counters, errors with their texts, a trace, and its dice.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace vgpu {

void count(const std::string& what, uint64_t n = 1);

// Writes an error to stderr and keeps its text until somebody takes it.
void report(const std::string& what);

// Adds a line to the trace, if it is on.
void note(const std::string& event);

// A counter's value by its name, and what else is remembered. The lock must be held.
std::map<std::string, uint64_t>& counters();
std::vector<std::string>& errors();
std::vector<std::string>& trace();
void set_tracing(bool on);

// Orders of streams, blocks and warps come from here; VGPU_SEED gives others.
std::mt19937_64& dice();

// A kernel's name as a person would write it: demangled, without return type and arguments.
std::string readable(const std::string& mangled);

}  // namespace vgpu
