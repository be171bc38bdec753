"""The plug-ins, which replace hooks of any method. Each file of this folder is one, by its name
with - for _, unless the name begins with an underscore."""

from typing import TYPE_CHECKING

from fedaccord.core import folder
from fedaccord.core.options import describe
from fedaccord.core.plugin import PlugIn

if TYPE_CHECKING:  # tools/sync.py writes these lines
    from fedaccord.plugins.broadcast import Broadcast as Broadcast
    from fedaccord.plugins.compress import Compress as Compress
    from fedaccord.plugins.dp import DP as DP
    from fedaccord.plugins.gossip import Gossip as Gossip
    from fedaccord.plugins.relaxed_init import RelaxedInit as RelaxedInit
    from fedaccord.plugins.robust import Robust as Robust
    from fedaccord.plugins.sam import SAM as SAM
    from fedaccord.plugins.secure_sum import SecureSum as SecureSum


PLUGINS: dict[str, type[PlugIn]] = folder.classes(__name__, __path__, PlugIn)
globals().update({kind.__name__: kind for kind in PLUGINS.values()})

for _kind in PLUGINS.values():
    describe(_kind)
