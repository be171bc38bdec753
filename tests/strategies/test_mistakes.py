"""What is easily taken for something near it: layers for vectors, clients for samples, a share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.core.cohort import Cohort
from fedaccord.core.optimizer import SGD, Optimizer
from fedaccord.core.rounds import broadcast
from fedaccord.core.rule import LocalConfig, LocalRule, Model
from fedaccord.core.vectors import Vector, fill, leaves
from fedaccord.federation.sampling import cohort_size
from fedaccord.federation.settings import own_options
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.relaxed_init import RelaxedState
from fedaccord.strategies import METHODS
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.scaffold import ClientState
from tests.federation import half_square, linear
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import Federation, close, federate

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
    method = make(METHODS[name])
    one, several = (
        federate(method, LEAST_SQUARES, W0, cohorts_of(method), shapes=shapes).weights
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


# --- a model or a change, an option or none -------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"dispfl", "local"}))
def test_if_all_models_shift_so_do_the_declared_ones_of_an_upload(name: str) -> None:
    """Compression, noise and late replies act on the change of a model, and on other fields as they
    are. A shift changes which parameters are the largest, of which DisPFL's masks are made, and no
    broadcast precedes the uploads of `local`."""
    kind, shift = METHODS[name], np.linspace(1.0, 2.0, 12)
    settings = SETTINGS | {"weight_decay": 0.0, "fraction_train": 1.0}
    method = kind(local_steps=1 if kind is S.DPSGD else K, **settings)
    shifted = LeastSquares(C, num_rows=14, dim=12, seed=3)
    shifted.b = shifted.b + shifted.A @ shift
    partial = not kind.all_clients and not method.topology.is_decentralised
    ups = []
    for least_squares, w0 in ((LEAST_SQUARES, W0), (shifted, W0 + shift)):
        f = Federation(method, least_squares, w0, T, shapes=[[3, 2], [2, 3]])
        f.take(range(C))
        f.take(range(C - 1) if partial else range(C))
        ups.append(f.train(C - 1, broadcast(method, f.s, C - 1)).up)
    rule = method.rule()
    for field in rule.sends._fields:
        of_models = torch.from_numpy(shift) if field in rule.models else 0.0
        close(getattr(ups[1], field), getattr(ups[0], field) + of_models, 1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_changes_its_path(name: str) -> None:
    """The models, or what clients keep; else no half reads the option."""
    kind = METHODS[name]
    default = path(make(kind))
    for field in own_options(kind):
        assert any(path(other) != default for other in others(kind, field)), (
            f"{kind.__name__}.{field.name} has no effect: does rule() or aggregate() read it?"
        )


def make(kind: type[FederatedStrategy], **own: Any) -> FederatedStrategy:
    steps = 1 if kind is S.DPSGD else K
    return kind(**SETTINGS, local_steps=steps, fraction_train=1.0, **own)


def cohorts_of(method: FederatedStrategy) -> list[list[int]]:
    """Four clients a round, or all if the method needs them."""
    everyone = method.all_clients or method.topology.is_decentralised
    return problem.everyone(C, T) if everyone else problem.cohorts(C, 4, T, seed=1)


def path(method: FederatedStrategy) -> list[Any]:
    """The models after each round and the clients' last states, as numbers."""
    everyone, shapes = problem.everyone(C, T), [[3, 2], [2, 3]]
    history = federate(method, LEAST_SQUARES, W0, everyone, shapes=shapes)
    states = [vector.tolist() for state in history.clients for _, vector in leaves(state)]
    return [history.weights.tolist(), states]


def others(kind: type[FederatedStrategy], field: Any) -> Iterator[FederatedStrategy]:
    """The method with other values of an option, those that it accepts."""
    values = field.metadata["choices"]
    match field.default:
        case bool(x):
            values = (not x,)
        case int(x):
            values = (x + 1, x - 1)
        case float(x):
            values = (x * 2, x / 2, 0.3)
    for value in values:
        needs = {name: those[0] for name, those in field.metadata["only"].items()}
        try:
            method = make(kind, **needs, **{field.name: value})
        except ValueError:
            continue
        if value != field.default:
            yield method


# --- a rate or the length of a step ---------------------------------------------------------------


@dataclass(frozen=True)
class DoubleStep(Optimizer):
    """Steps of SGD at twice the rate."""

    def step(
        self, w: Vector, d: Vector, own: Any, lr: Any, decay: float, config: LocalConfig
    ) -> None:
        w.sub_(d, alpha=2 * lr)


TAKES_ANY = [
    name
    for name, kind in METHODS.items()
    if not kind.assumes_sgd and isinstance(kind(fraction_train=1.0).own_optimizer(), SGD)
]


@pytest.mark.parametrize("name", TAKES_ANY)
def test_an_optimizer_with_steps_twice_as_long_has_half_the_rate(name: str) -> None:
    """Unless the formulas assume plain SGD, which such a method is to declare."""
    # under SGD alone the gradients are weighted by rates that fall
    own = {"rho": 1.0} if name == "fedmoswa" else {}
    plain = make(METHODS[name], weight_decay=0.0, **own)
    other = replace(plain, lr=plain.lr / 2, local_optimizer=DoubleStep())
    twice, once = (
        federate(method, LEAST_SQUARES, W0, cohorts_of(method), shapes=[[3, 2], [2, 3]]).weights
        for method in (other, plain)
    )
    close(twice, once)
    assert (once[-1] - once[0]).norm() > 0.01


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
