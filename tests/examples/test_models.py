"""The examples of a ResNet with BatchNorm and of LoRA adapters, started as programs."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


def test_adapters_are_a_small_part_of_the_model() -> None:
    if find_spec("peft") is None:  # importing it takes seconds, here for nothing
        pytest.skip("expected peft: uv sync --group examples --inexact")
    first, line = start("lora/adapters.py", "scaffold", "--rounds", "2")
    assert first == "3779 of 56774 parameters are trained"
    assert line.startswith("scaffold ")
