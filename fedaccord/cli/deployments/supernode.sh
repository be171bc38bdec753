#!/bin/sh
# This device's SuperNode. What clients keep between rounds is stored in ./state.
cd "$(dirname "$0")" || exit 1
# Flower reports its use and looks for updates on the internet, unless these say otherwise
export FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
export FLWR_DISABLE_UPDATE_CHECK="${FLWR_DISABLE_UPDATE_CHECK:-1}"
fedaccord doctor --deployment . || exit 1
exec fedaccord device . "$@"
