"""The table of methods and plug-ins: name in a run config -> class. Nothing else."""

from fedaccord.strategies.afedpd import AFedPD
from fedaccord.strategies.base import FederatedStrategy, PlugIn
from fedaccord.strategies.fedavg import FedAvg
from fedaccord.strategies.feddyn import FedDyn
from fedaccord.strategies.fedinit import FedInit
from fedaccord.strategies.relaxed_init import RelaxedInit
from fedaccord.strategies.scaffold import Scaffold

METHODS: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "fedinit": FedInit,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "afedpd": AFedPD,
}

PLUGINS: dict[str, type[PlugIn]] = {
    "relaxed-init": RelaxedInit,
}

__all__ = [
    "METHODS",
    "PLUGINS",
    "AFedPD",
    "FedAvg",
    "FedDyn",
    "FedInit",
    "FederatedStrategy",
    "RelaxedInit",
    "Scaffold",
]
