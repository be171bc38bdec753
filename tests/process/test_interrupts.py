"""Signals end a block once, in the block that is outermost, and leave what others handle alone."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fedaccord.process.interrupts import exit_code, interruptible, take_back


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Signals as a shell's foreground leaves them; a shell's background may ignore some."""
    numbers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    numbers |= {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_of_many_signals_ends_the_block(number: int, code: int) -> None:
    saves = []

    def work() -> None:
        try:
            send(number)
        finally:
            for _ in range(20):
                send(number)
                send(signal.SIGINT)
                saves.append("some")

    with interruptible(), pytest.raises(KeyboardInterrupt) as interrupt:
        work()
    assert len(saves) == 20
    assert exit_code(interrupt.value) == code


def test_a_signal_waits_for_the_end_of_what_it_may_not_cut() -> None:
    steps: list[str] = []

    def work() -> None:
        send(signal.SIGTERM)
        steps.append("row")

    with interruptible() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.held():
        work()
    assert steps == ["row"]


def test_a_signal_after_what_it_may_not_cut_ends_what_follows() -> None:
    with interruptible() as interrupts:
        with interrupts.held():
            pass
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_an_interrupt_that_somebody_swallowed_comes_again() -> None:
    with interruptible() as interrupts:
        with suppress(KeyboardInterrupt):
            send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            pass


def test_nothing_interrupts_the_end() -> None:
    with interruptible() as interrupts:
        interrupts.ignore()
        send(signal.SIGTERM, 20)
        assert interrupts.number == signal.SIGTERM


def test_a_block_in_a_block_has_the_same_interrupts() -> None:
    with interruptible() as outer:
        with interruptible() as inner:
            assert inner is outer
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert exit_code(KeyboardInterrupt()) == 130  # without a number


def test_what_others_handle_or_ignore_is_left_alone() -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: signals.append(number))
    try:
        with interruptible():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signals == [signal.SIGHUP]


def test_outside_the_main_thread_nothing_is_handled() -> None:
    handlers = []

    def inside() -> None:
        with interruptible():
            take_back()
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_an_interrupt_that_lost_its_number_gets_it_back() -> None:
    """Ray raises a KeyboardInterrupt of its own where a signal came while it waited."""

    def wait() -> None:
        try:
            send(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt) as error, interruptible(), interruptible():
        wait()
    assert exit_code(error.value) == 143


def test_under_nohup_a_lost_terminal_ends_nothing() -> None:
    code = (
        "import os, signal; from fedaccord.process.interrupts import interruptible\n"
        "with interruptible(): os.kill(os.getpid(), signal.SIGHUP)"
    )
    ignoring = [sys.executable, "-c", f"import signal; signal.signal(1, signal.SIG_IGN)\n{code}"]
    subprocess.run(ignoring, check=True)
