"""Optimizers of several threads: what a refresh switches for the whole process is as it was when all are done."""

import threading
from contextlib import suppress

import pytest
import torch
from interrupts import Tracer, held_switches
from torch.backends.cuda import flash_sdp_enabled, mem_efficient_sdp_enabled
from training import closure_of, make_loss, make_net

from sassha_fast import AdaHessian
from sassha_fast._core.contexts import Switch, refresh_context


def switches():
    cudnn = torch.backends.cudnn.enabled
    return flash_sdp_enabled(), mem_efficient_sdp_enabled(), cudnn


def overlapping(first, second):
    """Runs both in threads of their own: in the order first in, second in, first out, second out.

    Nothing here waits for a time, as a machine may stand still for minutes; a thread that ends early lets the other go.
    """
    reached = [threading.Event() for _ in range(3)]
    errors = []

    def run(number, work):
        def within():
            reached[number].set()
            reached[number + 1].wait()

        try:
            if number:
                reached[0].wait()
            work(within)
        except BaseException as error:
            errors.append(error)
        finally:
            for event in (reached[number], reached[2]):
                event.set()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def a_step(seed):
    net = make_net(seed=seed)
    opt, loss = AdaHessian(net.parameters(), lr=0.01), make_loss(net)

    def work(within):
        closure = closure_of(opt, loss)

        def waiting():
            within()
            assert not flash_sdp_enabled()
            return closure()

        opt.step(waiting)
        assert opt.state

    return work


def test_refreshes_that_overlap_leave_attention_kernels_as_they_were():
    before = switches()
    assert before[0]
    overlapping(a_step(0), a_step(1))
    assert switches() == before


def test_one_that_raises_leaves_the_other_its_switches():
    before, seen = switches(), []

    def raising(within):
        try:
            with refresh_context():
                within()
                raise KeyError
        except KeyError:
            pass

    def staying(within):
        with refresh_context():
            within()
            seen.append(flash_sdp_enabled())

    overlapping(raising, staying)
    assert seen == [False]
    assert switches() == before


def test_a_switch_that_can_not_be_turned_is_not_taken_for_turned():
    calls = []

    class Broken:
        def __enter__(self):
            calls.append("enter")
            raise ZeroDivisionError

        def __exit__(self, *error):
            calls.append("exit")

    switch = Switch(Broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), switch.on():
            pass
    assert calls == ["enter", "enter"]  # and what was never entered is not left


def test_an_exception_at_any_line_of_a_switch_keeps_no_other_thread_waiting():
    """Such as Ctrl-C: the thread that it arrives in would not notice, as the lock is its own."""

    def work():
        with refresh_context():
            pass

    counted = Tracer()
    counted(work)
    targets = list(counted.targets())
    assert len(targets) > 20
    before = switches()
    for target in targets:
        with suppress(KeyboardInterrupt):
            tracer = Tracer(target, KeyboardInterrupt())
            tracer(work)
        assert tracer.fired, target
        assert not held_switches(), target
        assert switches() == before, target
