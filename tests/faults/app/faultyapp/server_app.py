"""FedAccord's ServerApp as it is."""

from fedaccord import server_app

app = server_app.app
