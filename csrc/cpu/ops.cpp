// Operators on tensor lists for the CPU.
#include <string>

#include "../list_ops.h"
#include "launch.h"

namespace sassha {
namespace {

Rows view(const std::vector<Row>& rows) { return {rows.data(), static_cast<int64_t>(rows.size())}; }

struct Cpu {
  static Tensor square_sums(const std::vector<Row>& rows, const Tensor& like, bool adaptive, int64_t n_groups) {
    Tensor sums = new_doubles(like, {n_groups});
    sassha::square_sums(view(rows), adaptive, static_cast<double*>(sums.data_ptr()));
    return sums;
  }

  static void perturb(const std::vector<Row>& rows, const Tensor&, const Tensor& scales, bool adaptive, int64_t seed,
                      const Tensor& draw) {
    sassha::perturb(view(rows), ascent_options(scales, adaptive, seed, draw));
  }

  static void restore(const std::vector<Row>& rows, const Tensor&) { sassha::restore(view(rows)); }

  static void rademacher(const std::vector<Row>& rows, const Tensor&, int64_t seed, int64_t draw) {
    sassha::rademacher(view(rows), seed, draw);
  }

  static void probe(const std::vector<Row>& rows, const Tensor&, double h, int64_t seed, int64_t draw) {
    sassha::probe(view(rows), h, seed, draw);
  }

  static void step(const std::vector<Row>& rows, const Tensor&, const Tensor& scalars, int64_t seed,
                   const std::optional<Tensor>& noise_draw) {
    sassha::step(view(rows), step_options(scalars, seed, 0, noise_draw), nullptr);
  }

  static Tensor refresh_step(const std::vector<Row>& rows, const Tensor& like, const Tensor& scalars, int64_t seed,
                             int64_t draw, const std::optional<Tensor>& noise_draw, int64_t sample) {
    Tensor tallies = new_doubles(like, {static_cast<int64_t>(rows.size()), kTallyWords});
    sassha::step(view(rows), step_options(scalars, seed, draw, noise_draw, sample),
                 static_cast<Tally*>(tallies.data_ptr()));
    return tallies;
  }

  static void momentum_ascent(const std::vector<Row>& rows, const Tensor&, const Tensor& scales, bool adaptive,
                              int64_t seed, const Tensor& draw) {
    sassha::momentum_ascent(view(rows), ascent_options(scales, adaptive, seed, draw));
  }

  static Tensor gap_sums(const std::vector<Row>& rows, const Tensor& like) {
    return as_tensor(sassha::gap_sums(view(rows)), like);
  }

  static void decompose(const std::vector<Row>& rows, const Tensor&, const Tensor& scales) {
    sassha::decompose(view(rows), static_cast<const GapScales*>(scales.data_ptr()));
  }
};

std::string op_cpu_isa() { return kernels().isa; }

}  // namespace
}  // namespace sassha

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CPU, m) { sassha::ListOps<sassha::Cpu>::register_in(m); }

STABLE_TORCH_LIBRARY_IMPL(sassha_fast, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&sassha::op_cpu_isa));
}
