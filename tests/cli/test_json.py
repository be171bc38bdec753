"""Commands that list print the same as JSON."""

import json

import pytest

from fedaccord import config
from fedaccord.experiments.presets import presets
from fedaccord.strategies import METHODS
from tests.cli.shell import invoke, success


def listed(*words: str) -> list[dict[str, object]]:
    result = success(invoke(*words, "--json"))
    rows = json.loads(result.stdout)
    assert isinstance(rows, list)
    return rows


def test_the_methods() -> None:
    rows = listed("methods")
    assert [row["name"] for row in rows] == [*METHODS]
    scaffold = rows[[*METHODS].index("scaffold")]
    assert scaffold["arxiv"] == "1910.06378"
    assert scaffold["cost"] == METHODS["scaffold"](fraction_train=1.0).cost._asdict()


def test_the_presets() -> None:
    rows, text = listed("presets"), invoke("presets").stdout
    assert [row["preset"] for row in rows] == [*presets()]
    assert all(str(row["setting"]) in text for row in rows)


def test_the_keys() -> None:
    rows = listed("run", "--list-keys")
    assert {row["key"]: row["default"] for row in rows} == config.defaults()
    by_key = {row["key"]: row for row in rows}
    assert "fedavg" in str(by_key["algo"]["allowed"])
    assert by_key["lr"]["meaning"]


@pytest.mark.parametrize("pairs", [[], ["lr=-1"]])
def test_the_checks(pairs: list[str]) -> None:
    result = invoke("doctor", *pairs, "--json")
    marks = [check["mark"] for check in json.loads(result.stdout)]
    assert {"mark", "what", "text"} == {*json.loads(result.stdout)[0]}
    assert result.exit_code == ("fail" in marks)
    assert not pairs or "fail" in marks


def test_a_run_has_no_json() -> None:
    result = invoke("run", "--json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
