"""What is done with each vector of a stack."""

import torch

from fedaccord.core.vectors import clip_, norm


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
