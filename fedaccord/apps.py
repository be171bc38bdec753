"""The apps that Flower starts, each in a process of its own, as named in pyproject.toml.

They are apart from `server_app` and `client_app`, which other code may import in a process with the
user's environment.
"""

from fedaccord.process.threads import wait_passively

wait_passively()

from fedaccord.client_app import app as client_app  # noqa: E402  PyTorch is loaded from here on
from fedaccord.server_app import app as server_app  # noqa: E402

__all__ = ["client_app", "server_app"]
