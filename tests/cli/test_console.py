"""The group of commands: imports, help, unknown commands, tables."""

import ast
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from rich.console import Console

from fedaccord import __version__
from fedaccord.cli import app
from fedaccord.cli.console import (
    _open_streams,
    make_console,
    print_progress,
    print_table,
    printable,
)
from tests.cli.shell import REPOSITORY, invoke, refusal, success


def loaded(modules: Sequence[str], *words: str) -> list[str]:
    """Those of ``modules`` that a process has imported at the end of a command."""
    code = "import sys; from fedaccord.cli import app\n"
    code += f"try: app()\nfinally: print([name for name in {modules} if name in sys.modules])"
    command = [sys.executable, "-c", code, *words]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return ast.literal_eval(output.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    code = "from fedaccord.cli import app; app()"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code, "presets"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "fedaccord: [Errno 28] No space left on device\n"


def test_progress_goes_on_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = os.pipe()
    os.close(ends[0])
    with open(ends[1], "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        for _ in range(3):
            print_progress("round 1/3")


@pytest.mark.parametrize("words", [("run",), ("presets",), ()])
def test_windows_is_refused_in_one_line(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    line = "fedaccord: needs Linux or macOS; on Windows use WSL\n"
    assert refusal(tmp_path, invoke(*words)) == line


@pytest.mark.parametrize("lost", ["both", "full"])
def test_a_run_goes_on_where_nobody_reads_it(lost: str, tmp_path: Path) -> None:
    """Also one that has a warning in every round."""
    ends = os.pipe()
    os.close(ends[0])
    settings = ("max-client-norm=0.1", "max-failed-rounds=9", "num-server-rounds=3")
    words = ("run", "model=linear", "num-clients=4", *settings, "name=x", f"out-dir={tmp_path}")
    command = [sys.executable, "-c", "from fedaccord.cli import app; app()", *words]
    with open(ends[1], "w") as closed, open("/dev/full", "w") as full:
        streams = {
            "both": (closed, closed),
            "full": (subprocess.PIPE, full),
        }
        out, err = streams[lost]
        ended = subprocess.run(command, stdout=out, stderr=err, check=False)
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["rounds-counted"]) == ("failed", 3, 0)
    assert ended.returncode == 1


def test_a_run_goes_on_without_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedaccord", "run", "model=linear", "num-clients=4"]
    command += ["num-server-rounds=1", "name=x", f"out-dir={tmp_path}"]
    shell = f"{shlex.join(command)} 1>&-"
    ended = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout, ended.stderr) == ("", "")


def test_without_stderr_errors_go_nowhere() -> None:
    shell = f"{shlex.quote(sys.executable)} -m fedaccord compare /none 2>&-"
    ended = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_a_closed_stream_takes_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    _open_streams()
    with sys.stdout:
        print("\udcff")  # of a file's name that is not UTF-8


def test_a_character_that_the_terminal_lacks_is_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedaccord", "run", "model=linear", "num-clients=4"]
    command += ["num-server-rounds=1", "name=über", f"out-dir={tmp_path}"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, capture_output=True, text=True, env=ascii_only, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "\\xfcber" in ended.stdout


@pytest.mark.parametrize("command", ["compare", "evaluate", "measure", "report", "resume"])
def test_a_path_without_a_home_directory_is_one_line(command: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, invoke(command, "~no-such-user/run"))
    assert "no home directory for a path that begins with ~; write the whole path" in line


@pytest.mark.parametrize(
    "words",
    [
        *(("evaluate", ""), ("compare", "x", ""), ("report", "x", "--out", "")),
        *(("deploy", "key", ""), ("measure", ""), ("measure", "x", "")),
    ],
)
def test_an_empty_path_is_not_this_folder(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "expected a path, got an empty one" in refusal(tmp_path, invoke(*words))


@pytest.mark.parametrize("words", ["--help", "run --help", "--version"])
def test_help_imports_no_slow_package(words: str) -> None:
    slow = ("torch", "flwr", "numpy", "pandas", "ray", "sklearn", "psutil")
    assert loaded(slow, *words.split()) == []


def test_a_run_imports_no_unneeded_package(tmp_path: Path) -> None:
    """If the data are decoded already."""
    unneeded = ("sympy", "torch._dynamo", "torchvision", "sklearn", "scipy", "pandas", "ray")
    pairs = ["num-server-rounds=1", "num-clients=4", f"out-dir={tmp_path}"]
    success(invoke("run", *pairs))
    assert loaded(unneeded, "run", *pairs) == []


def test_help_explains_options_arguments_and_pairs() -> None:
    text = " ".join(invoke("run", "--help").stdout.split())
    assert "--list-keys" in text
    assert "Settings, e.g. lr=0.05." in text
    assert text.count("fedaccord run algo=") == 2
    assert "A new folder." in invoke("deploy", "init", "--help").stdout


def test_the_version_is_that_of_the_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == __version__
    assert invoke("--version").stdout == f"fedaccord {__version__}\n"


@pytest.mark.parametrize("name", ["rum", "runn"])
def test_an_unknown_command_is_one_line(name: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, invoke(name))
    assert f"No such command '{name}'" in line
    assert line.lower().count("did you mean") == 1
    assert line.endswith(" See fedaccord --help.\n")


def test_a_line_about_an_option_names_the_help_of_its_command(tmp_path: Path) -> None:
    line = refusal(tmp_path, invoke("run", "--outdir", "x"))
    settings = " Settings have no dashes: lr=0.1. See fedaccord run --help.\n"
    assert line.endswith(f"No such option '--outdir'.{settings}")
    line = refusal(tmp_path, invoke("run", "--lr", "0.1"))
    assert line.endswith(f"No such option '--lr'.{settings}")


def test_a_group_without_a_command_is_its_help() -> None:
    result = invoke("deploy")
    assert (result.exit_code, result.stderr) == (2, "")
    assert "certificates" in result.stdout


def test_no_help_text_is_cut_off() -> None:
    """No paragraph of a command's help ends with a conjunction or a preposition."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {name: command})
        for each in inner.values():
            for paragraph in (each.help or "").split("\n\n"):
                last = paragraph.split()[-1:]
                assert last not in (["or"], ["and"], ["as"], ["of"], ["with"], ["the"]), paragraph


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\r"


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    console.print(f"a{HOSTILE}b")
    print_table(console, ["x", HOSTILE], [[HOSTILE, "1"]])
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert "a\\x1b[2J\\x1b]0;owned\\x07\\u202e\\x9b31m\\rb" in output
    assert printable("ä ± line\nline") == "ä ± line\nline"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 400])
@pytest.mark.parametrize("label", ["fedavg", "afedpdsam lr=0.1 partition=dirichlet model=resnet18"])
def test_a_narrow_table_keeps_every_cell_and_begins_each_block_with_the_first_column(
    width: int, label: str
) -> None:
    heading = ["method", "test-accuracy, last 10", *(f"column {i} to 63.80%" for i in range(9))]
    rows = [[label, "96.21 ± 0.35%", *(f"{i}.35M ± 156.2k" for i in range(9))]]
    console = Console(width=width, record=True, color_system=None, quiet=False, force_terminal=True)
    with console.capture() as capture:
        print_table(console, heading, rows)
    text = capture.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for cell in rows[0][1:]:
        assert text.count(cell) == 1
    for word in label.split():
        assert text.count(word) == text.count("method")
    assert text.index("96.21 ± 0.35%") < text.index("0.35M")
    assert (text.count("method") == 1) == (width == 400)
