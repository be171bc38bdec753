"""Functions as a user writes them, named in settings as ``tests.own:tiny``."""

from math import prod

from torch import nn


def tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def no_module() -> str:
    return "a module"
