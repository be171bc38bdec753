"""`fedaccord flwr-config`: one line that Flower reads as the same settings."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import get_fused_config_from_dir, parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from fedaccord.cli.flwr_config import run_config
from fedaccord.cli.settings import read_begun, read_settings
from fedaccord.config import RunConfig
from tests.cli.shell import REPOSITORY, invoke, refusal, run, success


def read_by_flower(line: str) -> dict[str, Any]:
    """The run config of a line: read by shell and Flower, joined with the app's defaults."""
    (argument,) = shlex.split(line)
    return get_fused_config_from_dir(REPOSITORY, parse_config_args([argument]))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["algo=scaffold", "lr=1e-5", "download=true", "dataset=cifar10", "weight-decay=0"],
        ["--preset", "dfedsam-mgs", "seed=7", "sam.rho=0.05"],
        ['name=it\'s a "name" with = \\ and é', "out-dir=/some where/it's"],
        ["name=ends in \\"],
    ],
    ids=str,
)
def test_flower_reads_the_given_settings(words: list[str]) -> None:
    result = success(invoke("flwr-config", *words))
    assert result.stdout.count("\n") == 1
    preset = words[1] if words[:1] == ["--preset"] else None
    pairs = words[2:] if preset else words
    expected = RunConfig.make(read_settings(pairs, read_begun(None, preset))).flat
    assert RunConfig.make(read_by_flower(result.stdout)).flat == expected


@given(st.text(st.characters(exclude_categories=["C"]) | st.sampled_from("\n\t'\"\\= ")))
def test_any_string_survives(text: str) -> None:
    assert parse_config_args([run_config({"name": text})]) == {"name": text}


def test_the_line_has_what_was_typed_but_no_other_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that Flower packs may have other defaults."""
    monkeypatch.chdir(tmp_path)
    words = ("algo=fedavg", "lr=0.1", "dataset=npz", "data-dir=own.npz", "gossip.steps=2")
    result = invoke("flwr-config", *words)
    line = f'algo="fedavg" dataset="npz" data-dir="{tmp_path}/own.npz" lr=0.1 gossip.steps=2'
    assert shlex.split(result.stdout) == [line]
    assert result.stderr == ("warning: gossip.steps=2 has no effect: it needs gossip.topology\n")


def test_the_config_of_a_run_gives_its_settings(tmp_path: Path) -> None:
    success(run(tmp_path, "algo=scaffold", "name=a"))
    result = invoke("flwr-config", "--config", tmp_path / "runs" / "a" / "config.toml", "name=b")
    flat = RunConfig.make(read_by_flower(result.stdout)).flat
    assert (flat["algo"], flat["num-clients"], flat["name"]) == ("scaffold", 4, "b")


def test_a_file_that_is_a_pipe_is_read_once() -> None:
    """As `--config <(command)` is."""
    reader, writer = os.pipe()
    os.write(writer, b'algo = "fedavg"\nlr = 0.1\nseed = 5\n')
    os.close(writer)
    result = success(invoke("flwr-config", "--config", f"/dev/fd/{reader}", "seed=6"))
    os.close(reader)
    assert shlex.split(result.stdout) == ['algo="fedavg" seed=6 lr=0.1']


def test_an_invalid_setting_gives_one_line(tmp_path: Path) -> None:
    assert "lr: expected above 0" in refusal(tmp_path, invoke("flwr-config", "lr=0"))
