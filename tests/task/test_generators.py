"""The default random numbers of a block, on devices with a generator of their own."""

import pytest
import torch

from fedaccord.task.generators import drawn_from, generators, random_numbers, states_of

MPS = torch.device("mps")


@pytest.fixture
def of_mps(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """In place of the generator of Apple's GPU."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.mps, "manual_seed", generator.manual_seed)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda *_: generator.get_state())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, *_: generator.set_state(state))
    return generator


def test_numbers_of_apples_gpu_come_from_the_seed_and_its_state_is_restored(
    of_mps: torch.Generator,
) -> None:
    before, draws = of_mps.get_state(), []
    for seed in (5, 5, 6):
        with random_numbers(seed, MPS):
            draws.append(float(torch.rand((), generator=of_mps)))
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(of_mps.get_state(), before)


def test_a_draw_on_apples_gpu_is_seen_and_taken_back(of_mps: torch.Generator) -> None:
    states = states_of(generators(MPS, others=False))
    one = torch.rand((), generator=of_mps)
    [drawn] = drawn_from(states)
    drawn.set(states[1][1])
    assert torch.rand((), generator=of_mps) == one
