// The operators' namespace: the simulator (cuda/sim.h) registers the same operators beside ours.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef SASSHA_NAMESPACE
#define SASSHA_NAMESPACE sassha_fast
#endif

// Expand their arguments before torch's macros paste them.
#define SASSHA_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define SASSHA_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
