#!/bin/sh
# The SuperLink: encrypted, and only for SuperNodes whose keys are registered.
cd "$(dirname "$0")" || exit 1
fedaccord doctor --deployment . || exit 1
exec flower-superlink --host 0.0.0.0 --port @port@ --database "$PWD/superlink.db" \
    --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \
    --enable-supernode-auth --disable-runtime-dependency-installation "$@"
