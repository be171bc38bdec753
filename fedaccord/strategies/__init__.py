"""The table of methods and plug-ins: name in a run config -> class. Nothing else."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points

from fedaccord.core.options import describe
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import PLUGINS
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.robust import Robust
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.afedpd import AFedPD
from fedaccord.strategies.afedpdsam import AFedPDSAM
from fedaccord.strategies.centralised import Centralised
from fedaccord.strategies.dfedavg import DFedAvg
from fedaccord.strategies.dfedavgm import DFedAvgM
from fedaccord.strategies.dfedsam import DFedSAM
from fedaccord.strategies.dfedsam_mgs import DFedSAMMGS
from fedaccord.strategies.dispfl import DisPFL
from fedaccord.strategies.dpsgd import DPSGD
from fedaccord.strategies.fedadagrad import FedAdagrad
from fedaccord.strategies.fedadam import FedAdam
from fedaccord.strategies.fedadmm import FedADMM
from fedaccord.strategies.fedavg import FedAvg
from fedaccord.strategies.fedavgm import FedAvgM
from fedaccord.strategies.fedcm import FedCM
from fedaccord.strategies.feddeper import FedDeper
from fedaccord.strategies.feddyn import FedDyn
from fedaccord.strategies.fedgamma import FedGamma
from fedaccord.strategies.fedinit import FedInit
from fedaccord.strategies.fedlesam import FedLESAM
from fedaccord.strategies.fednova import FedNova
from fedaccord.strategies.fedpd import FedPD
from fedaccord.strategies.fedprox import FedProx
from fedaccord.strategies.fedsam import FedSAM
from fedaccord.strategies.fedsmoo import FedSMOO
from fedaccord.strategies.fedspeed import FedSpeed
from fedaccord.strategies.fedyogi import FedYogi
from fedaccord.strategies.local import Local
from fedaccord.strategies.mofedsam import MoFedSAM
from fedaccord.strategies.scaffold import Scaffold

BUILT_IN: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "fedinit": FedInit,
    "fedprox": FedProx,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fednova": FedNova,
    "fedsam": FedSAM,
    "fedlesam": FedLESAM,
    "scaffold": Scaffold,
    "fedgamma": FedGamma,
    "fedcm": FedCM,
    "mofedsam": MoFedSAM,
    "feddeper": FedDeper,
    "fedpd": FedPD,
    "fedadmm": FedADMM,
    "feddyn": FedDyn,
    "fedspeed": FedSpeed,
    "fedsmoo": FedSMOO,
    "afedpd": AFedPD,
    "afedpdsam": AFedPDSAM,
    "local": Local,
    "centralised": Centralised,
    "dpsgd": DPSGD,
    "dfedavg": DFedAvg,
    "dfedavgm": DFedAvgM,
    "dfedsam": DFedSAM,
    "dfedsam-mgs": DFedSAMMGS,
    "dispfl": DisPFL,
}

describe(FederatedStrategy)
for _kind in BUILT_IN.values():
    describe(_kind, common=FederatedStrategy)

GROUP = "fedaccord.methods"  # entry points: a method's name -> its class, in any package


class Methods(Mapping[str, type[FederatedStrategy]]):
    """Our methods and those of other packages, which are loaded when the table is first read."""

    @cached_property
    def _table(self) -> dict[str, type[FederatedStrategy]]:
        table = dict(BUILT_IN)
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            try:
                kind = entry.load()
            except Exception as error:
                raise ImportError(
                    f"the method {entry.name!r} of {entry.value} cannot be loaded "
                    f"({type(error).__name__}: {error}); fix or uninstall its package"
                ) from error
            if not (isinstance(kind, type) and issubclass(kind, FederatedStrategy)):
                raise ImportError(
                    f"the method {entry.name!r}: expected a subclass of FederatedStrategy at "
                    f"{entry.value}, got {kind!r}"
                )
            if entry.name in BUILT_IN and kind is not BUILT_IN[entry.name]:
                raise ImportError(
                    f"the method {entry.name!r} of {entry.value} has the name of one of ours; "
                    "give it another in its package"
                )
            table[entry.name] = kind
        return table

    def __getitem__(self, name: str) -> type[FederatedStrategy]:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


METHODS: Mapping[str, type[FederatedStrategy]] = Methods()

__all__ = [
    "DPSGD",
    "METHODS",
    "PLUGINS",
    "SAM",
    "AFedPD",
    "AFedPDSAM",
    "Centralised",
    "DFedAvg",
    "DFedAvgM",
    "DFedSAM",
    "DFedSAMMGS",
    "DisPFL",
    "FedADMM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCM",
    "FedDeper",
    "FedDyn",
    "FedGamma",
    "FedInit",
    "FedLESAM",
    "FedNova",
    "FedPD",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSpeed",
    "FedYogi",
    "FederatedStrategy",
    "Gossip",
    "Local",
    "MoFedSAM",
    "RelaxedInit",
    "Robust",
    "Scaffold",
]
