"""A way back from every line: an exception in a step leaves everything as before the step, or as after it."""

import itertools
import random
import signal
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from interrupts import (
    PACKAGE,
    Large,
    Net,
    Run,
    Surroundings,
    Tracer,
    come_back,
    differences,
    parameters,
    picture,
    raw,
    true_weights,
)

from sassha_fast import GSASSHA, MSASSHA, SASSHA

OPTIONS = {
    "lr": 0.01,
    "weight_decay": 0.01,
    "backend": "cpu",
    # Counters of schedules are state, too.
    "rho_scheduler": lambda t: 0.05 + 1e-5 * t,
    "hessian_power_scheduler": lambda t: 0.5 + 1e-5 * t,
}
ORDINARY, REFRESH = 10**6, 1  # lazy_hessian: from the second step on no step refreshes, or every one does
WARM = 2  # steps before the first interrupted one: state is there, and plans are kept
KINDS = {
    "ordinary": {"lazy_hessian": ORDINARY},
    "refresh": {"lazy_hessian": REFRESH},
    "differences": {"lazy_hessian": REFRESH, "hvp": "finite_difference"},
}
SCENARIOS = [
    *itertools.product([SASSHA, MSASSHA], ["calls", "closure"], KINDS),
    *itertools.product([GSASSHA], ["calls", "closure"], ["ordinary", "refresh"]),
    *itertools.product([MSASSHA], ["calls with take_products"], ["refresh", "differences"]),
    (SASSHA, "ascent closure", "ordinary"),
    # Where state and plans are made, and where the weights are in several parts, each with passes of its own.
    (SASSHA, "closure", "refresh, first"),
    (MSASSHA, "calls", "refresh, first"),
    (SASSHA, "calls", "ordinary, odd layouts"),
    (MSASSHA, "calls", "ordinary, odd layouts"),
]


class Twin:
    """The same run without interrupts: what things look like before every step."""

    def __init__(self, build):
        self.run, self.random = build(), []
        self.pictures = [picture(self.run.net, self.run.opt)]

    def before(self, t):
        """Before step ``t``, whose random numbers are seeded already."""
        while len(self.pictures) <= t:
            self.run.step()
            self.random.append(raw(torch.get_rng_state()))
            self.pictures.append(picture(self.run.net, self.run.opt))
        torch.default_generator.manual_seed(t)
        return {**self.pictures[t], "random numbers": raw(torch.get_rng_state())}

    def after(self, t):
        self.before(t + 1)
        return {**self.pictures[t + 1], "random numbers": self.random[t]}


class Interrupted:
    """A run whose every step is interrupted at another line, looked at, and taken again."""

    def __init__(self, build, first, every=1, offset=0):
        self.build, self.first, self.missed = build, first, 0
        self.twin, self.run = Twin(build), build()
        counted = Tracer()
        if not first:
            for _ in range(WARM):
                self.run.step()
        self.run.step(counted)
        self.targets, self.names = list(counted.targets())[offset % every :: every], counted.names
        self.surroundings = Surroundings(self.run.net)

    def renew(self):
        """Another run, at the same step, after a failure or where every step is to be the first."""
        self.run = self.build()
        if not self.first:
            self.twin.before(self.twin.run.t + 1)
            self.run.continued(self.twin.run)
            self.run.step()  # plans are then kept again

    def failures(self):
        """What is wrong: for each call and problem, the lines at which an exception leads to it."""
        found = defaultdict(list)
        exceptions = itertools.cycle((KeyboardInterrupt, MemoryError))
        for i, (target, exception) in enumerate(zip(self.targets, exceptions, strict=False)):
            if self.first:
                self.renew()
            problem = self.problem(target, exception(), look=i % 5 == 0)
            if problem:
                call, file, *line = target
                found[self.names[call], problem].append((str(Path(file).relative_to(PACKAGE)), *line))
                self.surroundings.restore()
                self.renew()
        return found

    def problem(self, target, exception, look):
        """What is wrong after an exception at one line, None if nothing is."""
        run, twin, t = self.run, self.twin, self.run.t
        before, after = twin.before(t), twin.after(t)
        self.surroundings.net = run.net
        tracer = Tracer(target, exception)
        try:
            run.step(tracer)
        except BaseException as error:
            if error is not exception:
                return f"the exception became {type(error).__name__}: {error}"
            error.__traceback__ = None  # whose frames keep generators waiting
        else:
            if tracer.fired:
                return "the exception did not reach the caller"
            self.missed += 1  # some lines run only where products happen to be lost to rounding
            return None if self.missed < 0.1 * len(self.targets) else "the steps do not come there again"
        changed = self.surroundings.changed()
        if changed:
            return f"{', '.join(changed)} not as before"
        try:
            if come_back(run.opt):
                run.opt.zero_grad()  # the step that was begun is over now
            now = picture(run.net, run.opt)
            if now not in (before, after):
                return f"differs from before in {differences(now, before)}; from after in {differences(now, after)}"
            done = now == after
            if look and isinstance(run.opt, MSASSHA):
                with run.opt.true_weights():
                    shown = parameters(run.opt)
                if shown != true_weights(now):
                    return f"true_weights() does not show the weights {'after' if done else 'before'} the step"
            run.opt.zero_grad()
            run.t = t + done
            expected = twin.after(run.t)
            run.step()
        except Exception as error:
            return f"then {type(error).__name__}: {error}"
        now = picture(run.net, run.opt)
        if now != expected:
            return f"the next step differs in {differences(now, expected)}"
        return None


# Scenarios have most of their lines in common and begin at different ones, so that a third of each visits nearly all.
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["third line", "line"])
@pytest.mark.parametrize(
    ("method", "way", "kind"), SCENARIOS, ids=[f"{m.__name__}, {way}, {kind}" for m, way, kind in SCENARIOS]
)
def test_an_exception_at_any_line_has_a_way_back(method, way, kind, every):
    options, offset = {**OPTIONS, **KINDS[kind.split(",")[0]]}, SCENARIOS.index((method, way, kind))
    interrupted = Interrupted(lambda: Run(Net("odd" in kind), method, way, options), "first" in kind, every, offset)
    found = interrupted.failures()
    if found:
        total = sum(map(len, found.values()))
        report = [f"In {call}: {problem}\n  after {places(lines)}" for (call, problem), lines in found.items()]
        pytest.fail(f"{total} of {len(interrupted.targets)} interrupts have no way back\n" + "\n".join(report), False)


def places(lines):
    """Lines by file; the number after × says which time the line ran."""
    by_file = defaultdict(list)
    for file, line, times in lines:
        by_file[file].append(f"{line}" if times == 1 else f"{line}×{times}")
    return "; ".join(f"{file}:{','.join(numbers)}" for file, numbers in by_file.items())


# ---- true weights ------------------------------------------------------------------------------------------------

SHOWING = ("eval", "train", "true_weights", "true_weights that raises", "state_dict", "state_dict of x")


@pytest.mark.parametrize("net", ["even", "odd"])
@pytest.mark.parametrize("call", SHOWING)
def test_an_exception_while_true_weights_are_shown_or_hidden_has_a_way_back(call, net):
    found = Shown(call, net == "odd").failures()
    report = [f"{problem}\n  after {places(lines)}" for problem, lines in found.items()]
    assert not found, "\n".join(report)


class Shown:
    """M-SASSHA between two steps, whose parameters go from x + ε to x or back, interrupted at every line."""

    def __init__(self, call, odd):
        self.call, self.run = call, Run(Net(odd), MSASSHA, "calls", OPTIONS | KINDS["ordinary"])
        self.opt, self.begins_at_x = self.run.opt, call in ("train", "state_dict of x")
        for _ in range(WARM):
            self.run.step()
        self.known = true_weights(picture(self.run.net, self.opt))
        self.held = {False: parameters(self.opt)}
        self.opt.eval()
        self.held[True] = parameters(self.opt)

    def take_call(self):
        if "true_weights" not in self.call:
            getattr(self.opt, self.call.split()[0])()
            return
        with suppress(ZeroDivisionError), self.opt.true_weights():
            assert parameters(self.opt) == self.held[True]
            if "raises" in self.call:
                raise ZeroDivisionError

    def begin(self):
        (self.opt.eval if self.begins_at_x else self.opt.train)()

    def failures(self):
        counted = Tracer()
        self.begin()
        counted(self.take_call)
        found = defaultdict(list)
        for target, kind in zip(counted.targets(), itertools.cycle((KeyboardInterrupt, MemoryError)), strict=False):
            problem = self.problem(target, kind())
            if problem:
                found[problem].append((str(Path(target[1]).relative_to(PACKAGE)), *target[2:]))
        return found

    def problem(self, target, exception):
        """What is wrong after an exception at one line, None if nothing is."""
        self.begin()
        tracer = Tracer(target, exception)
        try:
            tracer(self.take_call)
        except BaseException as error:
            if error is not exception:
                return f"the exception became {type(error).__name__}: {error}"
            error.__traceback__ = None  # whose frames keep the generator of true_weights() waiting
        if not tracer.fired:
            return "the call does not come there again"
        if parameters(self.opt) != self.held[self.opt.evaluating]:
            return f"evaluating is {self.opt.evaluating}, which is not what the parameters hold"
        if self.call not in ("eval", "train") and self.opt.evaluating != self.begins_at_x:
            return "the parameters do not hold what they held before"
        if true_weights(picture(self.run.net, self.opt)) != self.known:
            return "x is another"
        for evaluating, go in ((False, self.opt.train), (True, self.opt.eval), (False, self.opt.train)):
            go()
            if parameters(self.opt) != self.held[evaluating]:
                return f"{go.__name__}() does not bring back what it should"
        return None


@pytest.mark.parametrize("options", [{"capturable": True}, {"state_bits": 8, "full_precision_below": 0}], ids=str)
@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
def test_an_exception_while_state_is_saved_leaves_the_state_that_steps_need(method, options):
    plain = {key: value for key, value in OPTIONS.items() if not key.endswith("scheduler")}
    run = Run(Net(), method, "closure", plain | options)
    run.step()
    state, entries = run.opt.state, [dict(entry) for entry in run.opt.state.values()]
    counted = Tracer()
    counted(run.opt.state_dict)
    for target in counted.targets():
        tracer, exception = Tracer(target, KeyboardInterrupt()), None
        try:
            tracer(run.opt.state_dict)
        except KeyboardInterrupt as error:
            exception = error
        assert tracer.fired == (exception is not None)
        assert run.opt.state is state, target
        for entry, before in zip(state.values(), entries, strict=True):
            assert all(entry[key] is value for key, value in before.items()), target
        exception = None
    run.step()


@pytest.mark.parametrize("lacks", [None, 0], ids=["whole", "without a parameter"])
@pytest.mark.parametrize("at_x", [False, True], ids=["of perturbed weights", "of true weights"])
def test_an_exception_while_a_checkpoint_is_loaded_leaves_one_state_or_the_other(at_x, lacks):
    def begun():
        return Shown("eval" if at_x else "train", False)

    later = begun()
    later.opt.train()
    later.run.step()
    (later.opt.eval if at_x else later.opt.train)()
    checkpoint = later.opt.state_dict()
    if lacks is not None:
        del checkpoint["state"][lacks]
    done, counted = begun(), Tracer()
    (done.opt.train if at_x else done.opt.eval)()
    counted(done.opt.load_state_dict, checkpoint)
    after, found = (parameters(done.opt), at_x), defaultdict(list)
    for target in list(counted.targets())[lacks or 1 :: 5]:
        shown = begun()
        (shown.opt.train if at_x else shown.opt.eval)()
        before = parameters(shown.opt), shown.opt.evaluating
        with pytest.raises(KeyboardInterrupt):
            Tracer(target, KeyboardInterrupt())(shown.opt.load_state_dict, checkpoint)
        if (parameters(shown.opt), shown.opt.evaluating) not in (before, after):
            found[str(Path(target[1]).relative_to(PACKAGE))].append(target[2:])
    assert not found


# ---- signals ------------------------------------------------------------------------------------------------------

SIGNALS = 60  # that arrive during a step, for each scenario
SIGNALLED = [
    (SASSHA, "calls", "exact"),
    (SASSHA, "closure", "finite_difference"),
    (MSASSHA, "calls", "finite_difference"),
    (MSASSHA, "closure", "exact"),
]


def interrupt(signum, frame):
    raise KeyboardInterrupt


def signalled_step(run, delay):
    """A step with a signal after so many seconds. Returns where it was noticed, None if the step was faster."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        run.step()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except KeyboardInterrupt as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(f.filename).parents]
        return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the loop"
    finally:
        signal.signal(signal.SIGALRM, before)
    return None


@pytest.mark.parametrize(
    ("method", "way", "hvp"), SIGNALLED, ids=[f"{m.__name__}, {way}, {hvp}" for m, way, hvp in SIGNALLED]
)
def test_a_signal_at_any_moment_has_a_way_back(method, way, hvp):
    options = {**OPTIONS, "lazy_hessian": 3, "hvp": hvp}
    twin, run = (Run(Large(), method, way, options) for _ in range(2))
    chance, found, noticed = random.Random(0), defaultdict(list), 0
    rounds = []
    for trained in (twin, run):
        start = time.perf_counter()
        for _ in range(3):
            trained.step()
        rounds.append(time.perf_counter() - start)
    duration = min(rounds) / 3  # a machine may stand still during one of them
    while noticed < SIGNALS:
        torch.default_generator.manual_seed(twin.t)
        before = picture(twin.net, twin.opt)
        twin.step()
        after = picture(twin.net, twin.opt)
        delay, t = chance.uniform(0.0, duration), run.t
        where = signalled_step(run, delay)
        noticed += where is not None
        problem = None if torch.is_grad_enabled() else "grad mode not as before"
        torch.set_grad_enabled(True)
        try:
            come_back(run.opt)
            run.opt.zero_grad()  # the loop may not have come to its own
            now = picture(run.net, run.opt)
            if now not in (before, after):
                problem = f"differs from before in {differences(now, before)}; from after in {differences(now, after)}"
            elif now == before:
                run.t = t
                run.step()
                if picture(run.net, run.opt) != after:
                    problem = f"the next step differs in {differences(picture(run.net, run.opt), after)}"
        except Exception as error:
            problem = f"then {type(error).__name__}: {error}"
        run.t = twin.t
        if problem:
            found[problem].append(where)
            run = Run(Large(), method, way, options)
            run.continued(twin)
    if found:
        total = sum(map(len, found.values()))
        report = [f"{problem}\n  after {', '.join(sorted(set(map(str, lines))))}" for problem, lines in found.items()]
        pytest.fail(f"{total} of {noticed} signals have no way back\n" + "\n".join(report), False)
