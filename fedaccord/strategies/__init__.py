"""The table of methods and plug-ins: name in a run config -> class. Nothing else."""

from fedaccord.strategies.afedpd import AFedPD
from fedaccord.strategies.afedpdsam import AFedPDSAM
from fedaccord.strategies.base import FederatedStrategy, PlugIn
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
from fedaccord.strategies.gossip import Gossip
from fedaccord.strategies.mofedsam import MoFedSAM
from fedaccord.strategies.relaxed_init import RelaxedInit
from fedaccord.strategies.sam import SAM
from fedaccord.strategies.scaffold import Scaffold

METHODS: dict[str, type[FederatedStrategy]] = {
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
    "dpsgd": DPSGD,
    "dfedavg": DFedAvg,
    "dfedavgm": DFedAvgM,
    "dfedsam": DFedSAM,
    "dfedsam-mgs": DFedSAMMGS,
    "dispfl": DisPFL,
}

PLUGINS: dict[str, type[PlugIn] | type[Gossip]] = {
    "relaxed-init": RelaxedInit,
    "sam": SAM,
    "gossip": Gossip,
}

__all__ = [
    "DPSGD",
    "METHODS",
    "PLUGINS",
    "SAM",
    "AFedPD",
    "AFedPDSAM",
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
    "MoFedSAM",
    "RelaxedInit",
    "Scaffold",
]
