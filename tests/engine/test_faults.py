"""Whatever is lost, repeated or late: the federation is the one in which it never was."""

import logging
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.core import rounds
from fedaccord.core.vectors import leaves
from fedaccord.engine import History
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.compress import Compress
from tests.federation import half_square, linear
from tests.reference.problem import LeastSquares
from tests.strategies.federate import base
from tests.wire.methods import COMBINATIONS, COMPRESSED, all_or_slow, make, taken

C = 4
LEAST_SQUARES = LeastSquares(C, seed=2)
W0 = np.linspace(-1, 1, LEAST_SQUARES.dim)
UNHEARD = ("lost-message", "lost-reply", "late")
Table = tuple[tuple[str | None, ...], ...]  # what happens in a round (row) to a client (column)
TABLE: Table = (  # with a round in which all are heard, as FedPD wants
    ("duplicate", None, "lost-reply", "late"),
    (None, "duplicate", None, None),
    ("late", "lost-reply", None, "lost-message"),
    (None, None, "lost-reply", "duplicate"),
)
CRASHES: Table = (
    (None, "lost-reply", "crash", "duplicate"),
    ("duplicate", None, None, None),
    ("crash", "late", None, "lost-message"),
    (None, "duplicate", None, "lost-reply"),
)


def run(method: FederatedStrategy, table: Table, **more: Any) -> History:
    return simulate(
        replace(method, max_failed_rounds=len(table) + 1),
        clients=LEAST_SQUARES.clients(),
        model=linear(W0),
        loss=half_square,
        rounds=len(table),
        participation=[range(C)] * len(table),
        record="weights",
        faults=lambda t, i: table[t][i],
        **more,
    )


def small(name: str, plugins: str = "bare") -> FederatedStrategy:
    steps = 1 if name == "dpsgd" else 2
    return replace(make(name, plugins), lr=0.05, batch_size=0, local_steps=steps)


def same(a: Any, b: Any) -> bool:
    """Whether two states are of the same bits."""
    if a is None or b is None:
        return a is b
    one, other = dict(leaves(a)), dict(leaves(b))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def as_absent(name: str, plugins: str) -> History:
    """The run with the faults of TABLE, which is that in which the unheard were not reached."""
    absent = tuple(tuple("lost-message" if k in UNHEARD else None for k in row) for row in TABLE)
    history, expected = (run(small(name, plugins), table) for table in (TABLE, absent))
    assert torch.equal(history.weights, expected.weights)
    assert all(map(same, history.clients, expected.clients))
    return history


@pytest.mark.parametrize(("name", "plugins"), [*all_or_slow(COMBINATIONS), ("feddyn", "rounded")])
def test_a_reply_that_was_not_heard_is_one_that_never_was(name: str, plugins: str) -> None:
    as_absent(name, plugins)


@pytest.mark.parametrize(
    ("name", "plugins"),
    [
        *((name, "topk") for name in S.METHODS if taken(name, "topk")),
        *(case for case in COMPRESSED if case[1] not in ("topk", "rounded")),
        ("feddyn", "qsgd"),
    ],
)
def test_error_memories_go_back_with_the_rest_of_a_clients_state(name: str, plugins: str) -> None:
    history = as_absent(name, plugins)
    errors = [v for state in history.clients for n, v in leaves(state) if n.startswith("errors.")]
    half = small(name, plugins).client_half()
    (compress,) = (p for p in half.plugins if isinstance(p, Compress))
    assert bool(errors) == compress.has_errors
    assert all(v.norm() > 0 for v in errors)


def test_a_client_goes_back_as_often_as_its_replies_are_lost() -> None:
    weights = []
    for kind in ("lost-reply", "lost-message"):
        row = (kind, *[None] * (C - 1))
        history = run(small("scaffold"), ((None,) * C, row, row, (None,) * C))
        assert list(history.metrics["dropped"][1:]) == [0, 1, 1, 0]
        weights.append(history.weights)
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("name", ["scaffold", "afedpd", "fedinit"])
def test_a_client_that_is_not_reached_is_one_that_was_not_drawn(name: str) -> None:
    table = ((None, "late", None, None), ("duplicate", None, "lost-reply", "lost-reply"))
    cohorts = [[0, 2, 3], [0, 1]]
    expected = simulate(
        small(name),
        clients=LEAST_SQUARES.clients(),
        model=linear(W0),
        loss=half_square,
        rounds=2,
        participation=cohorts,
        record="weights",
    )
    history = run(small(name), table)
    assert torch.equal(history.weights, expected.weights)


# --- what the server's memory sums up, also where clients lost theirs -----------------------------


def mean(clients: list[Any], name: str, otherwise: Any) -> Tensor:
    """Of a vector of all clients; otherwise: what a client has before its first visit."""
    rows = [otherwise if s is None else getattr(s, name) for s in clients]
    return torch.stack(rows).mean(0)


def gap(name: str, history: History) -> float:
    """How far the identity that ties the server's memory to the clients' is from true."""
    s, clients = history.state, [None if it is None else base(it) for it in history.clients]
    fields, zero = getattr(s.server, "_fields", ()), torch.zeros_like(s.w)
    if name == "scaffnew":
        method = small(name)
        scale = method.p / method.lr  # h = h_i - scale w_{i,K}, and the mean of h_i is zero
        difference = mean(clients, "h", -scale * s.w) + scale * s.w
    elif "c" in fields:
        difference = mean(clients, "c_i", zero) - s.server.c
    elif "lam_bar_after" in fields:  # who was away misses virtual steps until it is back
        whole = [
            s.server.lam_bar
            if state is None
            else state.lam + s.server.lam_bar - s.server.lam_bar_after[int(s.accepted[i])]
            for i, state in enumerate(clients)
        ]
        difference = torch.stack(whole).mean(0) - s.server.lam_bar
    elif "lam_bar" in fields:
        difference = mean(clients, "lam", zero) - s.server.lam_bar
    else:
        assert name == "fedadmm", f"{name}: say here what its server sums up of the clients' memory"
        difference = mean(clients, "w_hat", s.w_init) - s.w
    return float(difference.abs().max())


OTHERS = {"fedpd", "fedtoy"}  # FedPD's server keeps nothing; fedtoy is a test's own method
TIED = [
    name
    for name, kind in S.METHODS.items()
    if kind.tied and not make(name, "bare").client_half().rule.is_stateless and name not in OTHERS
]


@pytest.mark.parametrize(
    ("name", "plugins"),
    [
        *((name, "bare") for name in TIED),
        *((name, "topk") for name in TIED if taken(name, "topk")),
        *((name, more) for name, more in COMPRESSED if name in TIED and more != "topk"),
    ],
)
@pytest.mark.parametrize("table", [TABLE, CRASHES], ids=["no crash", "crashes"])
def test_the_servers_memory_is_the_clients(name: str, plugins: str, table: Table) -> None:
    assert gap(name, run(small(name, plugins), table)) < 1e-12


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedadmm"])
def test_a_device_that_lost_its_memory_ends_nothing(name: str) -> None:
    """It reports that, the server begins its memory anew, and the optimum is reached."""
    table = [[None] * C for _ in range(30)]
    table[5][1] = table[9][2] = "crash"
    own = {"feddyn": {"alpha": 3.0}, "fedadmm": {"rho": 3.0}}.get(name, {})
    plain: dict[str, float] = {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": 0.0}
    method = replace(small(name), lr=0.1, local_steps=4, **plain, **own)
    history = run(method, tuple(map(tuple, table)))
    np.testing.assert_allclose(history.state.w, LEAST_SQUARES.optimum(), atol=1e-4)
    assert (history.metrics["dropped"] == 1).sum() == 2


@pytest.mark.parametrize(
    ("name", "repair"),
    [
        ("scaffold", "the server's memory sums up the clients', so all are reset at this model"),
        ("fedinit", "its next visit is a first one"),
    ],
)
def test_what_was_done_is_told(name: str, repair: str, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[dict[str, Any]] = []
    table: list[list[str | None]] = [[None] * C for _ in range(3)]
    table[1][2] = "crash"
    history = run(
        small(name), tuple(map(tuple, table)), on_round=lambda round: rows.extend(round.clients)
    )
    assert not torch.equal(history.weights[2], history.weights[1])  # by the replies of the others
    assert history.state.t == 3
    (row,) = [row for row in rows if row["status"] != "ok"]
    assert (row["round"], row["client"]) == (2, 2)
    assert row["status"] == "lost its state of round 1"
    assert row["repair"] == repair
    assert f"dropped client 2: lost its state of round 1; {repair}" in caplog.text


class Halves(nn.Module):
    """A shared and an own layer whose losses do not depend on each other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(dim, 1), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.shared(x), self.own(x)], 1)


@pytest.mark.parametrize("vectorize", ["off", "on"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "afedpd", "fedgloss"])
def test_the_parameters_of_the_other_clients_own_outlive_a_lost_state(
    name: str, vectorize: str
) -> None:
    """Also if all memories are reset: what a client trains alone is as if nothing was lost."""
    lost, cohorts = (2, 0), [[0, 1], [2, 3], [0, 2], [0, 1], [2, 3], [0, 3]]
    ignored = (3, 1)  # the first reply after the reset: it starts from the same layer again

    def history(*faults: tuple[int, int]) -> History:
        torch.manual_seed(0)
        return simulate(
            replace(small(name), local_parameters="own.*"),
            clients=[(x, torch.cat([y, y], 1)) for x, y in LEAST_SQUARES.clients()],
            model=Halves(LEAST_SQUARES.dim),
            loss=half_square,
            rounds=len(cohorts),
            participation=cohorts,
            record="weights",
            vectorize=vectorize,
            faults=lambda t, i: "crash" if (t, i) == lost else "late" if (t, i) in faults else None,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "begins_anew", lambda *_: False)
        plain = history(ignored)
    reset = history(ignored)
    for t, (a, b) in enumerate(zip(plain.states, reset.states, strict=True)):
        for i, (mine, theirs) in enumerate(zip(a, b, strict=True)):
            assert (mine is None) == (theirs is None), (t, i)
            assert mine is None or torch.equal(mine.local, theirs.local), (t, i)
    if name != "fedavg":
        assert not torch.equal(plain.weights, reset.weights)


def test_parameters_of_its_own_that_a_client_loses_after_a_reset_are_lost_alone() -> None:
    """All memories began anew with client 0; those that follow, of client 1, are in no sum yet."""
    rows: list[dict[str, Any]] = []
    crashes = {(2, 0), (3, 1), (4, 1)}  # in the last one it has nothing to lose any more
    history = simulate(
        replace(small("scaffold"), local_parameters="own.*"),
        clients=[(x, torch.cat([y, y], 1)) for x, y in LEAST_SQUARES.clients()],
        model=Halves(LEAST_SQUARES.dim),
        loss=half_square,
        rounds=5,
        participation=[[0, 1], [2, 3], [0, 2], [1, 3], [1, 3]],
        faults=lambda t, i: "crash" if (t, i) in crashes else None,
        on_round=lambda round: rows.extend(round.clients),
    )
    lost = [(row["round"], row["client"], row["status"]) for row in rows if row["status"] != "ok"]
    assert lost == [(3, 0, "lost its state of round 1"), (4, 1, "lost its state of round 1")]
    repairs = [row["repair"] for row in rows if row.get("repair")]
    assert repairs[0].endswith("so all are reset at this model")
    assert repairs[1] == "its next visit is a first one"
    assert history.state.accepted.tolist() == [-1, 4, -4, 4]


def test_a_round_of_lost_states_is_not_one_of_the_failed_rounds_that_end_a_run() -> None:
    """Nothing is broken, and a client reports a loss once."""
    history = simulate(
        replace(small("fedinit"), max_failed_rounds=2),
        clients=LEAST_SQUARES.clients(),
        model=linear(W0),
        loss=half_square,
        rounds=6,
        participation=[[0, 1], [2, 3]] * 3,
        faults=lambda t, _: {2: "late", 3: "crash", 4: "late"}.get(t),
    )
    assert history.metrics["counted"].tolist()[1:] == [1, 1, 0, 0, 0, 1]


def test_who_keeps_its_own_parameters_evaluates_them_after_a_reset() -> None:
    """All memories begin anew, and client 0, which lost its state, has no parameters of its own."""
    clients = [(x, torch.cat([y, y], 1)) for x, y in LEAST_SQUARES.clients()]
    history = simulate(
        replace(small("scaffold"), local_parameters="own.*"),
        **{"clients": clients, "test": clients, "model": Halves(LEAST_SQUARES.dim)},
        **{"loss": half_square, "rounds": 3, "participation": [[0, 1], [2, 3], [0, 2]]},
        faults=lambda t, i: "crash" if (t, i) == (2, 0) else None,
    )
    assert history.metrics["evaluation-replies"].tolist()[1:] == [2, 4, 3]


def test_a_first_visit_that_crashed_has_nothing_to_lose() -> None:
    history = run(small("scaffold"), (("crash", None, None, None), (None,) * C))
    assert (history.metrics["dropped"][1:] == 0).all()


def test_a_fault_of_another_name_is_one_line() -> None:
    line = r"^faults: expected None or one of lost-message, .*, got 'lost'$"
    with pytest.raises(ValueError, match=line):
        run(small("fedavg"), (("lost", None, None, None),))


def test_late_and_second_replies_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["fedaccord.engine.simulate"]
        patch.setattr(module, "quiet", lambda: caplog.at_level(logging.INFO))
        run(small("fedavg"), (("late", "duplicate", None, None), (None,) * C, (None,) * C))
    assert caplog.text.count("ignored the late reply of client 0 to round 1") == 1
    assert "ignored a second reply of client 1" in caplog.text
