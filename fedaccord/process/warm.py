"""A process that has imported the packages of some commands, and forks a child for each call.

Programs that start a command by its name find a small one earlier in PATH, which hands its
arguments, folder, environment and open files to the warm process (`process/hand_over.py`) and exits
with the child's status. A child shares the memory of the imports and saves their time; the modules
of one package are excluded, so each child imports the version that is meant for it.
"""

import atexit
import fcntl
import json
import os
import selectors
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from fedaccord.process.hand_over import ACCEPTED

Commands = Mapping[str, Callable[[], object]]  # name -> what it calls, with sys.argv
HANDSHAKE = 5.0  # seconds that a caller has to send its request
PATIENCE = 10.0  # seconds for children to exit by themselves after their program


class Call(NamedTuple):
    """A called command; ``child``: its process."""

    caller: socket.socket
    child: Any


@contextmanager
def warm(commands: Commands, forget: str) -> Iterator[None]:
    """A block in which the commands are children of a fork of this process, which must have one
    thread and has imported their packages.

    forget: the package whose modules the children import anew. The fork ends with the block, or
    with this process, however it ends. Raises OSError if there is no room for its folder or its
    name is too long, and FileNotFoundError, in one line, if a command is not in PATH.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedaccord-"))  # which this user alone can enter
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # systemd's cleaning of old files in /tmp leaves it out
    before = os.environ["PATH"]
    ours, theirs = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            _bind(listener, folder)
            listener.listen(16)
            for name in commands:
                _write_caller(folder, name)
            if os.fork() == 0:
                os.close(theirs)
                _serve(listener, ours, commands, forget, folder)
        os.environ["PATH"] = os.pathsep.join((str(folder), before))
        yield
    finally:
        os.environ["PATH"] = before
        for file in (theirs, ours, lock):
            os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


def _bind(listener: socket.socket, folder: Path) -> None:
    try:
        listener.bind(str(folder / "socket"))
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(  # Python's own "AF_UNIX path too long"
            f"expected a shorter folder for a socket, got {folder.parent}: set TMPDIR"
        ) from None


def _write_caller(folder: Path, name: str) -> None:
    """The small program that replaces the command."""
    program = shutil.which(name)
    if program is None:
        raise FileNotFoundError(
            f"expected the command {name} in PATH, found none: add the environment's bin folder"
        )
    script = Path(__file__).with_name("hand_over.py")
    words = (sys.executable, "-IS", str(script), str(folder / "socket"), program)
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    path.chmod(stat.S_IRWXU)
    if not os.access(path, os.X_OK):
        raise PermissionError(
            "expected a folder whose programs can be started, got "
            f"{folder.parent}, which is mounted noexec: set TMPDIR to another one"
        )


def _serve(
    listener: socket.socket, program: int, commands: Commands, forget: str, folder: Path
) -> None:
    """The life of the warm process, which never returns.

    program: a pipe whose other end the process that forked this one holds.
    """
    os.setsid()  # Ctrl-C reaches the children through their callers, once
    calls: list[Call] = []
    selector = selectors.PollSelector()  # has no file: macOS's kqueue is not inherited by a child
    selector.register(program, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)

    def start() -> None:
        caller, _ = listener.accept()
        with suppress(OSError, ValueError, KeyError):
            caller.settimeout(HANDSHAKE)
            request, files = _receive(caller)
            caller.sendall(ACCEPTED)
            command = commands[Path(request["words"][0]).name]
            others = [listener, program, caller, *(call.caller for call in calls)]
            words = (command, forget, request, files, others)
            child = get_context("fork").Process(target=_become, args=words)
            child.start()
            for file in files:
                os.close(file)
            calls.append(call := Call(caller, child))
            selector.register(caller, selectors.EVENT_READ, call)
            selector.register(child.sentinel, selectors.EVENT_READ, call)
            return
        caller.close()

    try:
        while True:
            for key, _ in selector.select():
                call: Call | None = key.data
                if key.fileobj == program:
                    return
                if call is None:
                    start()
                elif call not in calls:  # it ended in this batch of events
                    continue
                elif key.fileobj is call.caller:
                    _pass_on(call, selector)
                else:
                    _report(call, selector)
                    calls.remove(call)
    except BaseException:
        traceback.print_exc()
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        end = time.monotonic() + PATIENCE
        for call in calls:
            call.child.join(max(0.0, end - time.monotonic()))
            call.child.kill()
        os._exit(0)


def _receive(caller: socket.socket) -> tuple[Any, list[int]]:
    """The request and the caller's open files."""
    length, files, _, _ = socket.recv_fds(caller, 4, 3)
    data, missing = b"", int.from_bytes(length, "big")
    while missing > len(data):
        part = caller.recv(missing - len(data))
        if not part:
            raise ConnectionError("the caller is gone")
        data += part
    return json.loads(data), files


def _become(
    command: Callable[[], object], forget: str, request: Any, files: list[int], others: list[Any]
) -> None:
    """The child: run the command as if the caller had started it.

    others: open files that belong to the warm process only.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for other in others:
        os.close(other if isinstance(other, int) else other.fileno())
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["words"]
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{forget}.")]:
        del sys.modules[name]
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new process: children do not share numbers
    try:
        command()
    finally:
        atexit._run_exitfuncs()


def _pass_on(call: Call, selector: selectors.BaseSelector) -> None:
    """Forward a signal that the caller received; if the caller was killed, kill the child."""
    try:
        number = call.caller.recv(1)
    except OSError:
        number = b""
    if number:
        with suppress(ProcessLookupError):
            os.kill(call.child.pid, number[0])
    else:
        selector.unregister(call.caller)
        call.child.kill()


def _report(call: Call, selector: selectors.BaseSelector) -> None:
    """Report the child's exit status to the caller."""
    call.child.join()
    selector.unregister(call.child.sentinel)
    with suppress(KeyError):
        selector.unregister(call.caller)
    with suppress(OSError):
        call.caller.sendall(str(call.child.exitcode).encode())
    call.caller.close()
    call.child.close()
