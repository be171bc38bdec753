#!/bin/sh
# The SuperLink: encrypted, and only for SuperNodes whose keys are registered.
cd "$(dirname "$0")" || exit 1
# Flower reports its use and looks for updates on the internet, unless these say otherwise
export FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
export FLWR_DISABLE_UPDATE_CHECK="${FLWR_DISABLE_UPDATE_CHECK:-1}"
fedaccord doctor --deployment . || exit 1
umask 077 # its database has the clients' updates
exec flower-superlink --host @host@ --port @port@ --database "$PWD/superlink.db" \
    --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \
    --enable-supernode-auth --disable-runtime-dependency-installation "$@"
