"""FedAccord's ClientApp, with a fault in the second round of some clients.

$FEDACCORD_FAULTS: JSON, a client's number -> hang, kill-process, kill-node.
"""

import json
import os
import signal
import time

import psutil
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedaccord import client_app
from fedaccord.wire.instruction import is_handshake, read_instruction

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    if not is_handshake(message):
        asked = read_instruction(message)
        faults = json.loads(os.environ["FEDACCORD_FAULTS"])
        if asked.round == 1 and str(asked.client) in faults:
            fault(faults[str(asked.client)])
    return client_app.app(message, context)


def fault(kind: str) -> None:
    if kind == "kill-node":
        for process in psutil.Process().parents():
            if any("flower-supernode" in word for word in process.cmdline()):
                process.kill()
    if kind == "hang":
        time.sleep(10**6)
    os.kill(os.getpid(), signal.SIGKILL)
