"""The property `beyond_sums`: which server steps read uploads through means and sums alone."""

from typing import Any

import pytest
import torch

from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import first_state
from fedaccord.core.topology import RoundInfo
from fedaccord.core.vectors import leaves
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import METHODS

C, P, D = 6, 4, 5  # P: a power of 2, with which means of integers are exact
OTHER_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedadmm", {"variant": "active"}),
    ("fedspeed", {"variant": "paper"}),
    ("fedcm", {"optimizer": "adamw"}),
)
BUILT = [
    (name, {"lr": 0.5, "lr_decay": 1.0, "local_steps": 2, **own})
    for name, own in (*((name, {}) for name in METHODS), *OTHER_SETTINGS)
]


def build(name: str, settings: dict[str, Any]) -> FederatedStrategy:
    if name == "dpsgd":
        settings = settings | {"local_steps": 1}
    return METHODS[name](fraction_train=1.0, **settings)


def uploads(method: FederatedStrategy, seed: int) -> list[Any]:
    """Of P clients, integers, so that sums are exact in any order."""
    generator, kind = torch.Generator().manual_seed(seed), method.client_half().sends
    draw = lambda: torch.randint(-9, 9, (D,), generator=generator).double()  # noqa: E731
    return [kind(*(draw() for _ in kind._fields)) for _ in range(P)]


def with_the_same_sums(ups: list[Any]) -> list[Any]:
    """Others: the first client has more of every field, and each other one less of it."""
    rows = [[v.clone() for v in up] for up in ups]
    for k in range(len(rows[0])):
        for i in range(1, P):
            rows[0][k] += 3 * i + k
            rows[i][k] -= 3 * i + k
    return [type(ups[0])(*row) for row in rows]


def step(
    method: FederatedStrategy, ups: list[Any], steps: list[int], size: float | None = None
) -> list[torch.Tensor]:
    """The next model and all vectors of the server after a step from these uploads."""
    s = first_state(method, torch.arange(D).double(), C)
    accepted = torch.full((C,), -1)
    info = RoundInfo(0, 0.5, C, accepted, False, False, method.client_half().schedule, size)
    replies = [Reply(i, up, K, 1) for i, (up, K) in enumerate(zip(ups, steps, strict=True))]
    columns, cohort = method.topology.gather(s.w, replies, info)
    after = method.topology.step(method, s.w, columns, s.server, cohort)
    return [after.w, *(v for _, v in leaves(after.server))]


def same(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(("name", "settings"), BUILT)
def test_a_step_from_other_uploads_with_the_same_sums_has_the_same_bits(
    name: str, settings: dict[str, Any]
) -> None:
    method = build(name, settings)
    if method.beyond_sums:
        assert name in BEYOND or method.topology.is_decentralised
        return
    ups, steps = uploads(method, 1), [2] * P
    kind = type(ups[0])
    means = kind(*(torch.stack(vs).mean(0) for vs in zip(*ups, strict=True)))
    result = step(method, ups, steps)
    assert same(result, step(method, with_the_same_sums(ups), steps))
    assert same(result, step(method, [means], [2], size=P))
    assert not same(result, step(method, uploads(method, 2), steps))


BEYOND = {"fedexp": [2] * P, "fednova": [1, 2, 4, 2], "local": [2] * P}


@pytest.mark.parametrize("name", ["fedexp", "fednova"])
def test_what_others_read_beyond_sums_changes_their_step(name: str) -> None:
    method = build(name, {"lr": 0.5, "local_steps": 2})
    assert method.beyond_sums
    ups = uploads(method, 1)
    assert not same(
        step(method, ups, BEYOND[name]), step(method, with_the_same_sums(ups), BEYOND[name])
    )


@pytest.mark.parametrize("name", ["fedcm", "mofedsam"])
def test_mean_steps_of_unequal_clients_are_no_sums(name: str) -> None:
    method, unequal = build(name, {"lr": 0.5, "local_steps": 0}), BEYOND["fednova"]
    ups = uploads(method, 1)
    assert "local-steps" in method.beyond_sums
    assert not same(step(method, ups, unequal), step(method, with_the_same_sums(ups), unequal))


def test_starts_of_clients_are_uploads_too() -> None:
    assert METHODS["fedinit"](server="updates").beyond_sums == "the start of each client"


def test_the_default_is_the_safe_one() -> None:
    class Silent(METHODS["scaffold"]):  # type: ignore[misc, name-defined]
        beyond_sums = FederatedStrategy.beyond_sums

    assert "more" in Silent().beyond_sums
