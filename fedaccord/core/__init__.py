"""The vocabulary of methods, and a round as pure functions; PyTorch without modules, no Flower."""

from fedaccord.core.cohort import Client, Cohort, Cohorts
from fedaccord.core.optimizer import SGD, AdamW, Momentum, Muon, Optimizer
from fedaccord.core.options import argument, option
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rule import (
    Direction,
    GradientAt,
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Shapes,
    Stateless,
)
from fedaccord.core.vectors import Vector, clip_, each_client, norm

__all__ = [
    "SGD",
    "AdamW",
    "Client",
    "Cohort",
    "Cohorts",
    "Direction",
    "GradientAt",
    "LocalConfig",
    "LocalResult",
    "LocalRule",
    "Model",
    "Momentum",
    "Muon",
    "Optimizer",
    "PlugIn",
    "Shapes",
    "Stateless",
    "Vector",
    "argument",
    "clip_",
    "each_client",
    "norm",
    "option",
]
