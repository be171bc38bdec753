"""precision=auto: bfloat16 where a trial shows it faster, and from then on as chosen."""

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaccord import engine
from fedaccord.config import RunConfig
from fedaccord.engine import precision
from fedaccord.engine.precision import Choice
from fedaccord.strategies import FedAvg
from fedaccord.task import Clients, Task


class SlowIn(nn.Linear):
    """Computes for a while longer in one precision."""

    slow: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        until = time.process_time() + 0.005
        while y.dtype == self.slow and time.process_time() < until:
            pass
        return y


def task(slow: torch.dtype) -> Task:
    module = SlowIn(3, 2)
    module.slow = slow
    clients = Clients([torch.randn(4, 3)] * 2, [torch.randint(2, (4,))] * 2)
    return Task(lambda: module, clients)


def test_the_faster_is_chosen_and_the_model_stays() -> None:
    for slow, expected in ((torch.float32, "bfloat16"), (torch.bfloat16, "float32")):
        tried = task(slow)
        before = tried.model().w.clone()
        choice = precision.choose(tried, FedAvg(fraction_train=1.0, batch_size=2))
        assert choice.precision == expected
        assert str(choice).startswith(f"{expected}: ")
        assert torch.equal(tried.model().w, before)


def test_a_model_that_fails_is_left_to_the_first_round() -> None:
    broken = Task(lambda: nn.Linear(5, 2), task(torch.float32).clients)
    choice = precision.choose(broken, FedAvg(fraction_train=1.0))
    assert choice == ("float32", "float32: a trial of bfloat16 failed")


def test_what_was_chosen_stands_in_the_config_and_stays_in_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, passes = ["bfloat16"], []
    monkeypatch.setattr(precision, "choose", lambda *_: Choice(chosen.pop(), "told"))
    autocast = torch.autocast

    def seen(*words: Any) -> Any:
        passes.append(words)
        return autocast(*words)

    monkeypatch.setattr(torch, "autocast", seen)

    def run(rounds: int, **more: Any) -> dict[str, Any]:
        keys = {"precision": "auto", "num-server-rounds": rounds, "vectorize": "off"} | more
        keys |= {"name": "x", "out-dir": str(tmp_path), "local-steps": 1, "num-clients": 2}
        path = engine.run(RunConfig.make(keys)).path
        settings: dict[str, Any] = tomllib.loads((path / "config.toml").read_text())["run"]
        return settings

    assert run(1)["precision"] == "bfloat16"
    before = len(passes)
    assert before
    assert run(2, resume=True)["precision"] == "bfloat16"
    assert len(passes) > before
    assert not chosen
