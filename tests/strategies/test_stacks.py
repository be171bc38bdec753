"""All mathematics holds over (..., d): a stack of clients at once is each of them alone.

The client half of every method in every plug-in, n clients in one `client_round`; the server half
of every method, m federations in one `aggregate`. To 1e-12 in float64.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaccord import strategies as S
from fedaccord.core.cohort import Client, Reply
from fedaccord.core.rounds import ClientRound, broadcast, client_round
from fedaccord.core.topology import RoundInfo, Star
from fedaccord.core.vectors import leaves, map_vectors, row, stack
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import GossipTopology
from fedaccord.strategies import METHODS, SAM, Gossip, RelaxedInit
from fedaccord.strategies.fedpd import is_silent
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import Dense, Federation, close

C, K, N = 5, 3, 4
LEAST_SQUARES = LeastSquares(C, num_rows=14, dim=12, seed=3)
SHAPES = [[2, 4], [4]]
W0 = np.random.default_rng(1).normal(size=12)
BATCHES = problem.minibatches(LEAST_SQUARES, 5, K, 6, seed=7)
SETTINGS: dict[str, Any] = {
    "lr": 0.04,
    "lr_decay": 0.9,
    "weight_decay": 0.05,
    "clip_norm": 7.2,
    "precision": "float64",
}
NO_SERVER = [name for name, kind in METHODS.items() if issubclass(kind, S.DFedAvg)]

RI, MOVED = RelaxedInit(beta=0.1), RelaxedInit(beta=0.1, center="start")
CURRENT, SHARP = RelaxedInit(beta=0.1, first_visit="current"), SAM(rho=0.2)
PLUGINS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "ri": (RI,),
    "ri, current": (CURRENT,),
    "ri, start": (MOVED,),
    "sam": (SHARP,),
    "ri and sam": (RI, SHARP),
    "sam and ri, start": (SHARP, MOVED),
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedspeed": [{"mix": 0.6}, {"mix": 0.6, "variant": "paper"}],
    "fedpd": [{"local_init": "own"}, {"p": 0.5}],
    "fedadmm": [{"variant": "active"}],
    "fedcm": [{"decay": "inside"}],
    "dispfl": [{"regrow": "random"}],
    "fedadagrad": [{"beta1": 0.3}],
    "dpsgd": [{"variant": "atc"}],
    "fedinit": [{"server": "updates"}],
}


def methods() -> list[Any]:
    """Every method with every plug-in that it takes, and its variants."""
    cases = []
    for name, kind in METHODS.items():
        for label, plugins in PLUGINS.items():
            if any(type(plugin) in kind.refuses for plugin in plugins):
                continue
            if "start" in label and kind.fixed_anchor:
                continue
            cases.append(pytest.param(kind, {"plugins": plugins}, id=f"{name}-{label}"))
        for own in VARIANTS.get(name, []):
            cases.append(pytest.param(kind, own, id=f"{name}-{own}"))
    return cases


def make(kind: type[FederatedStrategy], own: dict[str, Any]) -> FederatedStrategy:
    return kind(**(SETTINGS | {"fraction_train": 1.0} | own))


def close_values(values: Any, expected: Any) -> None:
    """Two values of vectors under the same names."""
    a, b = dict(leaves(values)), dict(leaves(expected))
    assert a.keys() == b.keys()
    for name in a:
        close(a[name], b[name], 1e-12)


# --- the client half ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "own"), methods())
def test_a_round_of_a_stack_is_a_round_of_each(
    kind: type[FederatedStrategy], own: dict[str, Any]
) -> None:
    """After two rounds, of which the four of the stack missed one where a method allows it."""
    method = make(kind, own)
    f = Federation(method, LEAST_SQUARES, W0, 5, batches=BATCHES, shapes=SHAPES)
    everyone = list(range(C))
    clients = list(range(N))
    partial = not kind.all_clients and not method.topology.is_decentralised
    f.take(everyone)
    f.take(everyone[N:] if partial else everyone)
    downs = [broadcast(method, f.s, i) for i in clients]
    assert all(v.any() for i in clients for _, v in leaves(f.states[i]))
    alone = [f.train(i, down) for i, down in zip(clients, downs, strict=True)]

    states = stack([f.states[i] for i in clients])
    rows = [[BATCHES[f.s.t][i][k] for i in clients] for k in range(K)]
    solver = Dense(f.A[:N], f.b[:N], rows)
    down = stack(downs)
    old_down, old_states = map_vectors(Tensor.clone, down), map_vectors(Tensor.clone, states)
    together = client_round(f.half, down, states, f.config(tuple(clients)), solver)

    for i, one in zip(clients, alone, strict=True):
        compare(together, i, one)
    close_values(down, old_down)  # no argument is changed
    close_values(states, old_states)


def compare(together: ClientRound, i: int, one: ClientRound) -> None:
    close_values(row(together.up, i), one.up)
    close_values(row(together.state, i), one.state)
    close(together.result.w_i0[i], one.result.w_i0, 1e-12)
    close(together.result.w_K[i], one.result.w_K, 1e-12)
    close(together.result.loss[i], one.result.loss, 1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_first_round_of_a_stack_is_one_of_each(name: str) -> None:
    """States from `init`, too: DisPFL's masks are each client's own."""
    method = make(METHODS[name], {})
    f = Federation(method, LEAST_SQUARES, W0, 5, batches=BATCHES, shapes=SHAPES)
    clients = list(range(N))
    downs = [broadcast(method, f.s, i) for i in clients]
    alone = [f.train(i, down) for i, down in zip(clients, downs, strict=True)]
    down, config = stack(downs), f.config(tuple(clients))
    state = f.half.init(down.w, f.w0.expand(N, -1), config)
    rows = [[BATCHES[0][i][k] for i in clients] for k in range(K)]
    together = client_round(f.half, down, state, config, Dense(f.A[:N], f.b[:N], rows))
    for i, one in zip(clients, alone, strict=True):
        compare(together, i, one)


def test_what_the_stacks_above_can_show() -> None:
    """The clip bounds some clients' gradients and not others'; a silent round of FedPD is seen."""
    f = Federation(make(S.FedAvg, {}), LEAST_SQUARES, W0, 5, batches=BATCHES)
    f.take(range(C))
    f.take(range(N, C))
    norms = [LEAST_SQUARES.grad(i, f.s.w.numpy(), BATCHES[2][i][0]) for i in range(N)]
    lengths = np.linalg.norm(norms, axis=1)
    assert lengths.min() < SETTINGS["clip_norm"] < lengths.max()
    assert is_silent(0.5, 0, 1) or is_silent(0.5, 0, 2)


# --- the server half ------------------------------------------------------------------------------


def servers() -> list[Any]:
    cases = [pytest.param(kind, {}, id=name) for name, kind in METHODS.items()]
    for name, variants in VARIANTS.items():
        cases += [pytest.param(METHODS[name], own, id=f"{name}-{own}") for own in variants]
    return cases


def random_step(method: FederatedStrategy, g: torch.Generator, m: int) -> tuple[Any, ...]:
    """w, uploads, server state and starts of m federations of one client, drawn at random."""

    def draw(like: Tensor | None = None) -> Tensor:  # above zero, as second moments are
        return torch.rand(12, generator=g, dtype=torch.float64) + 0.1

    ws = [draw() for _ in range(m)]
    kind = method.rule().sends
    ups = [kind(*(draw() for _ in kind._fields)) for _ in range(m)]
    state = method.init(ws[0])
    if "seen" in getattr(state, "_fields", ()):
        state = state._replace(lam_bar_after={0: ws[0], 2: ws[0]})
    states = [map_vectors(draw, state) for _ in range(m)]
    return ws, ups, states, [draw() for _ in range(m)]


def about(method: FederatedStrategy) -> RoundInfo:
    accepted = torch.tensor([3])
    return RoundInfo(3, method.rate(3), 1, accepted, False, anchored_at_starts=True)


@pytest.mark.parametrize(("kind", "own"), servers())
def test_steps_of_stacked_federations_are_those_of_each(
    kind: type[FederatedStrategy], own: dict[str, Any]
) -> None:
    """m federations of one client each; their K_i differ."""
    m, method = 5, make(kind, own)
    ws, ups, states, starts = random_step(method, torch.Generator().manual_seed(0), m)
    replies = [Reply(i, ups[i], 2 + i, 1, starts[i]) for i in range(m)]
    alone = []
    for i in range(m):
        rows, cohort = Star().gather(ws[i], [replies[i]._replace(client=0)], about(method))
        alone.append(method.aggregate(ws[i], rows, states[i], cohort))
    w, state = torch.stack(ws), map_vectors(lambda *v: torch.stack(v), *states)
    rows, cohort = GossipTopology(Gossip(), 0).gather(w, replies, about(method))
    inputs = Inputs(w, rows, state)
    before = [v.clone() for v in vectors(inputs)]
    w_next, next_state = method.aggregate(w, rows, state, cohort)
    for i, (expected, expected_state) in enumerate(alone):
        close(w_next[i], expected, 1e-12)
        close_values(row(next_state, i), expected_state)
        headline = method.output_model(w_next, next_state)
        close(headline[i], method.output_model(expected, expected_state), 1e-12)
    for old, v in zip(before, vectors(inputs), strict=True):
        assert torch.equal(old, v)  # no argument is changed


class Inputs(NamedTuple):
    w: Tensor
    rows: Any  # a tuple of vectors in each field
    state: Any


def vectors(inputs: Inputs) -> list[Tensor]:
    columns = [v for column in inputs.rows for v in column]
    return [inputs.w, *columns, *(v for _, v in leaves(inputs.state))]


# --- linear steps ---------------------------------------------------------------------------------

LINEAR = [name for name, kind in METHODS.items() if kind.linear]
NOT_LINEAR = ["fedadam", "fedyogi", "fedadagrad", "fedsmoo"]


def mixed_before_and_after(method: FederatedStrategy) -> list[tuple[Tensor, Any]]:
    """A step of m nodes whose results are mixed, and a step of m nodes that have mixed before."""
    m = 5
    W = Gossip(topology="exponential-directed").matrix(m, 0, 0)
    ws, ups, states, starts = random_step(method, torch.Generator().manual_seed(0), m)
    w, up, start = torch.stack(ws), stack(ups), torch.stack(starts)
    state = map_vectors(lambda *v: torch.stack(v), *states)

    def step(w: Tensor, up: Any, state: Any, start: Tensor) -> tuple[Tensor, Any]:
        replies = [Reply(i, row(up, i), 3, 1, start[i]) for i in range(m)]
        rows, cohort = GossipTopology(Gossip(), 0).gather(w, replies, about(method))
        return method.aggregate(w, rows, state, cohort)

    def mix(value: Any) -> Any:
        return map_vectors(lambda v: W @ v, value)

    after, state_after = step(w, up, state, start)
    return [(mix(after), mix(state_after)), step(mix(w), mix(up), mix(state), mix(start))]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_steps_commute_with_mixing(name: str) -> None:
    """What gossip asks of a method: mixed steps are a step, of nodes with equal K_i."""
    for own in [{}, *VARIANTS.get(name, [])]:
        (w, state), (expected, expected_state) = mixed_before_and_after(make(METHODS[name], own))
        close(w, expected, 1e-12)
        close_values(state, expected_state)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_steps_that_do_not_commute_are_not_declared_linear(name: str) -> None:
    (w, state), (expected, expected_state) = mixed_before_and_after(make(METHODS[name], {}))
    apart = [(w - expected).abs().max()]
    for (_, a), (_, b) in zip(leaves(state), leaves(expected_state), strict=True):
        apart.append((a - b).abs().max())
    assert max(apart) > 1e-3
    assert not METHODS[name].linear


def test_every_method_says_of_its_step_that_it_is_linear_or_why_gossip_is_refused() -> None:
    for kind in METHODS.values():
        assert kind.linear != (Gossip in kind.refuses)


class Undeclared(FederatedStrategy):
    """FedAvg of another author, who declares nothing of its step."""

    def rule(self) -> Any:
        return S.FedAvg().rule()

    def aggregate(self, w: Tensor, ups: Any, state: Any, cohort: Any) -> tuple[Tensor, Any]:
        return cohort.mean(ups.w), state


@pytest.mark.parametrize("name", [*METHODS, "undeclared"])
def test_gossip_takes_the_linear_methods_and_no_others(name: str) -> None:
    kind = METHODS.get(name, Undeclared)
    if kind.linear:
        assert make(kind, {"plugins": (Gossip(topology="ring"),)}).topology.is_decentralised
        return
    with pytest.raises(ValueError, match=rf"^{kind.__name__} does not support Gossip: \w[^\n]+$"):
        make(kind, {"plugins": (Gossip(topology="ring"),)})


def test_a_first_message_is_for_a_client_alone() -> None:
    """`broadcast` gives vectors (d,), whoever it is for."""
    for kind in METHODS.values():
        method = make(kind, {})
        w = torch.from_numpy(W0)
        down = method.broadcast(w, method.init(w), Client(0, 0, -1))
        assert all(v.shape == w.shape for _, v in leaves(down))
