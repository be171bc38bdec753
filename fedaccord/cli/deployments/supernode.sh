#!/bin/sh
# This device's SuperNode. What clients keep between rounds is stored in ./state.
cd "$(dirname "$0")" || exit 1
fedaccord doctor --deployment . || exit 1
exec fedaccord device . "$@"
