"""What clients keep between visits must not drive the server: bounds at partial participation.

Losses are linear and their gradients sum to 0, so that nothing but the methods' memory pulls at w.
"""

from typing import Any

import pytest
import torch
from torch import nn

from fedaccord import simulate

C, SHARE, T, K = 10, 0.1, 120, 2
BOUND = SHARE / (1 - SHARE)


def growth(algo: str, **keys: Any) -> float:
    """By which factor the server's steps grow in the second half of T rounds."""
    generator = torch.Generator().manual_seed(3)
    slopes = torch.randn(C, 4, generator=generator, dtype=torch.float64)
    clients = [(slope, torch.zeros(1, 1)) for slope in (slopes - slopes.mean(0)).split(1)]
    history = simulate(
        algo,
        clients=clients,
        model=nn.Linear(4, 1, bias=False),
        loss=lambda slope, _: slope.mean(),
        rounds=T,
        participation=SHARE,
        dtype=torch.float64,
        lr=0.1,
        lr_decay=1.0,
        weight_decay=0.0,
        clip_norm=None,
        local_steps=K,
        batch_size=0,
        record="weights",
        **keys,
    )
    assert history.weights is not None
    steps = history.weights.diff(dim=0).square().sum(1)
    return float((steps[-20:].mean() / steps[T // 2 - 20 : T // 2].mean()) ** 0.5)


@pytest.mark.parametrize("server", ["models", "updates"])
def test_fedinit_diverges_from_p_over_1_minus_p_on_if_models_are_averaged(server: str) -> None:
    own = {"fedinit.server": server}
    assert growth("fedinit", **own, **{"relaxed-init.beta": 0.8 * BOUND}) < 2
    far = growth("fedinit", **own, **{"relaxed-init.beta": 2 * BOUND})
    assert far > 20 if server == "models" else far < 2


@pytest.mark.parametrize(
    ("algo", "own", "diverges"),
    [
        ("fedcm", {}, True),
        ("fedpac", {"fedpac.inner": "sgd"}, True),
        ("fednova", {}, False),
        ("fedadmm", {"relaxed-init.center": "start"}, False),
    ],
)
def test_other_methods_diverge_from_there_on_if_their_server_keeps_the_jumps(
    algo: str, own: dict[str, Any], diverges: bool
) -> None:
    assert growth(algo, **own, **{"relaxed-init.beta": 0.8 * BOUND}) < 2
    assert (growth(algo, **own, **{"relaxed-init.beta": 2 * BOUND}) > 20) == diverges


@pytest.mark.parametrize("center", ["server", "start"])
def test_duals_sum_up_the_jumps_unless_their_anchor_moves(center: str) -> None:
    own = {"relaxed-init.beta": 0.7 * BOUND, "relaxed-init.center": center}
    assert (growth("feddyn", **own) > 20) == (center == "server")


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_feddeper_diverges_from_its_bound_on(lam: float) -> None:
    bound = SHARE * lam / (1 - SHARE * lam)
    for part, diverges in ((0.7, False), (2.5, True)):
        rho = 1 - (1 - part * bound) ** (1 / K)
        assert (growth("feddeper", **{"feddeper.rho": rho, "feddeper.lam": lam}) > 20) == diverges
