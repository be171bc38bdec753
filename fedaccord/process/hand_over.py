"""Hand a command over to the warm process (`process/warm.py`), and exit with its child's status.

Started by its path and without any package, because each message waits for it:
hand_over.py SOCKET PROGRAM ARGUMENT... If no warm process answers, PROGRAM itself is executed.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

ACCEPTED = b"+"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


def send(parent: socket.socket, words: list[str], environment: Mapping[str, str]) -> None:
    """The command, its folder, environment, stdin, stdout and stderr."""
    request = {"words": words, "folder": os.getcwd(), "environment": dict(environment)}
    data = json.dumps(request).encode()
    socket.send_fds(parent, [len(data).to_bytes(4, "big")], [0, 1, 2])
    parent.sendall(data)
    if parent.recv(1) != ACCEPTED:
        raise ConnectionError("it accepts nothing")


def pass_on(parent: socket.socket, number: int) -> None:
    with suppress(OSError):
        parent.send(bytes([number]))


def main(path: str, program: str, *arguments: str) -> int:
    parent = socket.socket(socket.AF_UNIX)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
    try:
        parent.connect(path)
        send(parent, [program, *arguments], os.environ)
    except OSError as error:
        parent.close()
        line = f"fedaccord: the warm process is gone ({error}); starting {program} without it\n"
        sys.stderr.write(line)
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.execv(program, [program, *arguments])
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: pass_on(parent, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(parent.recv(8) or 1)  # no status: the warm process died, not its child
    if code < 0:  # a signal ended the child
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
