"""``make mutants``: breaks the CUDA kernels in one place at a time and runs the tests on the simulator.

A mutant that passes is a hole in the tests. Each one is built and run in a copy of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """One change: ``new`` in place of the first (or ``nth``) ``old`` in a file of csrc."""

    what: str
    file: str
    old: str
    new: str
    nth: int = 1


MUTANTS = (
    # ---- barriers
    Mutant("no barrier after the signs are drawn", "cuda/multi_tensor.cuh", "  }\n  __syncthreads();\n}", "  }\n}"),
    Mutant(
        "no barrier between warps and their sum", "cuda/multi_tensor.cuh", "  __syncthreads();\n  if (thr", "  if (thr"
    ),
    Mutant("no barrier after signs are cleared", "cuda/step.cuh", "    __syncthreads();\n  } else {", "  } else {"),
    # ---- bounds
    Mutant("vectors one too far", "cuda/multi_tensor.cuh", "i < extent.whole;", "i <= extent.whole;"),
    Mutant("pairs one too far", "cuda/multi_tensor.cuh", "kStride < extent.whole;", "kStride <= extent.whole;"),
    Mutant("pairs overlap", "cuda/multi_tensor.cuh", "i += kAhead * kStride", "i += kStride"),
    Mutant(
        "both of a pair are the first",
        "cuda/multi_tensor.cuh",
        "operands[k] = load(Width<kWidth>{}, i + k * kStride)",
        "operands[k] = load(Width<kWidth>{}, i)",
    ),
    Mutant(
        "both of a pair go where the first does",
        "cuda/multi_tensor.cuh",
        "work(Width<kWidth>{}, i + k * kStride, operands[k])",
        "work(Width<kWidth>{}, i, operands[k])",
    ),
    Mutant("elements one too far", "cuda/multi_tensor.cuh", "i < extent.size;", "i <= extent.size;"),
    Mutant("elements one too few", "cuda/multi_tensor.cuh", "i < extent.size;", "i < extent.size - 1;"),
    Mutant("vectors without the rest of the division", "cuda/multi_tensor.cuh", "size - size % kWidth", "size"),
    Mutant("no single elements after the vectors", "cuda/multi_tensor.cuh", "i < extent.size;", "i < extent.whole;"),
    Mutant(
        "sign calls one too few",
        "cuda/multi_tensor.cuh",
        "call * kPerCall < piece.size",
        "call * kPerCall + kPerCall < piece.size",
    ),
    Mutant(
        "no bound on the last chunk",
        "cuda/multi_tensor.cuh",
        "left < kChunk ? left : kChunk",
        "left > kChunk ? left : kChunk",
    ),
    Mutant("sums over chunks one too far", "cuda/norm.cuh", "i < n; i += kThreads", "i <= n; i += kThreads"),
    Mutant("sums over chunks one too few", "cuda/norm.cuh", "i < n; i += kThreads", "i < n - 1; i += kThreads"),
    Mutant("tallies without the last chunk", "cuda/step.cu", "i < span.count;", "i < span.count - 1;"),
    # ---- chunks
    Mutant(
        "first chunk of a row is missing", "rows.h", "for (int64_t c = 0; c < count", "for (int64_t c = 1; c < count"
    ),
    Mutant("last chunk of a row is missing", "rows.h", "rows[r].numel + kChunk - 1", "rows[r].numel"),
    Mutant("every chunk is the first", "cuda/multi_tensor.cuh", "kChunk * chunk.number", "kChunk * 0"),
    Mutant("first chunk by the wrong dtype", "cuda/launch.h", "chunks + first}", "chunks}"),
    Mutant("partial sums of one dtype over another's", "cuda/norm.cu", "partials + first", "partials"),
    Mutant("tallies of one dtype over another's", "cuda/step.cu", "partials + first", "partials"),
    Mutant("all sums in one group", "cuda/norm.cuh", "partial.group == static_cast<int64_t>(blockIdx.x)", "true"),
    # ---- vectors
    Mutant(
        "alignment of the first address alone",
        "cuda/vector_io.cuh",
        "% kVectorBytes == 0) && ...)",
        "% kVectorBytes == 0) || ...)",
    ),
    Mutant(
        "alignment to half a vector", "cuda/vector_io.cuh", "addresses % kVectorBytes", "addresses % (kVectorBytes / 2)"
    ),
    Mutant(
        "alignment is not asked for", "cuda/multi_tensor.cuh", "wide ? size - size % kWidth : 0", "size - size % kWidth"
    ),
    Mutant(
        "second half of a wide load",
        "cuda/vector_io.cuh",
        "reinterpret_cast<const Vector*>(from) + k",
        "reinterpret_cast<const Vector*>(from)",
    ),
    Mutant(
        "second half of a wide store",
        "cuda/vector_io.cuh",
        "reinterpret_cast<Vector*>(to) + k",
        "reinterpret_cast<Vector*>(to)",
    ),
    # ---- sums
    Mutant("a warp sums half of its lanes", "cuda/multi_tensor.cuh", "delta = kWarp / 2", "delta = kWarp / 4"),
    Mutant(
        "the last warp is left out",
        "cuda/multi_tensor.cuh",
        "w < kThreads / kWarp; ++w",
        "w < kThreads / kWarp - 1; ++w",
    ),
    Mutant("squares lose their square", "cuda/multi_tensor.cuh", "add_product(sum, v, v)", "add_product(sum, v, 1.0)"),
    Mutant("adaptive norm without |x|", "cuda/norm.cuh", "absolute(widen(in.x[j])) * v", "v"),
    Mutant("squares of the gradient alone", "cuda/norm.cuh", "address_in(piece.row, column)", "piece.row.grad"),
    # ---- random bits
    Mutant("a constant probe", "cuda/multi_tensor.cuh", "words[offset / 32] >> (offset % 32)", "0"),
    Mutant(
        "every chunk has the signs of the first", "cuda/multi_tensor.cuh", "piece.begin / kSignsPerCall + call", "call"
    ),
    Mutant("signs of the first element for all", "cuda/step.cuh", "(signs >> j) & 1u", "signs & 1u"),
    Mutant(
        "signed products are signed again",
        "cuda/step.cuh",
        "product_of(piece.row) == Product::kSigned)",
        "product_of(piece.row) == Product::kNone)",
    ),
    Mutant("noise of the wrong elements", "cuda/multi_tensor.cuh", "16 * (place % 2)", "16 * (place / 4)"),
    Mutant("ascent and update share their noise", "cuda/step.cuh", "kUpdateNoise", "kAscentNoise"),
    Mutant("noise of every chunk from the first", "cuda/perturb.cuh", "stream, piece.begin + offset", "stream, offset"),
    # ---- maths
    Mutant("curvature without abs", "math.h", "if (sample == kMagnitude) return absolute(h);", ""),
    Mutant(
        "no bias correction of curvature",
        "math.h",
        "const C unfloored = d / bias2;",
        "const C unfloored = d; (void)bias2;",
    ),
    Mutant("correction of the newest refresh for all", "cuda/step.cuh", "known ? s.bias2 : s.bias2_kept", "s.bias2"),
    Mutant("products that were not seen count", "cuda/step.cuh", "count.seen += seen ? 1 : 0", "count.seen += 1"),
    Mutant("zeros are curvatures", "cuda/step.cuh", "unseen ? d * s.kept : ", ""),
    Mutant("what was not seen falls behind", "cuda/step.cuh", "unseen ? d * s.kept", "unseen ? d"),
    Mutant("a gradient of 0 is enough", "math.h", "product == C(0) && g == C(0) && !zero", "g == C(0) && !zero"),
    Mutant("a late first sample is one of many", "math.h", "is_unknown(d) ? s.first * sample : averaged", "averaged"),
    Mutant(
        "they reach the curvature",
        "cuda/step.cuh",
        "{!known ? d : unseen",
        "{unseen",
    ),
    Mutant("zero products count as negative", "cuda/step.cuh", "seen && h < 0", "seen && h <= 0"),
    Mutant("weights without curvature move", "math.h", "return is_unknown(d) ? x : moved;", "return moved;"),
    Mutant("a difference without its sign", "cuda/step.cuh", "probed ? raw - g : raw", "probed ? g - raw : raw"),
    Mutant("power one takes the root", "cuda/step.cu", "kernel<T, decltype(p)::value", "kernel<T, Power::kHalf"),
    Mutant(
        "general power forgets one",
        "cuda/step.cuh",
        "if (s.power == C(1)) return denominator<Power::kOne>",
        "if (s.power == C(1)) return denominator<Power::kHalf>",
    ),
    Mutant("no scale still multiplies", "cuda/perturb.cuh", "if (scale == 0) {", "if (false) {"),
    Mutant(
        "backup of x + eps",
        "cuda/perturb.cuh",
        "store(backup + offset, in.x);",
        "store(backup + offset, ascended<T>(in, scale, kAdaptive, stream, piece.begin + offset));",
    ),
    Mutant(
        "a skipped step is taken",
        "cuda/step.cuh",
        "const StepCount count = s.skip != 0",
        "const StepCount count = false",
    ),
    Mutant("a skipped refresh is taken", "cuda/step.cuh", "if (s.skip != 0) {", "if (false) {"),
    Mutant("momentum is not kept", "cuda/step.cuh", "        store(exp_avg + offset, m);\n", ""),
    Mutant("curvature is not kept", "cuda/step.cuh", "if constexpr (kRefresh) store(hessian + offset, d);", ""),
    Mutant("a refresh trusts the product's address", "cuda/step.cuh", "kRefresh ? row.product : 0", "0"),
    # ---- samples and floors
    Mutant("a sample is always the magnitude", "cuda/step.cuh", "sampled(h, args.sample)", "absolute(h)"),
    Mutant("a sampled square is not squared", "math.h", "? h * h", "? absolute(h)"),
    Mutant("a sample of -0 leaves curvature unknown", "math.h", ": h + C(0)", ": h"),
    Mutant(
        "tallies count samples",
        "cuda/step.cuh",
        "seen && h < 0",
        "seen && sampled(h, args.sample) < 0",
    ),
    Mutant("negative curvature is unknown", "math.h", "(v) == 0x80000000u", "(v) >= 0x80000000u"),
    Mutant("curvature without a floor", "math.h", "unfloored < s.floor ? s.floor : unfloored", "unfloored"),
    # ---- x in state
    Mutant("x in state reaches the parameter", "cuda/step.cuh", "kInState ? row.backup : row.param", "row.param"),
    Mutant("squares in state without |x|", "cuda/step.cuh", "absolute(widen(x)) * m", "m"),
    Mutant(
        "squares in state of x before rounding",
        "cuda/step.cuh",
        "add_momentum<T>(count.squares, m[j], narrow<T>(x[j]), args.adaptive)",
        "add_square(count.squares, args.adaptive ? absolute(x[j]) * m[j] : m[j])",
    ),
    Mutant(
        "no squares of a skipped update in state",
        "cuda/step.cuh",
        "count.squares = add_momentum<T>(count.squares, in.m[j], in.x[j], args.adaptive);",
        "",
    ),
    Mutant(
        "no squares of an update in state",
        "cuda/step.cuh",
        "count.squares = add_momentum<T>(count.squares, m[j], narrow<T>(x[j]), args.adaptive);",
        "",
    ),
    Mutant(
        "a skipped update in state trusts the momentum's address",
        "cuda/step.cuh",
        "aligned(piece.row.backup, piece.row.exp_avg)",
        "aligned(piece.row.backup)",
    ),
    Mutant("squares in state all in the first group", "cuda/step.cuh", "{sum[0], group}", "{sum[0], group * 0}"),
    Mutant("squares in state of one dtype over another's", "cuda/step.cu", "squares + first", "squares"),
    Mutant(
        "squares in state of a refresh of one dtype over another's", "cuda/step.cu", "squares + first", "squares", nth=2
    ),
    Mutant(
        "squares in state are not added up",
        "cuda/step.cu",
        "if (args.in_state) finish_sums(rows, squares, sums.squares);",
        "",
    ),
    # ---- ascent along the momentum
    Mutant("ascent without x^2", "cuda/perturb.cuh", "adaptive_ascent(scale, d, x)", "ascent(scale, d)"),
    Mutant(
        "ascent rounded to nearest",
        "cuda/perturb.cuh",
        "round_stochastically<T>(out, stream, element, kAscentNoise);",
        "(void)stream, (void)element;",
    ),
    Mutant("momentum ascent multiplies by no scale", "cuda/perturb.cuh", "if (scale == 0) {", "if (false) {", nth=2),
    Mutant(
        "momentum ascent has the noise of its first chunk",
        "cuda/perturb.cuh",
        "stream, piece.begin + offset",
        "stream, offset",
        nth=2,
    ),
    Mutant(
        "momentum ascent trusts the momentum's address",
        "cuda/perturb.cuh",
        "piece.row.backup, piece.row.exp_avg)",
        "piece.row.backup)",
    ),
    # ---- gap
    Mutant("gap sums of one dtype over another's", "cuda/gap.cu", "partials + first", "partials"),
    Mutant("gap sums without the last chunk", "cuda/gap.cuh", "i < n; i += kThreads", "i < n - 1; i += kThreads"),
    Mutant(
        "gap sums of one gradient alone",
        "cuda/gap.cuh",
        "add_product(sums.dot, g, g2)",
        "add_square(sums.dot, g)",
    ),
    Mutant(
        "gap sums trust the first gradient's address",
        "cuda/gap.cuh",
        "(piece.row.grad, piece.row.first)",
        "(piece.row.grad)",
    ),
    Mutant(
        "decompose trusts the first gradient's address",
        "cuda/gap.cuh",
        "(piece.row.grad, piece.row.first)",
        "(piece.row.grad)",
        nth=2,
    ),
    Mutant("decompose multiplies by no alpha", "cuda/gap.cuh", "if (alpha == 0) return;", ""),
    Mutant(
        "decompose has the scales of the first group",
        "cuda/gap.cuh",
        "scales[piece.row.group].alpha",
        "scales[0].alpha",
    ),
    Mutant(
        "decompose adds the orthogonal part", "math.h", "g2 - alpha * (g - share * g2)", "g2 + alpha * (g - share * g2)"
    ),
    # ---- unseen
    Mutant("unseen sums of one dtype over another's", "cuda/unseen.cu", "partials + first", "partials"),
    Mutant("unseen sums without the last chunk", "cuda/unseen.cu", "i < span.count;", "i < span.count - 1;"),
    Mutant("unseen sums count unknown curvature", "cuda/unseen.cuh", "is_unknown(d) ? 0 : 1", "1"),
    Mutant(
        "unseen sums trust the product's address",
        "cuda/unseen.cuh",
        "aligned(row.grad, row.product, row.hessian)",
        "aligned(row.grad, row.hessian)",
    ),
    Mutant("rows that were seen are added up", "math.h", "row.product != 0 && tally.seen <", "row.product != 0 && 0 *"),
    Mutant(
        "known curvature is filled",
        "math.h",
        "is_unknown(d) && is_unseen(product, g, false)",
        "is_unseen(product, g, false)",
    ),
    Mutant("lost curvature is filled", "math.h", "&& is_unseen(product, g, false) ? mean", "? mean"),
    Mutant(
        "the mean is not rounded to float32",
        "math.h",
        "SASSHA_HD float mean_curvature",
        "SASSHA_HD double mean_curvature",
    ),
    # ---- fewer bits
    Mutant(
        "a group of half its lanes", "cuda/stored.cuh", "mask < kGroupSize / kWidth", "mask < kGroupSize / kWidth / 2"
    ),
    Mutant("no shuffle in a group", "cuda/stored.cuh", "shuffle_xor(largest, mask)", "largest"),
    Mutant(
        "a scale for every run",
        "cuda/stored.cuh",
        "scales_[offset / kGroupSize] = scale",
        "scales_[offset / kRun] = scale",
    ),
    Mutant(
        "m by the scale of its chunk", "cuda/stored.cuh", "scale = scales_[offset / kGroupSize]", "scale = scales_[0]"
    ),
    Mutant(
        "D by the scale of its chunk",
        "cuda/stored.cuh",
        "scale = scales_[offset / kGroupSize]",
        "scale = scales_[0]",
        nth=2,
    ),
    Mutant("scales of every chunk from the first", "cuda/stored.cuh", "piece.begin / kGroup)", "0)"),
    Mutant("lanes leave their group early", "cuda/stored.cuh", "i - lane < extent.size", "i < extent.size"),
    Mutant(
        "lanes beyond the end write", "cuda/stored.cuh", "there = i < extent.size", "there = i - lane < extent.size"
    ),
    Mutant("runs split a warp", "cuda/stored.cuh", "extent_of<kWarp * kRun>", "extent_of<kRun>"),
    Mutant("state is rounded to nearest", "cuda/stored.cuh", "rounding.at_random ? word : ", ""),
    Mutant("m and D share their noise", "cuda/stored.cuh", "kCurvatureNoise", "kMomentumNoise"),
    Mutant(
        "corrections are not kept",
        "cuda/stored.cuh",
        "if constexpr (S::kCorrected) cuda::store(rests_ + offset, run.rests);",
        "",
    ),
    Mutant("codes of D have no sign", "cuda/compact.cuh", "levels = levels_of(row.format)", "levels = 255"),
    Mutant(
        "state has the noise of its first chunk",
        "cuda/compact.cuh",
        "element = piece.begin + offset",
        "element = offset",
    ),
    Mutant(
        "compact ascent trusts the correction's address",
        "cuda/compact.cuh",
        "row.grad, row.correction)",
        "row.grad)",
    ),
    Mutant(
        "compact momentum ascent trusts the correction's address",
        "cuda/compact.cuh",
        "row.exp_avg, S::kCorrected ? row.correction : 0)",
        "row.exp_avg)",
    ),
    Mutant(
        "compact update trusts the correction's address",
        "cuda/compact.cuh",
        "S::kCorrected ? row.correction : 0);",
        "0);",
        nth=2,
    ),
    Mutant("compact update trusts the product's address", "cuda/compact.cuh", "kRefresh ? row.product : 0", "0"),
    Mutant(
        "compact fill trusts the product's address",
        "cuda/compact.cuh",
        "piece.row.product, piece.row.hessian",
        "piece.row.hessian",
    ),
    Mutant("compact ascent takes no backup", "cuda/compact.cuh", "store(backup + offset, in.x.params);", ""),
    Mutant("compact ascent multiplies by no scale", "cuda/compact.cuh", "if (scale == 0) {", "if (false) {"),
    Mutant("compact power one takes the root", "cuda/compact.cuh", "raised<Power::kOne>", "raised<Power::kHalf>"),
    Mutant("a general power of the first element alone", "cuda/compact.cuh", "v[j] = v[j + 1]", "v[j] = v[j]"),
    Mutant("a skipped compact step is taken", "cuda/compact.cuh", "s.skip != 0 ?", "false ?"),
    Mutant("a skipped compact refresh is taken", "cuda/compact.cuh", "if (s.skip != 0) {", "if (false) {"),
    Mutant("no squares of a skipped compact update", "cuda/compact.cuh", "args.in_state ? piece.size : 0", "0"),
    Mutant("compact squares of one dtype over another's", "cuda/compact.cu", "squares + first", "squares"),
    Mutant(
        "compact tallies of one dtype over another's", "cuda/compact.cu", "partials + first, args", "partials, args"
    ),
    Mutant(
        "compact x in state reaches the parameter",
        "cuda/compact.cuh",
        "args.in_state ? row.backup : row.param",
        "row.param",
    ),
)


def mutate(mutant: Mutant, folder: Path) -> None:
    """Changes one place of a copy of the sources."""
    path = folder / "csrc" / mutant.file
    parts = path.read_text().split(mutant.old)
    if len(parts) <= mutant.nth:
        sys.exit(f"mutants: {mutant.file} has no {mutant.nth}. {mutant.old!r}; the list is out of date")
    head, tail = mutant.old.join(parts[: mutant.nth]), mutant.old.join(parts[mutant.nth :])
    path.write_text(head + mutant.new + tail)


def build(folder: Path) -> bool:
    """Builds the simulator of the copy; objects that a mutant leaves alone are taken over."""
    text = (ROOT / "build" / "native" / "build.ninja").read_text()
    build_dir = folder / "build" / "native"
    for part in ("csrc", "tests"):
        text = text.replace(str(ROOT / part), str(folder / part))
    (build_dir / "build.ninja").write_text(text.replace("-O2", "-O1"))
    ninja = [str(Path(sys.executable).with_name("ninja")), "-C", str(build_dir), "_cuda_sim.so"]
    return subprocess.run(ninja, capture_output=True).returncode == 0


def survives(folder: Path, patience: float | None = None) -> bool:
    """Whether the tests of the simulator pass in the copy, in so many seconds: some mutants never end."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-k",
        "(cuda_sim or test_cuda or test_compact_cuda) and not sanitizers",
        "-p",
        "no:cacheprovider",
    ]
    tests = [
        f"tests/kernels/test_{name}.py"
        for name in (
            "cuda",
            "norm",
            "perturb",
            "step",
            "probe",
            "x_in_state",
            "gap",
            "unseen_passes",
            "compact_passes",
            "compact_cuda",
        )
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == 5:
        sys.exit("mutants: no test was found")
    return done.returncode == 0


def main() -> None:
    """Runs those whose description contains an argument, or all."""
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(word in m.what for word in sys.argv[1:])]
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "build" / "native").mkdir(parents=True)
        for part in ("csrc", "tests", "sassha_fast"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        begin = time.monotonic()
        if not build(folder) or not survives(folder):
            sys.exit("mutants: the tests fail before anything is broken")
        patience = 10 * (time.monotonic() - begin)  # of this machine, as busy as it is
        for mutant in chosen:
            begin = time.monotonic()
            original = (folder / "csrc" / mutant.file).read_text()
            mutate(mutant, folder)
            verdict = "does not compile"
            if build(folder):
                verdict = "SURVIVED" if survives(folder, patience) else "killed"
            if verdict != "killed":
                survivors.append(mutant.what)
            (folder / "csrc" / mutant.file).write_text(original)
            print(f"{verdict:<9} {mutant.what} ({mutant.file}, {time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    if survivors:
        sys.exit(f"mutants: the tests do not notice: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
