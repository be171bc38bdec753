"""The process's default generators of random numbers: seeded, set back and restored."""

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fedaccord.core.rule import LocalConfig
from fedaccord.data.seeding import ALONE, seeded

LAYERS = 1  # the purpose of these random numbers, beside the order of the batches


class Generator(NamedTuple):
    """A default generator; its state is a value."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    equal: Callable[[Any, Any], bool]  # of two states


def generators(device: torch.device, others: bool) -> list[Generator]:
    """PyTorch's generators, of the CPU and of the device; others: also NumPy's and Python's."""
    result = [Generator(torch.get_rng_state, torch.set_rng_state, torch.equal)]
    if device.type == "cuda":
        get = partial(torch.cuda.get_rng_state, device)
        result.append(Generator(get, partial(torch.cuda.set_rng_state, device=device), torch.equal))
    elif device.type == "mps":
        result.append(Generator(torch.mps.get_rng_state, torch.mps.set_rng_state, torch.equal))
    return result + (OTHERS if others else [])


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two states of NumPy are equal: ("MT19937", state (624,), three numbers)."""
    return one[2:] == other[2:] and np.array_equal(one[1], other[1])


# a visit of a small model takes 2 ms, these two 0.1 ms: used only if the user's code may draw
OTHERS = [
    Generator(np.random.get_state, np.random.set_state, _equal),
    Generator(random.getstate, random.setstate, operator.eq),
]


def seed_of(config: LocalConfig) -> int:
    """The seed of a client's round."""
    entropy = np.random.SeedSequence((config.seed, config.round, config.client, LAYERS))
    return int(entropy.generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def random_numbers(seed: int, device: torch.device, others: bool = True) -> Iterator[None]:
    """A block in which default random numbers come from the seed; their states are restored.

    Other threads wait for its end, as for that of `seeded`.
    others: NumPy's and Python's numbers too, beside PyTorch's.
    """
    on_gpu = device.type in ("cuda", "mps")
    with (
        ALONE,
        torch.random.fork_rng(
            [device] if on_gpu else [], device_type=device.type if on_gpu else "cuda"
        ),
        seeded(seed) if others else nullcontext(),
    ):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        yield


def states_of(generators: Iterable[Generator]) -> list[tuple[Generator, Any]]:
    """The generators with their states."""
    return [(generator, generator.get()) for generator in generators]


def drawn_from(states: Iterable[tuple[Generator, Any]]) -> list[Generator]:
    """The generators whose states have changed since."""
    return [each for each, state in states if not each.equal(state, each.get())]
