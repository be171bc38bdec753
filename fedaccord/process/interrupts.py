"""Ending a run from outside: SIGTERM and SIGHUP act as Ctrl-C, once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # not every system has all of them
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupts:
    """The first signal raises KeyboardInterrupt(number), and later ones do nothing: pressing Ctrl-C
    twenty times does not interrupt the saving."""

    def __init__(self) -> None:
        self.number: int | None = None  # the signal received
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that is not interrupted; a signal that was received, now or before, ends it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.number is not None:
            raise KeyboardInterrupt(self.number)

    @contextmanager
    def named(self) -> Iterator[None]:
        """A block that restores the signal of a KeyboardInterrupt, which Ray drops."""
        try:
            yield
        except KeyboardInterrupt as error:
            if error.args or self.number is None:
                raise
            raise KeyboardInterrupt(self.number) from None

    def ignore(self) -> None:
        """Ignore further signals."""
        self._held = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        first, self.number = self.number is None, self.number or number
        if first and not self._held:
            raise KeyboardInterrupt(number)


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """A block that signals end by `Interrupts`; a nested block has those of the outer one.

    Signals that other code handles or ignores (Flower, a notebook, nohup) are left alone, and all
    of them outside the main thread, because Python cannot handle them there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interrupts()
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    for number in numbers:
        outer = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(outer, Interrupts):
            with outer.named():
                yield outer
            return
    interrupts = Interrupts()
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) in DEFAULTS}
    try:
        for number in before:
            signal.signal(number, interrupts.receive)
        with interrupts.named():
            yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_back() -> None:
    """Handle SIGTERM as before a library's own code, as Ray's, took it without Python's knowledge;
    outside the main thread Python cannot."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def exit_code(error: KeyboardInterrupt) -> int:
    """The exit code of a process that a signal ended, as shells expect it: 130 for Ctrl-C."""
    number = error.args[0] if error.args and isinstance(error.args[0], int) else signal.SIGINT
    return 128 + int(number)
