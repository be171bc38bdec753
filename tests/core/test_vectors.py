"""What is done with each vector of a stack."""

import math

import pytest
import torch

from fedaccord.core.vectors import PIECE, clip_, distances, norm


def test_each_vector_is_clipped_by_its_own_norm() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    clip_(g, 1.0)
    assert torch.equal(g[1:], torch.tensor([[0.3, 0.4], [0.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(g[0], torch.tensor([0.6, 0.8], dtype=torch.float64))


def test_short_vectors_stay_as_they_are_and_zero_is_no_bound() -> None:
    short = torch.tensor([[0.3, -0.0], [0.1, 0.2]])
    assert torch.equal(clip_(short.clone(), 0.5), short)
    long = torch.full((4,), 100.0)
    assert torch.equal(clip_(long.clone(), 0.0), long)
    assert float(norm(clip_(long, 2.0))) == 2.0


def test_what_is_no_number_stays_none() -> None:
    for wrong in (float("nan"), float("inf")):
        g = torch.tensor([wrong, 1.0])
        assert not clip_(g, 1.0).isfinite().all()


@pytest.mark.parametrize("d", [1, PIECE, 2 * PIECE + 3])
def test_distances_are_those_of_the_whole_vectors(d: int) -> None:
    xs, centre = [*torch.randn(3, d, dtype=torch.float64)], torch.randn(d, dtype=torch.float64)
    wanted = [float((x - centre).pow(2).sum().sqrt()) for x in xs]
    assert distances(xs, centre).tolist() == pytest.approx(wanted, rel=1e-12)
    assert distances([centre], centre).tolist() == [0.0]
    xs[1][-1] = torch.nan
    assert [*map(math.isfinite, distances(xs, centre).tolist())] == [True, False, True]
