"""Random runs of every optimizer on every backend: equal bits, or the same clear error on all.

``python tests/support/fuzz.py --seed 123 --cases 1`` prints and runs one case, ``make fuzz`` many. Whatever goes wrong
is made smaller as long as it still goes wrong, and printed with its seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels are made for it when they are imported
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "optimizer"))

import torch
from fuzz_cases import EXCLUDED, Case, make_case
from fuzz_world import Boom, World, same

from sassha_fast import backends
from sassha_fast._passes import library

BACKENDS = ("reference", "foreach", "cpu", "cuda_sim")
SECONDS = 20.0  # that one case may take on one backend
# Errors that say what is wrong. Others would be raised by chance, in the middle of something.
CLEAR = (ValueError, TypeError, RuntimeError)
NAMES = ("SASSHA", "GSASSHA", "MSASSHA", "AdaHessian", "SophiaH", "SAM")
THEIRS = ("Attempting to unscale FP16 gradients.",)  # clear errors of torch, which no optimizer can keep from users
DRIVEN = ("closure", "parts", "scaled closure", "other batch")  # actions that are undone by an exception


class Hang(BaseException):
    """A case that takes too long."""


class Finding(Exception):
    """What went wrong in a case. The kind is what stays the same if the case is made smaller."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def add_simulator() -> None:
    """Makes the simulator of CUDA a backend."""
    from sim import SimPasses

    found = backends.Backend("cuda_sim", "the CUDA kernels on the CPU", lambda: SimPasses, lambda device: None)
    backends._REGISTRY["cuda_sim"] = found


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Raises Hang after so many seconds of the processor, however busy the machine is.

    A kernel that never returns, or a wait that never ends, ends the process with its stack.
    """

    def ring(*_: object) -> None:
        raise Hang(f"{what} takes more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(60 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)


# ---- one case -----------------------------------------------------------------------------------------------------

Event = tuple[str, dict[str, Any]]  # the error, or nothing, and what is compared


def _describe(error: Exception, backend: str) -> str:
    """An error as it is compared: its type and its text. Raises Finding for one that is not clear."""
    if isinstance(error, Boom):
        return "Boom"
    text = str(error).split("\n")[0]
    ours = isinstance(error, CLEAR) and any(f"{name}." in text or f"{name}:" in text for name in NAMES)
    if not ours and text not in THEIRS:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = "" if where is None else f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
        raise Finding(f"unclear {type(error).__name__} at {at}", f"{text} ({backend})") from error
    return f"{type(error).__name__}: {text}".replace(repr(backend), "<backend>")


def _check_undone(world: World, before: dict[str, Any], number: int) -> None:
    """After an exception in a closure everything is as it was, and state that is new has taken no step."""
    after = world.picture()
    for key, value in before.items():
        ours = key.split(" ")[0] not in ("gradient", "refreshes", "scale")
        if ours and not same(after[key], value):
            raise Finding(f"{key.split(' ')[0]} is not restored", f"{key} after action {number} ({world.backend})")


def events_of(case: Case, backend: str) -> list[Event]:
    """What each action came to on one backend."""
    found: list[Event] = []
    try:
        world = World(case, backend)
    except Exception as error:
        return [(_describe(error, backend), {})]
    for number, action in enumerate(case.actions):
        before = world.picture()
        said = ""
        try:
            world.act(action)
        except Exception as error:
            said = _describe(error, backend)
            if action.kind in DRIVEN:
                _check_undone(world, before, number)
        found.append((said, world.picture()))
        if said or action.kind == "raw":
            try:
                world.settle()
            except Exception as error:
                found.append((_describe(error, backend), world.picture()))
                break
            found.append(("", world.picture()))
    return found


def run_case(case: Case, names: Sequence[str] = BACKENDS) -> None:
    """Raises Finding if backends differ, or if one does what none may."""
    runs = {}
    for backend in (*names, "triton") if case.triton else names:
        with limited(SECONDS * (4 if backend == "triton" else 1), f"seed {case.seed} on {backend}"):
            try:
                runs[backend] = events_of(case, backend)
            except Hang as hang:
                raise Finding(f"hang on {backend}", str(hang)) from None
    expected = runs[names[0]]
    for backend, found in runs.items():
        for number, (a, b) in enumerate(zip(found, expected, strict=False)):
            if a[0] != b[0]:
                raise Finding(f"another error on {backend}", f"event {number}: {a[0]!r}, {names[0]} has {b[0]!r}")
            if a[1].keys() != b[1].keys():
                raise Finding(f"other state on {backend}", f"event {number}: {sorted(a[1].keys() ^ b[1].keys())}")
            for key in a[1] if case.exact else ():
                if not same(a[1][key], b[1][key]):
                    text = f"event {number}: {key} is {a[1][key]}, {names[0]} has {b[1][key]}"
                    raise Finding(f"another {key.split(' ')[0]} on {backend}", text[:600])
        if len(found) != len(expected):
            raise Finding(f"other events on {backend}", f"{len(found)}, {names[0]} has {len(expected)}")


# ---- smaller cases ------------------------------------------------------------------------------------------------


def _smaller(case: Case) -> Iterator[Case]:
    """The case without an action, a tensor, an option or a hyperparameter."""
    for i in range(len(case.actions)):
        yield replace(case, actions=case.actions[:i] + case.actions[i + 1 :])
    for i in reversed(range(len(case.tensors))):
        left = case.tensors[:i] + case.tensors[i + 1 :]  # the last one first, so that the others keep their values
        if left and {s.group for s in left} == set(range(len(case.groups))):
            yield replace(case, tensors=left)
    if case.magnitude != 1.0:
        yield replace(case, magnitude=1.0)
    if len(case.groups) > 1:
        yield replace(case, groups=case.groups[:1], tensors=tuple(s._replace(group=0) for s in case.tensors))
    for key in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != key})
    for g, group in enumerate(case.groups):
        if group:
            yield replace(case, groups=(*case.groups[:g], {}, *case.groups[g + 1 :]))
    for i, s in enumerate(case.tensors):
        if s.layout != "contiguous":
            yield replace(case, tensors=(*case.tensors[:i], s._replace(layout="contiguous"), *case.tensors[i + 1 :]))
    for i, a in enumerate(case.actions):
        calls = a.how.get("calls", ())
        for k in range(len(calls) if len(calls) > 1 else 0):
            fewer = a._replace(how={"calls": calls[:k] + calls[k + 1 :]})
            yield replace(case, actions=(*case.actions[:i], fewer, *case.actions[i + 1 :]))


def finding_of(case: Case, run: Callable[[Case], None]) -> Finding | None:
    """What goes wrong in a case."""
    try:
        run(case)
    except Finding as finding:
        return finding
    return None


def shrunk(case: Case, finding: Finding, run: Callable[[Case], None]) -> tuple[Case, Finding]:
    """A smaller case in which the same goes wrong."""
    again = True
    while again:
        again = False
        for candidate in _smaller(case):
            try:
                found = finding_of(candidate, run)
            except Exception:
                continue
            if found is not None and found.kind == finding.kind:
                case, finding, again = candidate, found, True
                break
    return case, finding


# ---- many cases ---------------------------------------------------------------------------------------------------


def prepare(native: Path | None = None) -> None:
    """What every run needs: the simulator, the native library, quiet, and one thread."""
    if native is not None:
        library.LIBRARY = native
    reason = library.load()
    if reason is not None:
        raise SystemExit(f"fuzz: {reason}")
    add_simulator()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones follow")
    parser.add_argument("--cases", type=int, default=1000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new case after so many")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="the first is what the others are compared with")
    parser.add_argument("--library", type=Path, help="a native library in place of the package's")
    parser.add_argument("--all", action="store_true", help="known defects too")
    given = parser.parse_args()
    prepare(given.library)
    names = tuple(given.backends.split(","))
    excluded = frozenset() if given.all else EXCLUDED
    started, kinds = time.monotonic(), Counter()

    def run(case: Case) -> None:
        run_case(case if "triton" not in names else replace(case, triton=False), names)

    done = 0
    for seed in range(given.seed, given.seed + given.cases):
        if time.monotonic() - started > given.seconds:
            break
        case = make_case(seed, excluded)
        if given.cases == 1:
            print(case.text(), flush=True)
        finding = finding_of(case, run)
        done += 1
        if done % 500 == 0:
            print(f"{done} cases, {sum(kinds.values())} went wrong", flush=True)
        if finding is not None:
            kinds[finding.kind] += 1
            if kinds[finding.kind] <= 3:
                case, finding = shrunk(case, finding, run)
                print(f"\n{finding}\n{case.text()}", flush=True)
            else:
                print(f"\nseed {seed} too: {finding.kind}", flush=True)
    print(f"\n{done} cases from seed {given.seed}, {sum(kinds.values())} went wrong")
    for kind, count in kinds.most_common():
        print(f"  {count:>5} {kind}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
