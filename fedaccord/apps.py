"""The apps as Flower starts them, each in a process of its own: what pyproject.toml names.

Not `server_app` and `client_app` themselves, which the engine imports into a notebook too: there
the environment is the user's.
"""

from fedaccord.process.threads import wait_passively

wait_passively()

from fedaccord.client_app import app as client_app  # noqa: E402  PyTorch is loaded from here on
from fedaccord.server_app import app as server_app  # noqa: E402

__all__ = ["client_app", "server_app"]
