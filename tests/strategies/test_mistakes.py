"""What is easily taken for something near it: layers for vectors, clients for samples, a share."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.core.cohort import Cohort
from fedaccord.core.rule import LocalRule, Model
from fedaccord.core.vectors import Vector, fill, leaves
from fedaccord.federation.sampling import cohort_size
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.relaxed_init import RelaxedState
from fedaccord.strategies import METHODS
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.scaffold import ClientState
from tests.federation import half_square, linear
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import federate

C, T, K = 6, 4, 3
LEAST_SQUARES = LeastSquares(C, num_rows=14, dim=12, seed=3)
W0 = np.random.default_rng(1).normal(size=12)
SETTINGS: dict[str, Any] = {"precision": "float64", "lr": 0.04, "clip_norm": 7.0}


# --- a model is one vector ------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"dispfl", "fedmuon"}))
def test_where_a_model_is_cut_into_layers_is_nothing_to_a_method(name: str) -> None:
    """Norms run over all parameters at once: of the clip, of SAM's and all other perturbations.

    Only DisPFL, whose masks have a density for each layer, and FedMuon, whose steps are of
    matrices, read the shapes.
    """
    kind = METHODS[name]
    method = kind(local_steps=1 if kind is S.DPSGD else K, **SETTINGS, fraction_train=1.0)
    everyone = kind.all_clients or method.topology.is_decentralised
    schedule = problem.everyone(C, T) if everyone else problem.cohorts(C, 4, T, seed=1)
    one, several = (
        federate(method, LEAST_SQUARES, W0, schedule, shapes=shapes).weights
        for shapes in ([[12]], [[2, 3], [4], [1, 2]])
    )
    assert torch.equal(one, several)
    assert (one[-1] - one[0]).norm() > 0.01


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_fewer_rounds_is_the_beginning_of_one_with_more(name: str) -> None:
    """Unless a method says that it anneals."""
    kind = METHODS[name]
    method = kind(local_steps=1 if kind is S.DPSGD else K, **SETTINGS, fraction_train=1.0)
    short, long = (
        federate(method, LEAST_SQUARES, W0, problem.everyone(C, rounds)).weights
        for rounds in (2 * T, 3 * T)
    )
    assert torch.equal(short, long[: 2 * T + 1]) != kind.anneals


# --- a mean over samples --------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["fedavg", "fedsam", "fedsmoo", "feddeper", "dfedavgm"])
def test_the_training_loss_is_the_mean_over_samples_at_the_model_received(algo: str) -> None:
    """Not over clients, nor at the points beside it where some methods take gradients."""
    sizes = [12, 3, 7, 1, 5, 2]
    clients = [(x[:n], y[:n]) for (x, y), n in zip(LEAST_SQUARES.clients(), sizes, strict=True)]
    losses = [half_square(x @ torch.from_numpy(W0)[:, None], y).item() for x, y in clients]
    history = simulate(
        algo,
        clients=clients,
        model=linear(W0),
        loss=half_square,
        participation=1.0,
        rounds=1,
        local_steps=1,
        batch_size=0,
        dtype=torch.float64,
    )
    expected = np.average(losses, weights=sizes)
    assert history.metrics["train-loss"].iloc[1] == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx(np.mean(losses), rel=0.05)


# --- a share of the clients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "num_clients", "size"),
    [(0.3, 8, 2), (0.35, 8, 3), (0.45, 8, 4), (0.05, 8, 1), (0.29, 100, 29), (0.58, 50, 29)],
)
def test_a_cohort_is_the_nearest_number_of_clients(
    fraction: float, num_clients: int, size: int
) -> None:
    """Also where the product is a rounding error below it: 0.29 * 100 is 28.999999999999996."""
    assert cohort_size(fraction, num_clients) == size


# --- a memory around a memory ---------------------------------------------------------------------


def test_a_state_inside_two_others_is_found_again() -> None:
    """Two plug-ins with a memory: the names of their vectors do not meet."""
    one, two, three = (torch.full((2,), x) for x in (1.0, 2.0, 3.0))
    state = RelaxedState(one, RelaxedState(two, ClientState(three)))
    vectors = dict(leaves(state))
    assert list(vectors) == ["last", "base.last", "base.base.c_i"]
    nothing = torch.empty(0)
    copy = fill(RelaxedState(nothing, RelaxedState(nothing, ClientState(nothing))), vectors)
    assert copy.last is one
    assert copy.base.last is two
    assert copy.base.base.c_i is three


# --- what a method does not say -------------------------------------------------------------------


class Silent(FederatedStrategy):
    """A server step of which nothing is declared."""

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        return cohort.mean(ups.w).abs(), state


def test_a_step_of_which_nothing_is_declared_is_neither_mixed_nor_weighted() -> None:
    """|w_bar| does not commute with mixing, and nothing says that it would."""
    line = r"^Silent does not support Gossip: its server step is not declared linear$"
    with pytest.raises(ValueError, match=line):
        Silent(plugins=(S.Gossip(),))
    with pytest.raises(ValueError, match=r"^weighting: expected uniform with Silent, got"):
        Silent(weighting="examples")
