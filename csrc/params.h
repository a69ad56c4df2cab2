// Plain structs that cross the language boundary.
//
// A Row describes one parameter to a pass: addresses, size and indices, all 64-bit, so that a list of rows is one
// int64 tensor of shape [n, kRowWords] that Python keeps between steps (sassha_fast/_passes/layout.py mirrors them).
// A StepScalars is one row of a float64 tensor of shape [cohorts, kStepScalarWords] (sassha_fast/_core/scalars.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace sassha {

enum DType : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };
constexpr int64_t kDTypes = 4;                                  // of parameters
enum CodeType : int64_t { kInt8 = 4, kUInt8 = 5, kInt16 = 6 };  // of what is stored in fewer bits

// What `bind` found out about a gradient, as bits of Row::flags.
enum Flag : int64_t {
  kOwnsBuffer = 1,     // covers its whole storage and overlaps no other tensor of the list
  kSignedProduct = 2,  // Row::product already holds z * Hz (or a mean of such), not Hz
  kProbeGradient = 4,  // Row::product holds the gradient at x + eps + h z, from which Hz is (product - grad) / h
};

struct Row {
  int64_t param;          // x, or x + eps while perturbed
  int64_t grad;           // gradient of the pass at hand
  int64_t backup;         // x while param holds x + eps, and for good where x is kept in state
  int64_t exp_avg;        // m
  int64_t hessian;        // D
  int64_t product;        // Hz on a refresh, 0 otherwise
  int64_t first;          // gradient of the first pass, by which the descent is decomposed
  int64_t correction;     // what a bfloat16 or float16 x lacks: int8 or int16 beside every element, see format
  int64_t exp_avg_scale;  // of every group of 8-bit codes of m, float32
  int64_t hessian_scale;  // of every group of 8-bit codes of D, bfloat16
  int64_t numel;
  int64_t layout;  // 0 in logical order, else a hash of sizes and strides
  int64_t dtype;   // DType of param, grad, backup and product; m and D are float32, or float64 beside float64
  int64_t format;  // 0, or how m, D and x are stored in fewer bits (formats.h); the same in all rows of a table
  int64_t index;   // position among all parameters: the Philox stream
  int64_t group;   // row of the ascent scales
  int64_t cohort;  // row of the step scalars: parameters of one group with one step count
  int64_t flags;
};
constexpr int64_t kRowWords = sizeof(Row) / sizeof(int64_t);

// The addresses of a row by number.
enum Column : int64_t {
  kParam,
  kGrad,
  kBackup,
  kExpAvg,
  kHessian,
  kProduct,
  kFirst,
  kCorrection,
  kExpAvgScale,
  kHessianScale,
  kAddresses
};
static_assert(offsetof(Row, numel) == kAddresses * sizeof(int64_t), "a row begins with its addresses");

// What the passes have done to a table, in host memory whatever the device. An operator writes it last, after its
// kernels ran or were launched. Ctrl-C may arrive when the operator has returned and Python has not yet noted that it
// did; then this says where x is, and whether the update was taken.
struct Journal {
  int64_t x_in_backup;  // 1 from an ascent on, until x is back in the parameter
  int64_t updates;      // how many there were
};
constexpr int64_t kJournalWords = sizeof(Journal) / sizeof(int64_t);

// A device takes a list of rows in chunks of kChunk elements, one block of threads each, sorted by dtype and then by
// row. Beside the table lies one int32 tensor of shape [chunks + rows, 2]: the chunks, then the span of every row.
struct Chunk {
  int32_t row;
  int32_t number;  // within the row: its first element is kChunk * number
};
struct Span {
  int32_t first;  // chunk of a row
  int32_t count;
};
constexpr int64_t kCounts = kDTypes + 1;  // what the host knows of a table's chunks: their number by dtype, the format
constexpr int64_t kChunk = 8192;          // a multiple of kSignsPerCall, so that no Philox block is split

// Everything the update needs beside the tensors, computed once per cohort in double and rounded once to the
// compute type.
template <typename C>
struct StepScalars {
  C decay;  // 1 - lr * weight_decay
  C beta1;
  C one_minus_beta1;  // negative under `maximize`
  C beta2;
  C one_minus_beta2;
  C bias2;       // 1 - beta2^t of the newest refresh
  C bias2_kept;  // the same before this step's refresh, for elements whose product is lost
  C first;       // 1 - beta2^r: what r samples weigh together in D, which the first of an element gets at once
  C kept;        // how much that has grown by this refresh: D of an element that it did not see grows likewise
  C eps;
  C step_size;      // lr / (1 - beta1^t)
  C power;          // exponent of the curvature
  C product_scale;  // makes what Row::product gives a mean over probes: 1 / (probes * loss scale * length of a probe)
  C grad_scale;     // makes Row::grad the gradient to descend along: clipping over loss scale
  C clip;           // bound of |m / denominator|, infinite for none
  C skip;           // not 0: gradients overflowed, so the parameter returns to x and nothing else happens
  C floor;          // least value of D / bias2: 0, unless curvature is clipped from below or may stay negative
};
constexpr int64_t kStepScalarWords = sizeof(StepScalars<double>) / sizeof(double);

// What enters the average D of a product h.
enum Sample : int64_t { kMagnitude = 0, kSigned = 1, kSquare = 2 };

// Of a gradient and the one of the first pass, summed in double.
struct GapSums {
  double first;   // g * g
  double dot;     // g * g2
  double second;  // g2 * g2
};
constexpr int64_t kGapWords = sizeof(GapSums) / sizeof(double);

// How a gradient is decomposed by the one of the first pass: one row of a float32 tensor [groups, 2].
struct GapScales {
  float alpha;  // 0 leaves the gradient alone
  float share;  // (g * g2) / (g2 * g2): the part of g along g2
};
constexpr int64_t kGapScaleWords = sizeof(GapScales) / sizeof(float);

// What a refresh saw in one piece of a tensor: elements whose product is finite, and not 0 together with their
// gradient.
struct Tally {
  double trace;     // sum of z * Hz over them
  double negative;  // how many of them are below zero
  double seen;      // how many there are
};
constexpr int64_t kTallyWords = sizeof(Tally) / sizeof(double);

// What a refresh left out in one piece of a tensor, and what is known of the rest.
struct Unseen {
  double elements;   // whose gradient and product are both 0
  double known;      // elements with a curvature
  double curvature;  // the sum of theirs
};
constexpr int64_t kUnseenWords = sizeof(Unseen) / sizeof(double);

}  // namespace sassha
