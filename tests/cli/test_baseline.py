"""The last line of a run: the command for plain averaging in the same setting."""

import shlex
from pathlib import Path

import pytest

from fedaccord.cli.baseline import comparison
from fedaccord.cli.settings import read_begun, read_settings
from fedaccord.config import RunConfig, in_use
from tests.cli.shell import run, success


def of(*pairs: str) -> str | None:
    return comparison(RunConfig.make(read_settings(pairs)))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("algo=afedpd dirichlet-alpha=0.1", "algo=fedavg dirichlet-alpha=0.1"),
        ("algo=fedprox fedprox.mu=0.5 sam.rho=0.1 seed=3 name=a", "algo=fedavg seed=3"),
        ("algo=fedavg relaxed-init.beta=0.05", "algo=fedavg"),
        ("algo=feddyn name=a", "algo=fedavg"),
        ("algo=ditto keep-best=personal-accuracy seed=1", "algo=fedavg seed=1"),
        (
            "algo=scaffold sampling=bernoulli dp.epsilon=4 dp.clip=0.5",
            "algo=fedavg sampling=bernoulli dp.epsilon=4.0 dp.clip=0.5",
        ),
        (
            "algo=fedpd fraction-train=1 eval-train=true",
            "algo=fedavg fraction-train=1.0 eval-train=true",
        ),
        (
            "algo=scaffold compress.method=qsgd compress.bits=2 broadcast.dtype=bf16",
            "algo=fedavg compress.method=qsgd compress.bits=2 broadcast.dtype=bf16",
        ),
        (
            "algo=fedinit optimizer=adamw adamw.beta2=0.9 lr=0.001",
            "algo=fedavg optimizer=adamw adamw.beta2=0.9 lr=0.001",
        ),
        ("algo=dfedsam gossip.topology=grid", "algo=dfedavg gossip.topology=grid"),
        ("algo=scaffold gossip.topology=full lr=0.05", "algo=dfedavg lr=0.05 gossip.topology=full"),
    ],
)
def test_the_command_keeps_the_setting_without_the_methods_options(
    pairs: str, expected: str
) -> None:
    line = of(*pairs.split())
    words = shlex.split(line)
    assert words[:2] == ["fedaccord", "run"]
    assert {*words[2:]} == {*expected.split()}


@pytest.mark.parametrize(
    "pairs",
    [
        "algo=fedavg lr=0.05",
        "algo=dfedavg gossip.topology=grid",
        "algo=fedavg sampling=bernoulli dp.epsilon=4",
        "algo=scaffold name=x resume=true",
    ],
)
def test_plain_averaging_and_a_resumed_run_have_no_baseline(pairs: str) -> None:
    assert of(*pairs.split()) is None


def test_words_are_quoted_for_the_shell(tmp_path: Path) -> None:
    word = f"out-dir={tmp_path / 'my runs'}"
    assert shlex.split(of("algo=feddyn", word) or "")[-1] == word


def test_a_run_prints_the_command_and_the_command_runs(tmp_path: Path) -> None:
    last = run(tmp_path, "algo=feddyn", "dirichlet-alpha=0.5").stdout.splitlines()[-1]
    assert last.startswith("compare: fedaccord run algo=fedavg ")
    pairs = shlex.split(last.removeprefix("compare: fedaccord run "))
    again = success(run(tmp_path, *pairs))
    assert again.stdout.splitlines()[-1].startswith("run directory: ")


@pytest.mark.parametrize(
    ("preset", "pairs", "expected"),
    [
        ("fedsam", "lr=0.05", "algo=fedavg lr=0.05"),
        ("fedsam", "seed=3 sam.rho=0.2", "algo=fedavg seed=3"),
        ("feddyn", "dataset=digits", "algo=fedavg dataset=digits"),
        ("dfedsam", "gossip.topology=full", "algo=dfedavg gossip.topology=full"),
    ],
)
def test_with_a_preset_the_command_has_only_the_differences(
    preset: str, pairs: str, expected: str
) -> None:
    settings = RunConfig.make(read_settings(pairs.split(), read_begun(None, preset)))
    line = comparison(settings, preset)
    words = shlex.split(line)
    assert words[:4] == ["fedaccord", "run", "--preset", preset]
    assert words[4:] == expected.split()
    whole = comparison(settings)
    same = RunConfig.make(read_settings(shlex.split(whole)[2:]))
    assert in_use(RunConfig.make(read_settings(words[4:], read_begun(None, preset)))) == in_use(
        same
    )
    assert len(words) < len(shlex.split(whole))
