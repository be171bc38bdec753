"""The table of methods and plug-ins: name in a run config -> class.

A file of this folder is a method, unless its name begins with an underscore. The method's name is
the file's, with - for _.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from fedaccord.core import folder
from fedaccord.core.named import one_line
from fedaccord.core.optimizer import OPTIMIZERS
from fedaccord.core.options import describe, options
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import PLUGINS
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.robust import Robust
from fedaccord.plugins.sam import SAM

if TYPE_CHECKING:  # tools/sync.py writes these lines
    from fedaccord.strategies.afedpd import AFedPD as AFedPD
    from fedaccord.strategies.afedpdsam import AFedPDSAM as AFedPDSAM
    from fedaccord.strategies.dfedavg import DFedAvg as DFedAvg
    from fedaccord.strategies.dfedavgm import DFedAvgM as DFedAvgM
    from fedaccord.strategies.dfedsam import DFedSAM as DFedSAM
    from fedaccord.strategies.dfedsam_mgs import DFedSAMMGS as DFedSAMMGS
    from fedaccord.strategies.diloco import DiLoCo as DiLoCo
    from fedaccord.strategies.dispfl import DisPFL as DisPFL
    from fedaccord.strategies.ditto import Ditto as Ditto
    from fedaccord.strategies.dpsgd import DPSGD as DPSGD
    from fedaccord.strategies.fedadagrad import FedAdagrad as FedAdagrad
    from fedaccord.strategies.fedadam import FedAdam as FedAdam
    from fedaccord.strategies.fedadmm import FedADMM as FedADMM
    from fedaccord.strategies.fedavg import FedAvg as FedAvg
    from fedaccord.strategies.fedavgm import FedAvgM as FedAvgM
    from fedaccord.strategies.fedcm import FedCM as FedCM
    from fedaccord.strategies.feddeper import FedDeper as FedDeper
    from fedaccord.strategies.feddyn import FedDyn as FedDyn
    from fedaccord.strategies.fedexp import FedExP as FedExP
    from fedaccord.strategies.fedgamma import FedGamma as FedGamma
    from fedaccord.strategies.fedgloss import FedGloSS as FedGloSS
    from fedaccord.strategies.fedinit import FedInit as FedInit
    from fedaccord.strategies.fedlesam import FedLESAM as FedLESAM
    from fedaccord.strategies.fedlesam_d import FedLESAMD as FedLESAMD
    from fedaccord.strategies.fedlesam_s import FedLESAMS as FedLESAMS
    from fedaccord.strategies.fedmoswa import FedMoSWA as FedMoSWA
    from fedaccord.strategies.fedmuon import FedMuon as FedMuon
    from fedaccord.strategies.fednova import FedNova as FedNova
    from fedaccord.strategies.fedpac import FedPAC as FedPAC
    from fedaccord.strategies.fedpd import FedPD as FedPD
    from fedaccord.strategies.fedprox import FedProx as FedProx
    from fedaccord.strategies.fedsam import FedSAM as FedSAM
    from fedaccord.strategies.fedsmoo import FedSMOO as FedSMOO
    from fedaccord.strategies.fedspeed import FedSpeed as FedSpeed
    from fedaccord.strategies.fedyogi import FedYogi as FedYogi
    from fedaccord.strategies.local import Local as Local
    from fedaccord.strategies.mofedsam import MoFedSAM as MoFedSAM
    from fedaccord.strategies.scaffnew import Scaffnew as Scaffnew
    from fedaccord.strategies.scaffold import Scaffold as Scaffold


BUILT_IN: dict[str, type[FederatedStrategy]] = folder.classes(__name__, __path__, FederatedStrategy)
globals().update({kind.__name__: kind for kind in BUILT_IN.values()})

describe(FederatedStrategy)
for _kind in BUILT_IN.values():
    describe(_kind, common=FederatedStrategy)

log = logging.getLogger("flwr")
GROUP = "fedaccord.methods"  # entry points: a method's name -> its class, in any package


class Methods(Mapping[str, type[FederatedStrategy]]):
    """FedAccord's methods and those of other packages, loaded when the table is first read.

    A method of another package that cannot be used is left out, with a warning.
    """

    def __init__(self) -> None:
        self._left_out: dict[str, str] = {}

    def left_out(self, name: object) -> str:
        """Why a method of another package cannot be used; empty: there is none of this name."""
        return "" if name in self._table else self._left_out.get(str(name), "")

    @cached_property
    def _table(self) -> dict[str, type[FederatedStrategy]]:
        table = dict(BUILT_IN)
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            try:
                table[entry.name] = _method_of(entry)
            except Exception as error:  # the package's own code may raise anything
                reason = self._left_out[entry.name] = one_line(error)
                log.warning(
                    "the method %r of %s is left out (%s); fix or uninstall its package",
                    entry.name,
                    entry.value,
                    reason,
                )
        return table

    def __getitem__(self, name: str) -> type[FederatedStrategy]:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _method_of(entry: EntryPoint) -> type[FederatedStrategy]:
    """Raises what its package raises, TypeError for no method or as `options`, ValueError if its
    name is taken."""
    kind = entry.load()
    if not (isinstance(kind, type) and issubclass(kind, FederatedStrategy)):
        raise TypeError(f"expected a subclass of FederatedStrategy, got {kind!r}")
    if entry.name in BUILT_IN and kind is not BUILT_IN[entry.name]:
        raise ValueError("expected a name that none of ours has")
    if entry.name in (*PLUGINS, *OPTIMIZERS):
        raise ValueError(f"expected a name that no plug-in and no optimiser has, got {entry.name}")
    options(kind)  # raises if a default is of another type than its option
    of_all = {field.name for field in options(FederatedStrategy)}
    if again := sorted(of_all.intersection(vars(kind).get("__annotations__", ()))):
        raise ValueError(f"expected options of its own, got {again[0]}, which every method has")
    return kind


METHODS = Methods()

__all__ = ["METHODS", "PLUGINS", "SAM", "FederatedStrategy", "Gossip", "RelaxedInit", "Robust"]
__all__ += [kind.__name__ for kind in BUILT_IN.values()]
