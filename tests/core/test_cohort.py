"""Means and sums over the active clients: fresh tensors, in the order of the clients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedaccord.core.cohort import Cohort, PendingRequest, Reply, rows, seen, weighted_sum
from fedaccord.core.rule import Model
from fedaccord.core.vectors import Vector

W = torch.tensor([10.0, 20.0, 30.0])
XS = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 5.0, 7.0]), torch.tensor([5.0, 2.0, 2.0])]


def make(w: Vector, ups: Any, weights: list[float], num_clients: int) -> tuple[Any, Cohort]:
    ups = Model(tuple(x.clone() for x in ups))
    n = len(weights)
    cohort = Cohort(
        range(n),
        round=0,
        num_clients=num_clients,
        weights=weights,
        w=w,
        steps=[2] * n,
        lengths=[0.2] * n,
        starts=[w] * n,
        anchor=w,
        accepted=torch.zeros(num_clients, dtype=torch.int64),
    )
    return ups, cohort


def star(weighted: bool = False, replies: int = 3) -> tuple[Any, Cohort]:
    """The uploads and the cohort of a round."""
    weights = [1.0, 2.0, 5.0] if weighted else [1.0, 1.0, 1.0]
    return make(W, XS[:replies], weights[:replies], 3)


def gossip() -> tuple[Any, Cohort]:
    """A federation of one client for each node."""
    return make(W.expand(3, -1), [torch.stack(XS)], [1.0], 1)


def test_the_mean_and_the_sum() -> None:
    ups, cohort = star()
    torch.testing.assert_close(cohort.mean(ups.w), torch.tensor([3.0, 3.0, 4.0]))
    torch.testing.assert_close(cohort.sum(ups.w), torch.tensor([9.0, 9.0, 12.0]))
    ups, cohort = star(weighted=True)
    torch.testing.assert_close(cohort.mean(ups.w), (XS[0] + 2 * XS[1] + 5 * XS[2]) / 8)
    torch.testing.assert_close(cohort.sum(ups.w), sum(XS[1:], XS[0]))  # a plain sum all the same
    assert cohort.participation == 1


def test_without_a_server_every_node_is_its_own_mean() -> None:
    ups, cohort = gossip()
    assert torch.equal(cohort.mean(ups.w), torch.stack(XS))
    assert torch.equal(cohort.sum(ups.w), torch.stack(XS))
    assert cohort.participation == 1


@pytest.mark.parametrize("name", ["mean", "sum"])
@pytest.mark.parametrize(
    "gather",
    [star, lambda: star(weighted=True), lambda: star(replies=1), gossip],
    ids=["uniform", "weighted", "one client", "gossip"],
)
def test_what_is_computed_is_a_fresh_tensor(
    name: str, gather: Callable[[], tuple[Any, Cohort]]
) -> None:
    """`cohort.mean(x).sub_(1)` changes neither the inputs nor the next mean."""
    ups, cohort = gather()
    compute = getattr(cohort, name)
    before, w = [x.clone() for x in ups.w], cohort.w.clone()
    first = compute(ups.w)
    expected = first.clone()
    first.sub_(1)
    second = compute(ups.w)
    assert torch.equal(second, expected)
    second.mul_(0)
    assert all(torch.equal(x, old) for x, old in zip(ups.w, before, strict=True))
    assert torch.equal(cohort.w, w)
    assert torch.equal(compute(list(ups.w)), expected)
    pointers = {x.data_ptr() for x in (*ups.w, cohort.w)}
    assert compute(ups.w).data_ptr() not in pointers


def test_a_stack_is_a_sequence_of_its_rows() -> None:
    ups, cohort = star()
    assert torch.equal(cohort.mean(torch.stack(ups.w)), cohort.mean(ups.w))


def test_a_sum_is_taken_in_the_order_of_the_clients() -> None:
    """In float32 another order gives other bits: 1e8 + 1 - 1e8 is 0, 1e8 - 1e8 + 1 is 1."""
    x, y, z = (torch.tensor([v]) for v in (1e8, 1.0, -1e8))
    assert weighted_sum([x, y, z], [1, 1, 1]).item() == 0
    assert weighted_sum([x, z, y], [1, 1, 1]).item() == 1


def test_a_mean_of_nobody_or_of_another_number_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one active client, got none"):
        weighted_sum([], [])
    _, cohort = star()
    with pytest.raises(ValueError, match="zip"):
        cohort.mean(XS[:2])


def test_a_field_that_nobody_sent_is_none() -> None:
    assert rows([Reply(i, Model(None), 1, 1) for i in range(2)]) == Model(None)  # type: ignore[arg-type]


def test_the_rounds_whose_state_a_client_needs() -> None:
    """Client 0's reply to round 3 was used at once; client 1 lost its state; client 2 was sent the
    model of round 2, and its reply was used two rounds later; client 3 is at work since round 6."""
    accepted, delays = torch.tensor([3, -1, 2, -1]), torch.tensor([0, 2, 2, 0])
    assert seen(accepted, None, ()) is None  # synchronous: those of ``accepted``
    rounds = seen(accepted, delays, [PendingRequest(3, 6, -1, None)])
    assert rounds is not None
    assert sorted(rounds.tolist()) == [-1, -1, 1, 3, 3, 4, 5]
    assert rounds.dtype == torch.int64
