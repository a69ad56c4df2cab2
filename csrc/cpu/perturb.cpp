// Ascent and the way back: x + eps into the parameter, x into the backup, and the copy that undoes it. Where x is
// kept in state, x + eps is derived from it and from the momentum.
#include "block.h"
#include "launch.h"

namespace sassha::SASSHA_ISA {
namespace {

// The pass for types computed in place. `backup` may be `grad` itself, element for element.
template <typename C, bool kAdaptive>
void ascend(C* __restrict param, C* backup, const C* grad, C scale, int64_t size) {
#pragma GCC ivdep
  for (int64_t i = 0; i < size; ++i) {
    const C x = param[i], g = grad[i];
    backup[i] = x;
    param[i] = x + (kAdaptive ? adaptive_ascent(scale, g, x) : ascent(scale, g));
  }
}

template <typename T, bool kAdaptive>
void perturb_of(const Row& row, int64_t begin, int64_t size, const AscentArgs& args) {
  using C = Compute<T>;
  T* param = at<T>(row.param, begin);
  T* backup = at<T>(row.backup, begin);
  const T* grad = at<T>(row.grad, begin);
  const C scale = args.scales[row.group];
  if (scale == 0) {  // selected, not multiplied: 0 * inf would be NaN
    memcpy(backup, param, static_cast<size_t>(size) * sizeof(T));
    return;
  }
  if constexpr (std::is_same_v<T, C>) {
    ascend<C, kAdaptive>(param, backup, grad, scale, size);
  } else {
    Noise noise({args.seed, static_cast<uint32_t>(row.index), static_cast<uint32_t>(*args.draw)}, kAscentNoise);
    for_each_block(size, [&](int64_t offset, auto n) {
      C x[kBlock], g[kBlock];
      load(param + offset, x, n);
      load(grad + offset, g, n);
      memcpy(backup + offset, param + offset, static_cast<size_t>(n) * sizeof(T));
      for (int64_t i = 0; i < n; ++i) {
        x[i] = x[i] + (kAdaptive ? adaptive_ascent(scale, g[i], x[i]) : ascent(scale, g[i]));
      }
      // Rounding to nearest would lose most of a small eps.
      round_stochastically<T>(x, n, noise.of(begin + offset));
      store(param + offset, x, n);
    });
  }
}

template <typename T, bool kAdaptive>
void momentum_ascent_of(const Row& row, int64_t begin, int64_t size, const AscentArgs& args) {
  using C = Compute<T>;
  T* param = at<T>(row.param, begin);
  const T* weight = at<T>(row.backup, begin);
  const C* exp_avg = at<C>(row.exp_avg, begin);
  const C scale = args.scales[row.group];
  if (scale == 0) {
    memcpy(param, weight, static_cast<size_t>(size) * sizeof(T));
    return;
  }
  Noise noise({args.seed, static_cast<uint32_t>(row.index), static_cast<uint32_t>(*args.draw)}, kAscentNoise);
  for_each_block(size, [&](int64_t offset, auto n) {
    C room[kBlock], moved[kBlock];
    const C* x = load(weight + offset, room, n);
    const C* m = exp_avg + offset;
    for (int64_t i = 0; i < n; ++i) {
      moved[i] = x[i] + (kAdaptive ? adaptive_ascent(scale, m[i], x[i]) : ascent(scale, m[i]));
    }
    if constexpr (!std::is_same_v<T, C>) round_stochastically<T>(moved, n, noise.of(begin + offset));
    store(param + offset, moved, n);
  });
}

}  // namespace

void momentum_ascent(const Row& row, int64_t begin, int64_t size, const AscentArgs& args) {
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    args.adaptive ? momentum_ascent_of<T, true>(row, begin, size, args)
                  : momentum_ascent_of<T, false>(row, begin, size, args);
  });
}

void perturb(const Row& row, int64_t begin, int64_t size, const AscentArgs& args) {
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    args.adaptive ? perturb_of<T, true>(row, begin, size, args) : perturb_of<T, false>(row, begin, size, args);
  });
}

void restore(const Row& row, int64_t begin, int64_t size, bool stream) {
  with_dtype(row.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* param = at<T>(row.param, begin);
    const T* backup = at<T>(row.backup, begin);
    if (stream) {
      stream_out(param, backup, size);
      stream_fence();
    } else {
      memcpy(param, backup, static_cast<size_t>(size) * sizeof(T));
    }
  });
}

}  // namespace sassha::SASSHA_ISA
