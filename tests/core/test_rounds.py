"""The round as a pure function: what goes in stays as it is, and nothing hides in an object."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.cohort import Reply
from fedaccord.core.privacy import Privacy
from fedaccord.core.rounds import (
    RoundState,
    Solution,
    broadcast,
    client_round,
    descend,
    failed_round,
    first_state,
    forget,
    server_round,
)
from fedaccord.core.rule import Direction, GradientAt, LocalConfig, LocalRule, Stateless
from fedaccord.core.vectors import Vector, leaves
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.sam import SAM
from fedaccord.strategies import METHODS

SHAPES, D, CLIENTS, ROUNDS = ((2, 3), (2,)), 8, 3, 3
TARGETS = torch.randn(CLIENTS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def solver(client: int, steps: int = 2) -> Any:
    """Gradient steps on |w - target|^2 / 2 of a client."""

    def solve(w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        w, g = w_i0.clone(), torch.empty_like(w_i0)

        def at(point: Vector) -> Tensor:
            torch.sub(point, TARGETS[client], out=g)
            return 0.5 * (g**2).sum(-1)

        return descend(w, g, [at] * steps, direction, hook)

    return solve


def rounds(method: FederatedStrategy) -> Iterator[tuple[Any, Any]]:
    """(what went in, a copy from before) of every call of a small federation."""
    half, states = method.client_half(), {}
    s = first_state(method, torch.zeros(D, dtype=torch.float64), CLIENTS)
    everyone = method.topology.is_decentralised or method.all_clients
    for t in range(ROUNDS):
        replies = []
        for i in range(CLIENTS) if everyone or t != 1 else range(1, CLIENTS):
            config = LocalConfig(t, ROUNDS, 0.1, 0.01, 1.0, i, 0, SHAPES, steps=2)
            down = broadcast(method, s, i)
            if i not in states:
                states[i] = half.init(down.w, s.w_init if s.w_init is not None else s.w, config)
            before = copy.deepcopy((s, down, states[i]))
            result = client_round(half, down, states[i], config, solver(i))
            yield (s, down, states[i]), before
            states[i] = result.state
            decoded = half.decode(result.up, down, torch.empty(D, device="meta"))
            replies.append(Reply(i, decoded.up, 2, 5, decoded.w_i0))
        before = copy.deepcopy((s, replies))
        result = server_round(method, half, s, replies)
        yield (s, replies), before
        assert (result.state.t, result.state.failed) == (s.t + 1, 0)
        s = result.state


def vectors(value: Any) -> list[Tensor]:
    """All tensors in nested values."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [v for part in value.values() for v in vectors(part)]
    return [v for part in value for v in vectors(part)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize("plugins", [(), (RelaxedInit(beta=0.1),), (SAM(rho=0.1),)], ids=str)
@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_a_round_changes_nothing_that_goes_into_it(kind: Any, plugins: Any) -> None:
    if any(type(plugin) in kind.refuses for plugin in plugins):
        pytest.skip("refused")
    method = kind(fraction_train=1.0, plugins=plugins, precision="float64")
    calls = 0
    for after, before in rounds(method):
        calls += 1
        pairs = zip(vectors(after), vectors(before), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert calls > ROUNDS


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_a_strategy_holds_nothing_of_a_round_outside_its_state(kind: Any) -> None:
    """The mathematics leaves no trace in the strategy, and the same state gives the same round."""
    method = kind(fraction_train=1.0, precision="float64")
    own = copy.deepcopy(method)
    first = [vectors(after) for after, _ in rounds(method)]
    assert method == own
    second = [vectors(after) for after, _ in rounds(method)]
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_failed_round_keeps_everything_but_the_round() -> None:
    method = METHODS["scaffold"]()
    s = first_state(method, torch.ones(D), CLIENTS)
    later = failed_round(failed_round(s, True), False)
    assert later == s._replace(t=2, failed=2)
    assert isinstance(later, RoundState)
    spent = Privacy(releases=3, multiplier=1.0, clip=1.0, share=0.5, adaptive=False)
    private = s._replace(privacy=spent)
    assert failed_round(private, has_cohort=True).privacy == spent.spent()  # its noise was drawn
    assert failed_round(private, has_cohort=False).privacy == spent


@pytest.mark.parametrize(("name", "is_kept"), [("fedinit", True), ("fedavg", False)])
def test_w_init_is_kept_where_a_late_client_reads_it(name: str, is_kept: bool) -> None:
    method = METHODS[name]()
    half, w = method.client_half(), torch.zeros(D)
    s = first_state(method, w, CLIENTS)
    for i in range(CLIENTS):
        s = server_round(method, half, s, [Reply(i, half.rule.sends(torch.ones(D)), 1, 1)]).state
        assert (s.w_init is w) == is_kept
    assert s.accepted.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["fedinit", "feddeper", "fedlesam"])
def test_a_client_that_lost_its_state_is_forgotten(name: str) -> None:
    method = METHODS[name]()
    half, s = method.client_half(), first_state(method, torch.zeros(D), CLIENTS)
    s = s._replace(t=4, accepted=torch.tensor([3, 1, 2]))
    state = forget(method, half, s, [0, 2])
    assert state.accepted.tolist() == [-1, 1, -1]
    assert state._replace(accepted=s.accepted) == s
    assert s.accepted.tolist() == [3, 1, 2]


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "afedpd", "fedadmm", "fedsmoo", "fedspeed"])
def test_where_the_server_sums_up_what_clients_keep_all_begin_anew(name: str) -> None:
    """The server cannot know what a lost client's part of the sum was."""
    method = METHODS[name]()
    w = torch.linspace(-1, 1, D)
    half, s = method.client_half(), first_state(method, w, CLIENTS)
    for _ in range(2):
        ups = [half.rule.sends(*[w + i] * len(half.rule.sends._fields)) for i in range(CLIENTS)]
        replies = [Reply(i, up, 1, 1) for i, up in enumerate(ups)]
        s = server_round(method, half, s, replies).state
    state, headline = forget(method, half, s, [1]), method.output_model(s.w, s.server)
    assert state.accepted.tolist() == [-1] * CLIENTS
    assert state.t == 2
    assert torch.equal(state.w, headline)
    assert torch.equal(state.w_init, headline)
    assert not any(v.any() for _, v in leaves(state.server))
    assert any(v.any() for _, v in leaves(s.server)) or name == "fedadmm"


def test_the_accepted_round_of_a_client_is_that_of_its_last_reply() -> None:
    method = METHODS["fedavg"]()
    half = method.client_half()
    s = failed_round(first_state(method, torch.zeros(D), CLIENTS), has_cohort=True)
    s = server_round(method, half, s, [Reply(1, half.rule.sends(torch.ones(D)), 1, 1)]).state
    assert [s.client(i).last_round for i in range(CLIENTS)] == [-1, 1, -1]
    assert s.client(1).round == 2


# --- the local loop -------------------------------------------------------------------------------

DIRECTION = {
    "scale": 0.7,
    "shift": torch.linspace(-1, 1, D, dtype=torch.float64),
    "rho": 0.4,
    "anchor": torch.linspace(2, 0, D, dtype=torch.float64),
    "decay": 0.5,
}


ALONG = {"mix": 0.3, "along": torch.linspace(-2, 5, D, dtype=torch.float64)}


@pytest.mark.parametrize("along", [{}, ALONG], ids=["plain", "along"])
@pytest.mark.parametrize("left_out", ["", *DIRECTION])
def test_the_folded_step_is_the_formula(left_out: str, along: dict[str, Any]) -> None:
    """w <- w - lr (scale clip(g) + shift + rho (w - anchor) + decay wd w), term by term."""
    own = {k: v for k, v in DIRECTION.items() if k != left_out}
    direction = Direction(**own, **along)
    config = LocalConfig(0, 1, 0.1, 0.3, 1.5, 0, 0, SHAPES)
    w0 = torch.linspace(0, 3, D, dtype=torch.float64)
    hook = GradientHook(ClientHalf(LocalRule()), None, Stateless(), config)
    solution = solver(0, steps=4)(w0, direction, hook)
    w, losses = w0, []
    for _ in range(4):
        g = w - TARGETS[0]
        losses.append(0.5 * float(g @ g))
        g = g * min(1.0, 1.5 / float(g.norm()))
        step = direction.scale * g + direction.decay * 0.3 * w
        if direction.shift is not None:
            step = step + direction.shift
        if direction.anchor is not None:
            step = step + direction.rho * (w - direction.anchor)
        elif direction.rho:
            step = step + direction.rho * w
        if direction.along is not None:
            step = 0.7 * step + 0.3 * direction.along
        w = w - 0.1 * step
    torch.testing.assert_close(solution.w_K, w, rtol=1e-12, atol=1e-12)
    assert float(solution.loss) == pytest.approx(sum(losses) / 4, rel=1e-12)
    assert solution.steps == 4


def test_no_batch_is_one_clear_line() -> None:
    config = LocalConfig(0, 1, 0.1, 0.0, 0.0, 0, 0, SHAPES)
    hook = GradientHook(ClientHalf(LocalRule()), None, Stateless(), config)
    none: list[GradientAt] = []
    with pytest.raises(ValueError, match="expected at least one batch of training data, got none"):
        descend(torch.ones(D), torch.ones(D), none, Direction(), hook)


def test_leaves_name_what_a_state_holds() -> None:
    method = METHODS["scaffold"](plugins=(RelaxedInit(beta=0.1),))
    half, w = method.client_half(), torch.zeros(D)
    config = LocalConfig(0, 1, 0.1, 0.0, 0.0, 0, 0, SHAPES)
    assert [name for name, _ in leaves(half.init(w, w, config))] == ["last", "base.c_i"]
