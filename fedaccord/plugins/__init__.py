"""The plug-ins: what fits into the seats of any method."""

from fedaccord.core.options import describe
from fedaccord.core.plugin import PlugIn
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.robust import Robust
from fedaccord.plugins.sam import SAM

PLUGINS: dict[str, type[PlugIn]] = {
    "relaxed-init": RelaxedInit,
    "sam": SAM,
    "gossip": Gossip,
    "robust": Robust,
}

for _kind in PLUGINS.values():
    describe(_kind)
