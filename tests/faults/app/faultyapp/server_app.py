"""FedAccord's ServerApp, with a SuperLink that fails at every second request to send, after it."""

import json
import os
from collections.abc import Iterable
from itertools import count

import httpx
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedaccord import server_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    push, requests = grid.push_messages, count()

    def failing(messages: Iterable[Message]) -> Iterable[str]:
        ids = push(messages)
        if next(requests) % 2 == 0:
            request = httpx.Request("POST", "http://superlink")
            httpx.Response(500, request=request).raise_for_status()
        return ids

    if "superlink" in json.loads(os.environ["FEDACCORD_FAULTS"]):
        grid.push_messages = failing  # type: ignore[method-assign]
    server_app.app(grid, context)
