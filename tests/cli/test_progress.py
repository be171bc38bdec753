"""The output of a run during its rounds and at its end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedaccord.cli.progress import Display, summary_table
from fedaccord.config import RunConfig
from fedaccord.core.rounds import first_state
from fedaccord.federation.round import Round
from fedaccord.strategies import FedAvg

CONSOLE = Console(width=200, force_terminal=False)


def test_a_metric_of_an_earlier_round_is_shown_with_that_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(CONSOLE, RunConfig.make({"num-server-rounds": 4}), [])
    s = first_state(FedAvg(), torch.zeros(1), num_clients=1)
    for number, metrics in enumerate([{"test-accuracy": 0.1}, {}, {}, {"test-accuracy": 0.25}, {}]):
        loss = {"train-loss": 2.0} if number in (1, 2, 3) else {}
        display.on_round(Round(s._replace(t=number), s.w, metrics | loss, []))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "round 0/4  test accuracy 10.00%",
        "round 1/4  test accuracy 10.00% (round 0)  train loss 2  0:00:00 left",
        "round 2/4  test accuracy 10.00% (round 0)  train loss 2  0:00:00 left",
        "round 3/4  test accuracy 25.00%  train loss 2  0:00:00 left",
        "round 4/4  test accuracy 25.00% (round 3)  train loss 2 (round 3)",
    ]


def shown(folder: Path, **more: Any) -> dict[str, str]:
    summary = {"rounds": 12, "rounds-counted": 12, "replies": 120, "dropped": 0, "seconds": 1.0}
    traffic = {"down-bytes": 1e6, "up-bytes": 2e6}
    (folder / "summary.json").write_text(json.dumps(summary | traffic | more))
    table = summary_table("fedavg", folder)
    cells = (list(column.cells) for column in table.columns)
    return dict(zip(*cells, strict=True))  # type: ignore[arg-type]


def test_the_final_table_has_dropped_replies_and_rounds_that_did_not_count(tmp_path: Path) -> None:
    good = shown(tmp_path)
    assert (good["rounds"], good["replies dropped"]) == ("12", "0 of 120")
    assert good["test accuracy, last"] == "none"
    poor = shown(tmp_path, **{"rounds-counted": 11, "replies": 100, "dropped": 20})
    assert (poor["rounds"], poor["replies dropped"]) == ("12, 11 counted", "20 of 120")


def test_the_traffic_of_a_small_model_is_not_zero(tmp_path: Path) -> None:
    table = shown(tmp_path, **{"down-bytes": 0, "up-bytes": 4567, "peer-bytes": 12_345_678})
    ways = [table[f"MB {way}"] for way in ("down", "up", "between peers")]
    assert ways == ["0", "0.0046", "12.3"]


def test_metrics_of_personal_models_are_shown_also_of_numbers(tmp_path: Path) -> None:
    metrics = {"personal-mae-last": 0.25, "personal-accuracy-last": 0.5, "client-loss-std-last": 1}
    texts = {title: text for title, text in shown(tmp_path, **metrics).items() if "rson" in title}
    assert texts == {
        "accuracy of personal models, last": "50.00%",
        "mean absolute error of personal models, last": "0.2500",
    }


def test_metrics_of_clients_are_shown_like_those_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display(CONSOLE, RunConfig.make({"num-server-rounds": 1}), [])
    s = first_state(FedAvg(), torch.zeros(1), num_clients=1)
    display.on_round(Round(s, s.w, {"client-accuracy": 0.1, "client-accuracy-std": 0.2}, []))
    assert capsys.readouterr().out.rstrip() == "round 0/1  client accuracy 10.00%"
    ends = {"last": 0.5, "mean-of-last-10": 0.25, "best": 0.75}
    metrics = {f"client-accuracy-{end}": value for end, value in ends.items()}
    alone = shown(tmp_path, **metrics, **{"client-loss-last": 2.0})
    assert alone["client loss, last"] == "2.0000"
    percents = [text for title, text in alone.items() if "accuracy" in title]
    assert percents == ["50.00%", "25.00%", "75.00%"]
    both = shown(tmp_path, **metrics, **{"client-loss-last": 2.0, "test-loss-last": 1.0})
    assert (both["test loss, last"], both["client loss, last"]) == ("1.0000", "2.0000")
