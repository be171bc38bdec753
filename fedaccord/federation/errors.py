"""The error that ends a federation, and texts of the clients' errors."""

import re

from flwr.app import ArrayRecord

from fedaccord.compat.flower import raised_message

LONGEST = 300  # characters of a text that a client sent
READ = 10 * LONGEST  # characters that are read: the text may be a megabyte of control codes


class FederationError(RuntimeError):
    """The federation cannot continue; the message says why and what to do.

    arrays: the model of the last round that counted, if `FederatedStrategy.start` had one.
    """

    arrays: ArrayRecord | None = None


class NotConnected(str):
    """Why a round did not begin, in one line: too few clients were connected."""


def last_line(reason: str | None) -> str:
    """The original error without Flower's class around it and its simulation's traceback."""
    lines = [line.strip() for line in (reason or "").splitlines()]
    lines = [line for line in lines if line not in ("", "'>")]  # Flower's end of a last empty line
    if not lines:
        return "no reason given"
    return clean(raised_message(lines[-1])) or "no reason that can be shown"


def clean(text: str) -> str:
    """A client's text, made safe for logs and tables: short, in one line, without control codes.

    ``=`` at its beginning, which a spreadsheet would compute, stays: tables escape it.
    """
    plain = ESCAPES.sub("", text[:READ])
    line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
    is_whole = len(line) <= LONGEST and len(text) <= READ
    return line if is_whole else f"{line[:LONGEST]}..."


ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?")  # of a terminal
