"""The plug-ins, which replace hooks of any method. Each file of this folder is one, by its name
with - for _, unless the name begins with an underscore."""

from fedaccord.core import folder
from fedaccord.core.options import describe
from fedaccord.core.plugin import PlugIn

PLUGINS: dict[str, type[PlugIn]] = folder.classes(__name__, __path__, PlugIn)
globals().update({kind.__name__: kind for kind in PLUGINS.values()})

for _kind in PLUGINS.values():
    describe(_kind)
