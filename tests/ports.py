"""Ports of this machine for servers that tests start."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle

SIZE = 100
BLOCKS = range(20_000, 30_000, SIZE)  # below those that systems give to connections


def free_port() -> int:
    """A free one of the block of this process: other tests and connections have other ports."""
    _, ports = _block()
    return next(port for port in ports if _is_free(port))


@cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """The first port of a block, bound until this process ends, and the others."""
    for first in BLOCKS:
        with suppress(OSError):  # that of another process
            owner = socket.create_server(("127.0.0.1", first))
            return owner, cycle(range(first + 1, first + SIZE))
    raise RuntimeError(f"expected a free port among {[*BLOCKS]}")


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
