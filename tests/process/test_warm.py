"""The process that forks commands: as if each had been started by itself, and nothing stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedaccord.compat import supernode
from fedaccord.process import warm as process_warm

# the command executes its first word; the one that PATH has says so
DRIVER = """
import os, sys, threading
import forgotten, numpy.random, shared
from fedaccord.process import warm

def fake():
    exec(sys.argv[1])

shared.value = forgotten.value = "of the warm process"
warm.PATIENCE = 0.2
with warm.warm({"fake": fake}, forget="forgotten"):
    print(os.environ["PATH"], flush=True)
    sys.stdin.read()
"""


class Warm(NamedTuple):
    program: subprocess.Popen[str]
    folder: Path  # its own, private
    path: str  # PATH within the block

    def start(self, code: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PATH": self.path, "OWN": "\udcff"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            ["fake", code, *words], env=environment, text=True, **{**pipes, **options}
        )

    def call(self, code: str, *words: str, **options: Any) -> tuple[int, str, str]:
        with self.start(code, *words, **options) as process:
            output, errors = process.communicate("given\n", timeout=60)
        return process.returncode, output, errors

    @property
    def parent(self) -> int:
        """The warm process."""
        _, output, _ = self.call("import os; print(os.getppid())")
        return int(output)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    own = tmp_path / "bin"
    own.mkdir()
    (own / "fake").write_text('#!/bin/sh\necho "the real one: $*"\nexit 5\n')
    (own / "fake").chmod(0o755)
    for name in ("forgotten", "shared"):
        (tmp_path / f"{name}.py").write_text("value = 'of the file'\n")
    environment = {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), *sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout
        path = program.stdout.readline().rstrip()
        yield Warm(program, Path(path.split(os.pathsep)[0]), path)
        program.kill()


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_is_the_command_as_the_caller_started_it(warm: Warm, tmp_path: Path) -> None:
    code = (
        "import atexit, os, sys; atexit.register(print, 'at exit');"
        "print(sys.argv[2:], os.getcwd(), os.environ['OWN'] == '\\udcff', os.read(0, 99));"
        "print('wrong', file=sys.stderr); sys.exit(7)"
    )
    expected = f"['a', 'b c'] {tmp_path} True b'given\\n'\nat exit\n"
    assert warm.call(code, "a", "b c", cwd=tmp_path) == (7, expected, "wrong\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import shared; print(shared.value)", "of the warm process"),
        ("import forgotten; print(forgotten.value)", "of the file"),
        ("import threading; print(threading.active_count())", "1"),
    ],
)
def test_a_child_has_the_imports_but_those_of_one_package(
    code: str, expected: str, warm: Warm
) -> None:
    assert warm.call(code) == (0, f"{expected}\n", "")


def test_children_draw_numbers_of_their_own(warm: Warm) -> None:
    """As new processes, though they have NumPy's generator from the warm one."""
    code = "import sys; print(sys.modules['numpy'].random.rand())"
    (ended, one, _), (_, other, _) = warm.call(code), warm.call(code)
    assert ended == 0
    assert float(one) != float(other)


def test_a_child_is_in_another_session(warm: Warm) -> None:
    """Ctrl-C signals the terminal's processes: the caller, which passes it on, not the child."""
    assert int(warm.call("import os; print(os.getsid(0))")[1]) != os.getsid(0)


@pytest.mark.parametrize("code", ["raise ValueError('no')", "import sys; sys.exit('no')"])
def test_an_error_of_a_command_is_that_of_a_process(code: str, warm: Warm) -> None:
    code_of, output, errors = warm.call(code)
    assert (code_of, output) == (1, "")
    assert errors.rstrip().endswith("no")
    assert warm.call("print(1)") == (0, "1\n", "")


def test_children_run_at_once_and_share_no_file_of_the_warm_process(warm: Warm) -> None:
    code = "import os; print(len(os.listdir('/proc/self/fd')), flush=True); os.read(0, 1)"
    processes = [warm.start(code) for _ in range(3)]
    counts = [int(process.stdout.readline()) for process in processes if process.stdout]
    assert max(counts) - min(counts) <= 4  # the pipes of earlier children
    for process in processes:
        process.communicate("x", timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]


SLEEP = "print(os.getpid(), flush=True); time.sleep(600)"
HANDLED = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));"


@pytest.mark.parametrize(
    ("code", "number", "to_child", "expected"),
    [
        (HANDLED, signal.SIGTERM, False, 9),  # passed on
        ("", signal.SIGTERM, False, -signal.SIGTERM),
        ("", signal.SIGKILL, False, -signal.SIGKILL),
        ("", signal.SIGKILL, True, -signal.SIGKILL),  # as reported
        ("", signal.SIGSEGV, True, -signal.SIGSEGV),
    ],
)
def test_signals(code: str, number: int, to_child: bool, expected: int, warm: Warm) -> None:
    with warm.start(f"import os, signal, sys, time; {code} {SLEEP}") as process:
        assert process.stdout
        child = int(process.stdout.readline())
        os.kill(child if to_child else process.pid, number)
        assert process.wait(60) == expected
    wait(lambda: not is_running(child))
    assert warm.call("print(1)")[0] == 0


def test_without_the_warm_process_the_command_itself_is_started(warm: Warm) -> None:
    os.kill(warm.parent, signal.SIGKILL)
    for _ in range(2):
        code, output, errors = warm.call("print(1)", "a")
        assert (code, output) == (5, "the real one: print(1) a\n")
        assert errors.count("\n") == 1
        assert errors.startswith("fedaccord: the warm process is gone (")
        assert "bin/fake without it" in errors
    warm.program.communicate("", timeout=60)
    assert not warm.folder.exists()


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_nothing_stays_when_the_program_ends(end: str, warm: Warm) -> None:
    assert warm.folder.stat().st_mode & 0o777 == 0o700
    parent = warm.parent
    with warm.start(f"import os, time; {SLEEP}") as process:
        assert process.stdout
        child = int(process.stdout.readline())
        if end == "killed":
            warm.program.kill()
        else:
            assert warm.program.stdin
            warm.program.stdin.close()
        wait(lambda: not (is_running(child) or is_running(parent) or warm.folder.exists()))
        process.wait(60)


def test_a_command_that_is_not_there_is_one_line() -> None:
    code = "from fedaccord.process.warm import warm\nwith warm({'no-such': print}, 'x'): pass"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = run.stderr.splitlines()[-1]
    reason = "expected the command no-such in PATH, found none: add the environment's bin folder"
    assert line == f"FileNotFoundError: {reason}"


def test_children_start_where_a_selector_does_not_survive_a_fork(tmp_path: Path) -> None:
    """As macOS's kqueue, which a child does not inherit."""
    (tmp_path / "fake").write_text("#!/bin/sh\necho the real one\n")
    (tmp_path / "fake").chmod(0o755)
    code = """
import os, selectors, subprocess

class Kqueue(selectors.PollSelector):
    def __init__(self):
        super().__init__()
        self.pid = os.getpid()
    def fileno(self):
        if os.getpid() != self.pid:
            raise ValueError("I/O operation on closed kqueue object")
        return os.dup(0)

selectors.DefaultSelector = Kqueue
from fedaccord.process.warm import warm
with warm({"fake": lambda: print("of the warm process")}, forget="forgotten"):
    subprocess.run(["fake"], check=True)
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-c", code]
    output = subprocess.check_output(command, env={**os.environ, "PATH": path}, text=True)
    assert output == "of the warm process\n"


def test_a_folder_too_long_for_a_socket_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    line = f"expected a shorter folder for a socket, got {folder}: set TMPDIR"
    with (
        pytest.raises(OSError, match=line),
        process_warm.warm({"sh": lambda: None}, forget="none"),
    ):
        pass
    assert not [*folder.iterdir()]


def test_pauses_of_a_supernode_grow_while_it_is_idle() -> None:
    class Clock:
        now = 0.0
        sleeps: list[float] = []  # noqa: RUF012

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.sleeps.append(seconds)
            self.now += seconds

    pauses = supernode.Pauses(clock := Clock())
    for pause in (3, 3, 0.5):
        pauses.sleep(pause)
    clock.now += 2.0  # it sends the reply
    pauses.sleep(3)
    clock.now += 100
    pauses.sleep(3)
    assert clock.sleeps == pytest.approx([0.1, 0.1, 0.05, 0.41, 3.0])


def test_a_folder_whose_programs_cannot_be_started_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the commands themselves are started for each message, without a word."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: tmp_path not in Path(path).parents)
    line = f"got {tmp_path}, which is mounted noexec: set TMPDIR"
    with (
        pytest.raises(PermissionError, match=line),
        process_warm.warm({"sh": lambda: None}, forget="none"),
    ):
        pass
    assert not [*tmp_path.iterdir()]
