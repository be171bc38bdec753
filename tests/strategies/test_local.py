"""Local training: each client alone, whoever else takes part."""

from typing import Any

import numpy as np
import pytest

from fedaccord import strategies as S
from fedaccord.strategies import SAM, Gossip, RelaxedInit
from tests import federation
from tests.reference import local, problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import client_vectors, close, federate

C, T, K = 8, 10, 3
LEAST_SQUARES = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
SOME = problem.cohorts(C, 3, T, seed=5)
SETTINGS: dict[str, Any] = {"lr": 0.05, "lr_decay": 0.95, "weight_decay": 0.05, "clip_norm": 5.0}
BATCHES = problem.minibatches(LEAST_SQUARES, T, K, 5, seed=7)


def method(*plugins: SAM) -> S.Local:
    return S.Local(plugins=plugins, precision="float64", local_steps=K, batch_size=0, **SETTINGS)


@pytest.mark.parametrize("rho", [0.0, 0.3])
@pytest.mark.parametrize("batched", [False, True])
def test_equals_the_dense_reference(rho: float, batched: bool) -> None:
    batches = BATCHES if batched else None
    more: dict[str, Any] = {"batches": batches, "sam_rho": rho}
    expected = local.run(LEAST_SQUARES, W0, SOME, local_steps=K, **SETTINGS, **more)
    history = federate(method(SAM(rho=rho)), LEAST_SQUARES, W0, SOME, batches=batches)
    close(history.weights, expected.weights)
    close(history.averages, expected.averages)
    close(client_vectors(history.clients, "w"), expected.clients["w"])


def test_through_messages_equals_the_dense_reference() -> None:
    expected = local.run(LEAST_SQUARES, W0, SOME, local_steps=K, **SETTINGS)
    history = federation.run(method(), LEAST_SQUARES, W0, SOME)
    close(history.averages, expected.averages)
    close(client_vectors(history.clients, "w"), expected.clients["w"])


def test_a_client_does_not_feel_the_others() -> None:
    alone = federate(method(), LEAST_SQUARES, W0, [[0]] * 4)
    among = federate(method(), LEAST_SQUARES, W0, [[0, 1, 2], [0], [0, 5], [0, 1]])
    close(among.clients[0].w, alone.clients[0].w)


@pytest.mark.parametrize("plugin", [Gossip(), RelaxedInit(beta=0.1)], ids=["gossip", "relaxed"])
def test_what_brings_others_in_is_refused(plugin: Gossip | RelaxedInit) -> None:
    with pytest.raises(ValueError, match="does not support"):
        S.Local(plugins=(plugin,))


def test_nothing_is_sent_to_a_client_that_comes_back() -> None:
    assert S.Local().cost[:2] == (0, 1)
