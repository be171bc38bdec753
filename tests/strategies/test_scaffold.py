"""SCAFFOLD's uploads of one vector instead of two. float64."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.config import RunConfig
from fedaccord.plugins.compress import Compress
from fedaccord.strategies import RelaxedInit, Scaffold
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import History, base, close, federate

C, T = 6, 12
LEAST_SQUARES = LeastSquares(C, num_rows=12, dim=10, seed=3)
W0 = np.random.default_rng(1).normal(size=10)
SOME = problem.cohorts(C, 2, T, seed=1)
LOCAL: dict[str, Any] = {"precision": "float64", "lr": 0.05, "local_steps": 3, "server_lr": 0.8}
METHODS = {"scaffold": S.Scaffold, "fedgamma": S.FedGamma}


def run(name: str, **settings: Any) -> History:
    return federate(METHODS[name](**(LOCAL | settings)), LEAST_SQUARES, W0, SOME)


@pytest.mark.parametrize("more", [{}, {"lr_schedule": "cosine"}], ids=["constant", "cosine"])
@pytest.mark.parametrize("name", METHODS)
def test_one_vector_gives_what_two_give(name: str, more: dict[str, Any]) -> None:
    one, both = (run(name, upload=upload, **more) for upload in ("one", "both"))
    close(one.weights, both.weights, 1e-12)
    close(one.end.server.c, both.end.server.c, 1e-12)
    for a, b in zip(one.clients, both.clients, strict=True):
        close(a.c_i, b.c_i, 1e-12)
    assert both.end.server.c.norm() > 0.1
    assert [row["up"] for row in one.metrics] == [2.0] * T  # of two clients
    assert [row["up"] for row in both.metrics] == [4.0] * T
    assert [METHODS[name](upload=u, local_steps=3).cost.up for u in ("one", "both")] == [1, 2]


@pytest.mark.parametrize("method", ["topk", "randk", "sign", "qsgd"])
@pytest.mark.parametrize("name", METHODS)
def test_the_mean_of_c_i_is_c_in_every_round(name: str, method: str) -> None:
    history = run(name, plugins=(Compress(method=method, share=0.3),))
    zero = torch.zeros(10, dtype=torch.float64)
    for states, server in zip(history.states, history.server, strict=True):
        c_i = [zero if state is None else base(state).c_i for state in states]
        close(torch.stack(c_i).mean(0), server.c, 1e-12)
    assert history.server[-1].c.norm() > 0.1


EPOCHS, RELAXED = {"local-steps": 0}, {"relaxed-init.beta": 0.1}
DP = {"sampling": "bernoulli", "dp.clip": 1.0, "dp.noise-multiplier": 0.0}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (EPOCHS, "with local-epochs clients may take unequal numbers of steps"),
        (RELAXED, "relaxed initialisation moves the start"),
        ({"optimizer": "momentum"}, "the steps of momentum are no displacement"),
        ({"gossip.topology": "ring"}, "under gossip no server averages"),
        ({"schedule": "buffered"}, "buffered replies began from different models"),
        (DP, "with dp the server does not know how many replies a sum has"),
    ],
)
def test_one_vector_is_refused_if_the_other_does_not_follow(
    settings: dict[str, Any], why: str
) -> None:
    bare = {"algo": "scaffold", "local-steps": 3} | settings
    with pytest.raises(ValueError, match=rf"upload: expected both with Scaffold, got 'one': {why}"):
        RunConfig.make(bare | {"scaffold.upload": "one"})
    if "gossip.topology" not in settings:
        strategy = RunConfig.make(bare | {"compress.method": "topk"}).strategy
        assert strategy.rule().sends._fields == ("w", "dc_i")


@pytest.mark.parametrize("kind", [S.FedLESAMS, S.FedMoSWA])
def test_methods_that_always_send_two_vectors_refuse_one(kind: type[Scaffold]) -> None:
    with pytest.raises(ValueError, match=rf"upload: expected both with {kind.__name__}, got 'one'"):
        kind(upload="one", local_steps=3)
    compressed = kind(local_steps=3, plugins=(Compress(method="topk"),))
    assert compressed.cost.up == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2),
        ({"compress.method": "topk"}, 1),
        ({"compress.method": "topk", "scaffold.upload": "both"}, 2),
        ({"compress.method": "none"}, 2),
        ({"scaffold.upload": "one"}, 1),
    ],
)
def test_auto_is_one_vector_with_compress(settings: dict[str, Any], expected: int) -> None:
    strategy = RunConfig.make({"algo": "scaffold", "local-steps": 3} | settings).strategy
    assert len(strategy.rule().sends._fields) == expected


def test_relaxed_starts_are_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check the two would differ."""
    both = run("scaffold", upload="both", plugins=(RelaxedInit(beta=0.1),))
    monkeypatch.setattr(S.Scaffold, "_why_both", lambda self: "")
    one = run("scaffold", upload="one", plugins=(RelaxedInit(beta=0.1),))
    assert not torch.allclose(one.weights, both.weights)
