"""Secure sums if a client's neighbours are lost, and the bytes of their protocol."""

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.secure import client, server
from tests import federation
from tests.engine.test_faults import gap
from tests.secure.test_rounds import BITS, PROBLEM, W0, C, method


def circle(clients: Sequence[int], degree: int) -> dict[int, list[int]]:
    """The graph of two neighbours each, in the order of the clients."""
    n = len(clients)
    return {i: [clients[at - 1], clients[(at + 1) % n]] for at, i in enumerate(clients)}


def test_a_client_without_its_neighbours_shares_is_not_summed_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the circle 0 to 5 the clients 2 and 4 are lost: 3 has no neighbour then, and 0, 1 and 5
    are still connected."""
    strategy = method("scaffold", SecureSum(bits=BITS, range=64.0, neighbours=2))
    absent = federation.run(strategy, PROBLEM, W0, [[0, 1, 5]] * 2)
    right, rows = client._share, list[dict[str, Any]]()

    def share(payload: Any, memory: Any) -> Any:
        if memory["client"] in (2, 4):
            raise ValueError("lost")
        return right(payload, memory)

    monkeypatch.setattr(client, "_share", share)
    monkeypatch.setattr(server, "regular_graph", circle)
    history = federation.run(
        strategy, PROBLEM, W0, [range(C)] * 2, on_round=lambda round: rows.extend(round.clients)
    )
    few = "secure-sum: expected shares of at least 1 neighbours, got 0"
    assert [row["status"] for row in rows] == ["ok", "ok", "lost", few, "lost", "ok"] * 2
    assert torch.equal(history.state.w, absent.state.w)
    assert torch.equal(history.state.server.c, absent.state.server.c)
    assert gap("scaffold", history) < 1e-9


def test_an_odd_number_of_neighbours_is_the_next_even_one() -> None:
    assert {len(near) for near in server.regular_graph(range(9), 3).values()} == {4}


def test_the_bytes_of_a_client_are_those_of_its_upload_and_of_all_stages() -> None:
    near = C - 1
    history = federation.run(method("fedavg", SecureSum(bits=24)), PROBLEM, W0, [range(C)])
    keys = 2 * 33  # compressed points of P-256
    text = 16 + 4 + 4 + 2 * 52  # a nonce, two clients, a share of either secret
    token = len(urlsafe_b64encode(bytes(1 + 8 + 16 + (text // 16 + 1) * 16 + 32)))  # Fernet's
    shares = near * (8 + token) + 32  # receivers, sealed shares, the digest of the seed
    unmasking = C * 52  # shares of its own seed and of its neighbours'
    each = 4 * PROBLEM.dim + keys + shares + unmasking
    assert history.metrics["up-bytes"].tolist()[1:] == [C * each]
