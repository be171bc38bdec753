"""How a run is ended from outside: SIGTERM and SIGHUP end it as Ctrl-C does, once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # not all of them are there on every system
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupts:
    """A block that the first of these signals ends by KeyboardInterrupt(number); later ones do
    nothing, so that whoever presses Ctrl-C twenty times does not interrupt the saving.

    Signals that somebody else handles or ignores (Flower, a notebook, nohup) are left alone, and
    all of them outside the main thread, where Python cannot handle any.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # the signal that came
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) in DEFAULTS:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that is not interrupted; what came meanwhile, or was lost before, ends it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.number is not None:
            raise KeyboardInterrupt(self.number)

    def ignore(self) -> None:
        """Let nothing interrupt what is left of the block."""
        self._held = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.number is None
        if first and not self._held:
            self.number = number
            raise KeyboardInterrupt(number)
        if first:
            self.number = number


def exit_code(error: KeyboardInterrupt) -> int:
    """What a shell expects of a process that a signal ended: 130 for Ctrl-C."""
    number = error.args[0] if error.args and isinstance(error.args[0], int) else signal.SIGINT
    return 128 + int(number)
