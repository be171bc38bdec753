"""The examples of a ResNet with BatchNorm and of LoRA adapters, run as programs."""

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def start(name: str, *words: str) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.mark.slow
def test_a_resnet_from_a_frozen_stem() -> None:
    (line,) = start("resnet/transfer.py", "fedinit", "--rounds", "1")
    name, *accuracies = line.split()
    assert name == "fedinit"
    assert len(accuracies) == 2
    assert all(0 < float(value.rstrip("%")) < 100 for value in accuracies)


def test_adapters_are_a_small_part_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: importing peft takes seconds without importing PyTorch again."""
    pytest.importorskip("peft", reason="expected peft: uv sync --group examples --inexact")
    monkeypatch.setattr(sys, "argv", ["adapters.py", "scaffold", "--rounds", "1"])
    run_path(str(EXAMPLES / "lora" / "adapters.py"), run_name="__main__")
    first, line = capsys.readouterr().out.splitlines()
    assert first == "3779 of 56774 parameters are trained"
    assert line.startswith("scaffold ")
