"""What is beside w (frozen, local and buffer tensors) does not change what a method does to w."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedaccord import simulate, train_locally
from fedaccord.core.client_half import WithLocal
from fedaccord.core.vectors import leaves
from fedaccord.engine import History, quiet
from fedaccord.federation.errors import FederationError
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.run import Run
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import METHODS, DFedAvg
from fedaccord.task.flat_model import flat_model
from tests.federation import half_square, linear
from tests.grid import FIRST_NODE, InProcessGrid
from tests.plugins.test_composition import make
from tests.reference import problem
from tests.reference.problem import LeastSquares

C, T, K = 6, 4, 3
PROBLEM = LeastSquares(C, seed=3)
D = PROBLEM.dim
W0, HEAD = np.random.default_rng(1).normal(size=(2, D))
SOME, EVERYONE = problem.cohorts(C, 3, T, seed=5), problem.everyone(C, T)
ONE = [0]
FAMILIES = [
    *("scaffold", "afedpd", "fedinit", "feddyn", "fedadmm"),
    *("fedsmoo", "fedgamma", "ditto", "feddeper", "fedpac"),
]
STEPS = {"lr": 0.02, "lr_decay": 0.95, "weight_decay": 0.05, "clip_norm": 5.0, "batch_size": 0}
FLOAT64 = {"precision": "float64", "eval_every": 3}
POLICIES = ("freeze", "mean", "local")


def with_policies(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name with one of the policies; no server averages the buffers of a graph's nodes."""
    servers = [name for name in names if not issubclass(METHODS[name], DFedAvg)]
    nodes = [name for name in names if name not in servers]
    return [*zip(servers, cycle(POLICIES)), *zip(nodes, cycle(("freeze", "local")))]


class Roles(nn.Module):
    """Two least squares side by side, of w and of a head; statistics of the inputs."""

    last: ClassVar[Any] = None  # the last one that was called: runs train copies

    def __init__(self, scale: float = 1.0, statistics: bool = True) -> None:
        super().__init__()
        self.head, self.body = linear(HEAD), linear(W0)  # the last one is the output, for Muon
        frozen = torch.full((D,), scale, dtype=torch.float64)
        self.scale = nn.Parameter(frozen, requires_grad=False)
        self.statistics = statistics
        if statistics:
            self.register_buffer("mean", torch.zeros(D, dtype=torch.float64))
            self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        Roles.last = self
        if self.training and self.statistics:
            self.mean += 0.1 * (x.mean(0) - self.mean)
            self.batches += 1
        return torch.cat([self.body(x * self.scale), self.head(x)], 1)


def both(predictions: Tensor, y: Tensor) -> Tensor:
    return half_square(predictions[:, :1], y) + half_square(predictions[:, 1:], y)


def small(name: str, **more: Any) -> FederatedStrategy:
    steps = {"local_steps": 1 if name == "dpsgd" else K} | STEPS | FLOAT64
    return make(METHODS[name], **steps | more)


def cohorts_of(method: FederatedStrategy) -> Any:
    return EVERYONE if method.topology.is_decentralised or method.all_clients else SOME


def run(name: str, model: nn.Module, loss: Any = both, **more: Any) -> History:
    outside = {key: more.pop(key) for key in ("faults", "vectorize", "clients") if key in more}
    method = small(name, **more)
    return simulate(
        method,
        model=model,
        loss=loss,
        rounds=T,
        participation=cohorts_of(method),
        record="weights",
        **{"clients": PROBLEM.clients()} | outside,
    )


@pytest.mark.parametrize(("name", "buffers"), with_policies(METHODS))
def test_the_method_on_w_is_the_method_alone(name: str, buffers: str) -> None:
    bare = run(name, linear(W0), half_square)
    history = run(name, Roles(), buffers=buffers, local_parameters="head.*")
    np.testing.assert_allclose(history.weights, bare.weights, rtol=0, atol=1e-12)
    assert torch.equal(Roles.last.scale, Roles().scale)
    # what is sent and stored: w's share as before, D + 1 numbers of buffers where they are averaged
    size = np.array([len(cohort) for cohort in cohorts_of(small(name))]) * 8
    extra = size * (D + 1) * (buffers == "mean")
    for key in ("up-bytes", "down-bytes"):
        difference = (history.metrics[key] - bare.metrics[key]).dropna()
        assert difference.tolist() == extra.tolist()
    for state, own in zip(bare.clients, history.clients, strict=True):
        if own is None:
            continue
        assert isinstance(own, WithLocal)
        assert len(own.local) == D + (D + 1) * (buffers == "local")
        shapes = {name: v.shape for name, v in leaves(own.base)}
        assert shapes == {name: v.shape for name, v in leaves(state)}


@pytest.mark.parametrize(
    ("name", "more"), [*((name, {}) for name in METHODS), ("scaffold", {"optimizer": "adamw"})]
)
def test_what_is_frozen_keeps_its_bits(name: str, more: dict[str, Any]) -> None:
    method = small(name, buffers="freeze", **more)
    if not (method.all_clients or method.topology.is_decentralised):
        method = replace(method, fraction_train=0.5)
    history = simulate(method, clients=PROBLEM.clients(), model=Roles(), loss=both, rounds=2)
    before, after = Roles().state_dict(), Roles.last.state_dict()
    for tensor in ("scale", "mean", "batches"):
        assert torch.equal(after[tensor], before[tensor])
    assert {*history.model} == {"body.weight", "head.weight"}
    assert not torch.equal(history.model["body.weight"], before["body.weight"])


@pytest.mark.parametrize(
    ("name", "buffers", "lines"),
    [*((name, "freeze", 0) for name in FAMILIES), ("scaffold", "mean", 1)],
)
def test_clients_in_one_call(
    name: str,
    buffers: str,
    lines: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frozen parts allow it; with others it is one client at a time, as one line says."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    one, together = (run(name, Roles(), buffers=buffers, vectorize=how) for how in ("off", "on"))
    np.testing.assert_allclose(together.weights, one.weights, rtol=0, atol=1e-12)
    messages = [line for line in caplog.messages if "expected a model without local" in line]
    assert len(messages) == lines


def test_a_head_that_stays_descends_at_its_client_alone() -> None:
    history = run("fedavg", Roles(), buffers="freeze", local_parameters="head.*")
    for i in range(C):
        h = HEAD.copy()
        for t, cohort in enumerate(SOME):
            for _ in range(K if i in cohort else 0):
                g = PROBLEM.grad(i, h)
                g *= min(1.0, STEPS["clip_norm"] / np.linalg.norm(g))
                h -= STEPS["lr"] * STEPS["lr_decay"] ** t * (g + STEPS["weight_decay"] * h)
        np.testing.assert_allclose(history.clients[i].local, h, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "afedpd", "ditto", "feddeper", "fedsam", "fedgamma", "fedlesam"]
)
def test_buffers_are_averaged_over_the_cohort(name: str) -> None:
    """A step counts once, however many passes it has."""
    history = run(name, Roles(), buffers="mean")
    means, keep, mean = [A.mean(0) for A in PROBLEM.A], 0.9**K, np.zeros(D)
    for cohort in SOME:
        mean = np.mean([keep * mean + (1 - keep) * means[i] for i in cohort], axis=0)
    np.testing.assert_allclose(history.state.buffers, [*mean, T * K], rtol=0, atol=1e-12)


def test_buffers_are_averaged_with_the_weights_of_the_cohort() -> None:
    clients = [(x[: i + 2], y[: i + 2]) for i, (x, y) in enumerate(PROBLEM.clients())]
    history = run("fedavg", Roles(), buffers="mean", weighting="examples", clients=clients)
    means, keep, mean = [x.numpy().mean(0) for x, _ in clients], 0.9**K, np.zeros(D)
    for cohort in SOME:
        ends = [keep * mean + (1 - keep) * means[i] for i in cohort]
        mean = np.average(ends, 0, [len(clients[i][0]) for i in cohort])
    np.testing.assert_allclose(history.state.buffers, [*mean, T * K], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        lambda: nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    ],
    ids=["dropout", "statistics"],
)
def test_dittos_w_is_that_of_fedavg_to_the_bit(module: Any) -> None:
    torch.manual_seed(0)
    model = module().double()
    one, other = (run(name, model, half_square, buffers="mean") for name in ("fedavg", "ditto"))
    assert torch.equal(one.weights, other.weights)
    if one.state.buffers is not None:
        assert torch.equal(one.state.buffers, other.state.buffers)
        assert one.model["1.num_batches_tracked"] == T * K


@pytest.mark.parametrize(
    ("buffers", "head", "is_equal"),
    [("local", "", True), ("mean", "3.*", True), ("local", "3.*", False)],
)
def test_with_a_head_that_follows_v_dittos_w_is_another(
    buffers: str, head: str, is_equal: bool
) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    model, stays = nn.Sequential(*layers).double(), {"buffers": buffers, "local_parameters": head}
    one, other = (run(name, model, half_square, **stays) for name in ("fedavg", "ditto"))
    assert torch.equal(one.weights, other.weights) == is_equal


@pytest.mark.parametrize("head", ["", "3.*"])
@pytest.mark.parametrize(("name", "own"), [("ditto", {"lam": 0.0}), ("feddeper", {"rho": 0.0})])
def test_what_stays_at_a_client_belongs_to_its_own_model(
    name: str, own: dict[str, float], head: str
) -> None:
    """Without a pull v_i is trained as the w_i of `local`, in FedDeper until the first round ends:
    from its own statistics and head."""
    torch.manual_seed(0)
    layers = nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    model, stays = nn.Sequential(*layers).double(), {"buffers": "local", "local_parameters": head}
    alone, history = (
        run(method, model, half_square, **stays, **more)
        for method, more in (("local", {}), (name, own))
    )
    visits = [sum(i in cohort for cohort in SOME) for i in range(C)]
    compared = [i for i in range(C) if visits[i] == 1 or (visits[i] and name == "ditto")]
    assert compared
    for i in compared:
        np.testing.assert_allclose(
            history.clients[i].local, alone.clients[i].local, rtol=0, atol=1e-12
        )
        if name == "ditto":
            assert torch.equal(history.clients[i].base.v, alone.clients[i].base.w)


def test_an_averaged_counter_is_that_of_the_evaluated_model() -> None:
    """Of 1, 3 and 7 batches: 11 / 3 is rounded, and not cut."""
    clients = [(torch.randn(n, D), torch.randn(n, 1)) for n in (4, 12, 28)]
    steps: dict[str, Any] = {"local_epochs": 1, "batch_size": 4, "participation": 1.0}
    module = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    history = simulate("fedavg", clients=clients, model=module, rounds=1, buffers="mean", **steps)
    counter = history.model["1.num_batches_tracked"]
    assert (counter.dtype, counter.item()) == (torch.int64, 4)


@pytest.mark.parametrize(("name", "buffers"), with_policies(FAMILIES))
def test_a_lost_reply_takes_back_what_stayed_at_the_client(name: str, buffers: str) -> None:
    def lose(kind: str) -> History:
        def faults(t: int, i: int) -> str | None:
            return kind if (t + i) % 4 == 0 else None

        more: dict[str, Any] = {"buffers": buffers, "local_parameters": "head.*"}
        return run(name, Roles(), faults=faults, **more)

    history, absent = lose("lost-reply"), lose("lost-message")
    assert torch.equal(history.weights, absent.weights)
    for one, other in zip(history.clients, absent.clients, strict=True):
        assert (one is None) == (other is None)
        pairs = zip(leaves(one), leaves(other), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    if buffers == "mean":
        assert torch.equal(history.state.buffers, absent.state.buffers)


def app_of(models: Any) -> ClientApp:
    """A foreign ClientApp whose clients have these models."""
    app, data = ClientApp(), PROBLEM.clients()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = context.node_id - FIRST_NODE
        return train_locally(message, context, model=models(i), batches=[data[i]], loss=both)

    return app


def over_messages(method: FederatedStrategy, models: Any, model: nn.Module) -> Run:
    roles = flat_model(model, method.model_settings)
    initial = ArrayRecord(roles.state_dict() | roles.named_buffers())
    with InProcessGrid(app_of(models), C) as grid, quiet():
        fleet = MessageFleet(grid)
        run = Run(method, fleet, initial, T, cohorts=SOME, model=roles.layout)
        run.play()
    return run


@pytest.mark.parametrize("name", ["scaffold", "afedpd"])
@pytest.mark.parametrize("buffers", POLICIES)
def test_over_messages_it_is_the_same_to_the_bit(name: str, buffers: str) -> None:
    more = {"buffers": buffers, "local_parameters": "head.*"}
    history = over_messages(small(name, **more), lambda i: Roles(), Roles())
    expected = run(name, Roles(), **more)
    assert torch.equal(history.state.w, expected.state.w)
    if buffers == "mean":
        assert torch.equal(history.state.buffers, expected.state.buffers)


class Wider(Roles):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, 2, bias=False, dtype=torch.float64)


class Other(Roles):
    def __init__(self) -> None:
        super().__init__()
        self.more = linear(W0)


class Thawed(Roles):
    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_()


def test_what_is_frozen_by_its_name_is_as_what_the_model_freezes() -> None:
    more = {"buffers": "mean", "local_parameters": "head.*"}
    expected = run("scaffold", Roles(), **more)
    assert torch.equal(
        run("scaffold", Thawed(), **more, frozen_parameters="sc*").weights, expected.weights
    )
    method = small("scaffold", **more, frozen_parameters="sc*")
    history = over_messages(method, lambda i: Thawed(), Thawed())
    assert torch.equal(history.state.w, expected.state.w)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (lambda: Roles(scale=2.0), "expected frozen tensor 'scale' of the same type, shape and"),
        (Wider, "expected shared tensor 'body.weight' of shape (1, 5), got (2, 5)"),
        (Other, "expected no shared tensor 'more.weight', got one"),
        (Thawed, "expected no shared tensor 'scale', got one"),
        (lambda: Roles(statistics=False), "expected a buffers tensor 'mean', got none"),
    ],
)
def test_another_model_is_refused_before_round_1(
    kind: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the first tensor."""
    monkeypatch.setattr("fedaccord.federation.roster.GRACE", -1)
    with pytest.raises(FederationError) as refusal:
        over_messages(small("fedavg", buffers="mean"), lambda i: kind(), Roles())
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_graph_has_nobody_who_averages_buffers() -> None:
    with pytest.raises(ValueError, match="buffers: expected refuse, freeze or local"):
        small("dfedavg", buffers="mean").client_half()
