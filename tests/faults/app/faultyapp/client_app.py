"""FedAccord's ClientApp, with a fault in the second round of some clients.

$FEDACCORD_FAULTS: JSON, a client's number -> hang, kill-process, kill-node; in a stage of a secure
sum with the stage and the round, from 0, as in "kill-node share 2".
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedaccord import client_app
from fedaccord.core.node_config import PARTITION_ID
from fedaccord.wire.instruction import is_handshake, read_instruction
from fedaccord.wire.records import SECURE, config_of

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    if not is_handshake(message):
        faults = json.loads(os.environ["FEDACCORD_FAULTS"])
        words = faults.get(str(context.node_config[PARTITION_ID]), "").split()
        kind, stage, number = (*words, *("", "", "1")[len(words) :])
        payload = config_of(message.content, SECURE)
        is_stage = kind and payload.get("stage", "") == stage
        if is_stage and _round(message, context, payload) == int(number):
            fault(kind)
    return client_app.app(message, context)


def _round(message: Message, context: Context, payload: Mapping[str, Any]) -> int:
    """From 0; of a secure sum's stage, which names none, the number of messages of the kind."""
    if not payload:
        return read_instruction(message).round
    count = int(str(config_of(context.state, "seen").get("messages", 0)))
    context.state["seen"] = ConfigRecord({"messages": count + 1})
    return count


def fault(kind: str) -> None:
    if kind == "kill-node":
        for process in psutil.Process().parents():
            if any("flower-supernode" in word for word in process.cmdline()):
                process.kill()
    if kind == "hang":
        time.sleep(10**6)
    os.kill(os.getpid(), signal.SIGKILL)
